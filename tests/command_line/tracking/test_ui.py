"""``scripts/ui.py`` as a user runs it."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from scripts.ui import main
from tests.command_line.conftest import Result
from tests.serving import serve_ui
from tests.tracked import tracked
from trainer.errors import UserError
from trainer.tracking.mlflow.addresses import tracking_uri
from trainer.tracking.ui import columns, newest_runs


def listens(address: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


def test_what_cannot_be_shown_is_said_in_a_sentence(
    folder: Path, script: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = script(main)
    assert (done.code, "no runs yet in" in done.err) == (2, True)
    assert not list(folder.iterdir())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        done = script(main)
    assert (done.code, f"cannot read an MLflow store at {address}" in done.err) == (2, True)


def test_it_serves_the_newest_runs_until_it_is_stopped(folder: Path) -> None:
    names = ("bignet-fp32-s0", "bignet-bf16-s0")
    params = {"precision": "fp32", "precision.mode": "fp32", "steps": 3, "run_name": "a"}
    others = params | {"precision": "bf16", "precision.mode": "bf16", "run_name": "b"}
    first, second = (
        tracked(folder / name, experiment="bignet", params=each, tags={"team": "a", "processes": "1"}).run_id
        for name, each in zip(names, (params, others), strict=True)
    )
    chosen = columns(newest_runs(tracking_uri())[1])
    assert [*chosen] == [
        "tags.`team`", "params.`precision`", "metrics.`final/throughput`", "metrics.`final/peak_memory_mib`",
    ]  # fmt: skip
    with pytest.raises(UserError, match="there are: Default, bignet"):
        newest_runs(tracking_uri(), "gpt2")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process, printed = serve_ui(f"port={port}")
        children = psutil.Process(process.pid).children(recursive=True)
        try:
            assert f"port {port} is taken" in printed
            table = r"all runs \(bignet\):\n  (http://127\.0\.0\.1:\d+)/#/experiments/1/runs\S*&viewStateShareKey=mantissa\n"
            address = re.search(table, printed)
            assert address, printed
            assert f":{port}/" not in address[0]
            assert listens(address[1])
            assert f"runs=%5B%22{second}%22%2C%22{first}%22%5D&experiments=%5B%221%22%5D" in printed
            assert "compare bignet-bf16-s0, bignet-fp32-s0:" in printed
            both = f"attributes.run_id%20IN%20%28%27{second}%27%2C%20%27{first}%27%29"
            assert f"&compareRunsMode=CHART&searchFilter={both}&orderByKey=" in printed
            assert children
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=300)[0]
    assert (process.returncode, "stopped" in rest) == (0, True)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not listens(address[1])
