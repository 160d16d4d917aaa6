"""``scripts/ui.py`` as a user runs it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from scripts.ui import main
from tests.command_line.conftest import Result
from tests.serving import free_port, serve_ui
from tests.tracked import tracked
from trainer.tracking.tracked_run import TrackedRun


def test_a_store_without_runs_is_named_and_a_server_has_a_page_of_its_own(
    folder: Path, script: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = script(main)
    assert (done.code, "no runs yet in" in done.err) == (2, True)
    assert not list(folder.iterdir())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@host:5000")
    done = script(main)
    assert (done.code, done.out) == (0, "the runs are at http://***@host:5000\n")


@pytest.mark.usefixtures("store")
def test_it_serves_the_store_until_it_is_stopped(folder: Path, script: Callable[..., Result]) -> None:
    tracked(folder / "run")
    port, experiment = free_port(), TrackedRun.read(folder / "run").experiment_id
    process, printed = serve_ui(f"port={port}")
    assert f"open http://127.0.0.1:{port} when" in printed
    view = "workflowType=machine_learning&viewStateShareKey=mantissa"
    assert f"\n  e           http://127.0.0.1:{port}/#/experiments/{experiment}/runs?{view}\n" in printed
    with urlopen(f"http://127.0.0.1:{port}/health") as answer:
        assert answer.status == 200
    done = script(main, f"port={port}")
    assert (done.code, f"port={port} cannot be used" in done.err) == (2, True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 0
