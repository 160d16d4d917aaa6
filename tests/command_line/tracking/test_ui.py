"""``scripts/ui.py`` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.serving import serve_ui
from tests.tracked import tracked
from trainer.errors import UserError
from trainer.tracking.mlflow.addresses import tracking_uri
from trainer.tracking.ui import newest_runs

PROJECT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, str(PROJECT / "scripts" / "ui.py")]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return os.environ | {"PYTHONUNBUFFERED": "1"}


def ui(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=300)


def listens(address: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


def test_before_the_first_run_it_prints_how_to_start_one(tmp_path: Path, environment: dict[str, str]) -> None:
    done = ui(environment)
    assert done.returncode == 2
    assert "no runs yet in" in done.stderr
    assert "python scripts/train.py recipe=gpt2 precision=bf16" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_answer_is_named(environment: dict[str, str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = ui(environment | {"MLFLOW_TRACKING_URI": address})
    assert done.returncode == 2
    assert f"cannot read an MLflow store at {address}" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_serves_the_newest_runs_until_it_is_stopped(tmp_path: Path, environment: dict[str, str]) -> None:
    run_ids = []
    for name in ("bignet-fp32-s0", "bignet-bf16-s0"):
        tracker = tracked(tmp_path / name, experiment="bignet")
        run_ids.append(tracker.run_id)
    with pytest.raises(UserError, match="there are: Default, bignet"):
        newest_runs(tracking_uri(), "gpt2", 6)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process, printed = serve_ui(f"port={port}")
        children = psutil.Process(process.pid).children(recursive=True)
        try:
            assert f"port {port} is taken" in printed
            address = re.search(r"experiment bignet: (http://127\.0\.0\.1:\d+)/#/experiments/1/runs", printed)
            assert address, printed
            assert f":{port}/" not in address[0]
            assert listens(address[1])
            assert f"runs=%5B%22{run_ids[1]}%22%2C%22{run_ids[0]}%22%5D&experiments=%5B%221%22%5D" in printed
            assert "compare bignet-bf16-s0, bignet-fp32-s0:" in printed
            both = f"attributes.run_id%20IN%20%28%27{run_ids[1]}%27%2C%20%27{run_ids[0]}%27%29"
            assert f"&compareRunsMode=CHART&searchFilter={both}&orderByKey=" in printed
            assert children
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=300)[0]
    assert process.returncode == 0
    assert "stopped" in rest
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not listens(address[1])
