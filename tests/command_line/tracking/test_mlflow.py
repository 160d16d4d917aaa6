"""Runs that go to a real MLflow store, through the tracker."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from trainer.files import write_json
from trainer.tracking.mlflow import feed as mlflow_feed
from trainer.tracking.mlflow.store import connect
from trainer.tracking.mlflow.tables import log_modules
from trainer.tracking.tracker import Tracker, Tracking

# MLflow's own, raised inside the feed's thread: SQLAlchemy 2.1 deprecates an option of MLflow's models.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

PROJECT = Path(__file__).resolve().parents[3]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has been through its migrations, which take seconds, to be copied."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    connect(f"sqlite:///{path}")
    return path


@pytest.fixture
def fresh_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def uri(tmp_path: Path, fresh_uri: str, empty_store: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return fresh_uri


def open_tracker(
    folder: Path, uri: str | None = None, *, system: bool = False, patience_s: float = 300.0, **options: Any
) -> Tracker:
    folder.mkdir(exist_ok=True)
    run: dict[str, Any] = {"experiment": "gpt2", "run_name": folder.name, "params": {}, "tags": {}}
    config = Tracking(uri=uri, system_metrics=system, flush_every_s=0.05, patience_s=patience_s)
    return Tracker(config, folder, **(run | options))


def wait_for_run(tracker: Tracker) -> str:
    deadline = time.monotonic() + 300
    while tracker.run_id is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return tracker.run_id


def steps_of(uri: str, run_id: str | None, metric: str) -> list[int]:
    assert run_id
    return sorted(point.step for point in connect(uri).get_metric_history(run_id, metric))


@pytest.mark.usefixtures("plots")
def test_a_run_arrives_whole(tmp_path: Path, uri: str) -> None:
    folder = tmp_path / "gpt2 bf16 s0"
    params: dict[str, object] = {
        "recipe.size": "mini", "seed": 0, "resume": None, "deterministic": False, "betas": [0.9, 0.95],
        "empty": "", "long": "x" * 9000, "files[0]": "a",
    } | {f"many.{index}": index for index in range(150)}  # fmt: skip
    tags = {"precision": "bf16", "hardware": "CPU"}
    tracker = open_tracker(folder, params=params, tags=tags)
    for step in range(1, 301):
        metrics = {f"metric_{index}": float(step) for index in range(5)}
        tracker.log(step, metrics | {"loss": NAN if step == 7 else INF if step == 8 else 1.0 / step})
    (folder / "config.yaml").write_text("seed: 0\n")
    write_json(folder / "precision.json", {"modules": [{"module": "a", "compute": "bfloat16"}]})
    write_json(folder / "failure.json", {"step": 3})
    for kept in ("best", "checkpoints"):
        (folder / kept).mkdir()
        (folder / kept / "model.safetensors").write_bytes(b"w")
    tracker.close("FINISHED", {"loss": 0.1})

    client = connect(uri)
    assert tracker.run_id
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "gpt2 bf16 s0"
    assert client.get_experiment(run.info.experiment_id).name == "gpt2"
    assert run.data.params["seed"] == "0"
    assert run.data.params["resume"] == "null"
    assert run.data.params["deterministic"] == "false"
    assert run.data.params["betas"] == "[0.9, 0.95]"
    assert run.data.params["files_0_"] == "a"
    assert run.data.params["long"].endswith("x…")
    assert len(run.data.params) == len(params)
    assert tags.items() <= run.data.tags.items()
    assert steps_of(uri, tracker.run_id, "metric_4") == list(range(1, 301))
    assert steps_of(uri, tracker.run_id, "loss") == [step for step in range(1, 301) if step not in (7, 8)]
    assert steps_of(uri, tracker.run_id, "loss_nonfinite") == [7, 8]
    assert run.data.metrics["loss"] == pytest.approx(1 / 300)
    assert {item.path for item in client.list_artifacts(tracker.run_id)} == {
        "config.yaml", "summary.json", "plots", "best", "precision.json", "precision_modules.json", "failure.json",
    }  # fmt: skip
    table = client.load_table(run.info.experiment_id, "precision_modules.json", [tracker.run_id])
    assert table.to_dict("list") == {"module": ["a"], "compute": ["bfloat16"]}
    log_modules(client, tracker.run_id, folder / "precision.json")  # as when the run is resumed
    assert client.load_table(run.info.experiment_id, "precision_modules.json", [tracker.run_id]).equals(table)
    shown = client.get_run(tracker.run_id).data.tags["mlflow.loggedArtifacts"]
    assert json.loads(shown) == [{"path": "precision_modules.json", "type": "table"}]
    assert [item.path for item in client.list_artifacts(tracker.run_id, "best")] == ["best/model.safetensors"]
    assert list((tmp_path / "mlartifacts" / "gpt2" / tracker.run_id).rglob("model.safetensors"))
    record = json.loads((folder / "mlflow.json").read_text())
    assert (record["run_id"], record["tracking_uri"]) == (tracker.run_id, uri)


def test_runs_of_a_sweep_share_a_process_and_nothing_else(tmp_path: Path, uri: str) -> None:
    trackers = []
    for name, experiment in (
        ("gpt2-fp32-s0", "gpt2"),
        ("gpt2-bf16-s0", "gpt2"),
        ("bignet-bf16-s0", "bignet"),
    ):
        tracker = open_tracker(tmp_path / name, experiment=experiment, tags={"name": name})
        tracker.log(1, {"loss": float(len(name))})
        tracker.close("FAILED" if "fp32" in name else "FINISHED", {})
        trackers.append((name, experiment, tracker))
    import mlflow

    assert mlflow.active_run() is None
    client = connect(uri)
    for name, experiment, tracker in trackers:
        assert tracker.run_id
        run = client.get_run(tracker.run_id)
        assert run.info.run_name == run.data.tags["name"] == name
        assert run.info.status == ("FAILED" if "fp32" in name else "FINISHED")
        assert client.get_experiment(run.info.experiment_id).name == experiment
        assert run.data.metrics == {"loss": float(len(name))}
    assert not [thread.name for thread in threading.enumerate() if thread.name == "mlflow-feed"]


def test_resuming_continues_the_same_run_and_duplicates_no_point(tmp_path: Path, uri: str) -> None:
    folder = tmp_path / "run"
    first = open_tracker(folder, params={"steps": 8, "seed": 0})
    for step in range(1, 9):
        first.log(step, {"loss": float(step)})
        if step % 2 == 0:
            first.log(step, {"valid/loss": float(step)})
    first.close("KILLED", {})
    with (folder / "metrics.jsonl").open("a") as file:  # logged, but killed before it was sent
        file.write(json.dumps({"step": 9, "time": 1.0, "loss": 9.0}) + "\n")
        file.write(json.dumps({"step": 10, "time": 1.0, "loss": 10.0, "valid/loss": 10.0}) + "\n{")

    # Back to a checkpoint before what was sent, then one after it.
    for resume_step in (6, 12):
        second = open_tracker(folder, params={"steps": 14, "seed": 0}, resume_step=resume_step)
        if resume_step == 6:
            for step in (7, 8):
                second.log(step, {"loss": float(step), "valid/loss": float(step)})
            for step in (9, 10, 11, 12):
                second.log(step, {"loss": float(step)})
        else:
            second.log(13, {"loss": 13.0, "valid/loss": 13.0})
        second.close("FINISHED", {})
        assert second.run_id == first.run_id

    assert steps_of(uri, first.run_id, "loss") == list(range(1, 14))
    assert steps_of(uri, first.run_id, "valid/loss") == [2, 4, 6, 8, 13]
    assert first.run_id
    run = connect(uri).get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"steps": "8", "seed": "0"}
    assert run.data.tags["changed_on_resume"] == "steps=14"


def test_what_was_logged_but_never_sent_is_sent_on_resume(tmp_path: Path, uri: str) -> None:
    folder = tmp_path / "run"
    first = open_tracker(folder)
    first.log(1, {"loss": 1.0})
    first.close("KILLED", {})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "time": 1.0, "valid/loss": 1.0}) + "\n")
        file.write(json.dumps({"step": 2, "time": 1.0, "loss": 2.0, "valid/loss": 2.0}) + "\n")
    second = open_tracker(folder, resume_step=2)
    second.close("FINISHED", {})
    assert steps_of(uri, first.run_id, "loss") == [1, 2]
    assert steps_of(uri, first.run_id, "valid/loss") == [1, 2]


def test_a_line_is_sent_when_it_is_whole(tmp_path: Path, uri: str) -> None:
    tracker = open_tracker(tmp_path / "run")
    tracker.log(1, {"loss": 1.0})
    wait_for_run(tracker)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "time": 1.0, ')
        file.flush()
        time.sleep(0.4)
        file.write('"loss": 2.0}\n')
    tracker.close("FINISHED", {})
    assert steps_of(uri, tracker.run_id, "loss") == [1, 2]


def test_a_run_deleted_in_mlflow_continues_as_a_new_one(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_tracker(tmp_path / "run")
    first.log(1, {"loss": 1.0})
    first.close("KILLED", {})
    connect(uri).delete_run(first.run_id or "")
    second = open_tracker(tmp_path / "run", resume_step=1)
    second.log(2, {"loss": 2.0})
    second.close("FINISHED", {})
    assert second.run_id != first.run_id
    assert steps_of(uri, second.run_id, "loss") == [1, 2]
    assert "continues as a new one" in caplog.text


PROCESS = """
import sys
from pathlib import Path
from trainer.files import in_use
from trainer.tracking.tracker import Tracker, Tracking
folder = Path(sys.argv[1])
folder.mkdir()
config = Tracking(flush_every_s=0.05, patience_s=300)
with in_use(folder):  # as training does: what one has not sent yet, the other must not send too
    tracker = Tracker(config, folder, experiment="race", run_name=folder.name, params={}, tags={})
    for step in range(200):
        tracker.log(step, {"loss": 1.0, "lr": 0.1})
    tracker.close("FINISHED", {})
"""


def test_processes_that_start_at_once_share_a_fresh_store(tmp_path: Path, fresh_uri: str) -> None:
    uri, command = fresh_uri, [sys.executable, "-c", PROCESS]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    started = [
        forks.Popen(
            [*command, str(tmp_path / name)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("a", "b")
    ]
    outputs = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert not any("MLflow" in output for output in outputs), outputs
    client = connect(uri)
    experiment = client.get_experiment_by_name("race")
    assert experiment
    runs = client.search_runs([experiment.experiment_id])
    assert Counter((run.info.run_name, run.info.status) for run in runs) == {
        (name, "FINISHED"): 1 for name in ("a", "b")
    }
    assert all(steps_of(uri, run.info.run_id, "lr") == list(range(200)) for run in runs)


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_an_absent_server_neither_slows_nor_fails_a_run(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "36000")  # whoever waited for an answer would not come back
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "hangs":
            server.listen()
        absent = f"http://127.0.0.1:{server.getsockname()[1]}"
        tracker = open_tracker(tmp_path / "run", absent, patience_s=1.5)
        tracker.log(0, {"loss": 1.0})
        if kind == "hangs":
            server.settimeout(300)
            asked = server.accept()[0]  # from here on the feed waits for an answer
        for step in range(1, 500):
            tracker.log(step, {"loss": 1.0})
        tracker.close("FINISHED", {"loss": 1.0})
        if kind == "hangs":
            asked.close()
    warnings = [record.getMessage() for record in caplog.records if "upload incomplete" in record.getMessage()]
    assert len(warnings) == 1
    assert absent in warnings[0]
    assert f"python scripts/sync.py {tmp_path / 'run'}" in warnings[0]
    assert tracker.run_id is None
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 500
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"status": "FINISHED", "loss": 1.0}


def test_a_deleted_experiment_is_named_and_a_restored_one_gets_what_it_missed(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(uri)
    experiment_id = client.create_experiment("gpt2")
    client.delete_experiment(experiment_id)
    with caplog.at_level(logging.INFO, "mantissa"):
        tracker = open_tracker(tmp_path / "run")
        tracker.log(1, {"loss": 1.0})
        deadline = time.monotonic() + 300
        while "the experiment gpt2 was deleted" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert tracker.run_id is None
        client.restore_experiment(experiment_id)
        wait_for_run(tracker)
        tracker.close("FINISHED", {})
    assert steps_of(uri, tracker.run_id, "loss") == [1]
    assert "is available again" in caplog.text
    assert "upload incomplete" not in caplog.text


def test_a_locked_store_gets_what_it_missed(tmp_path: Path, uri: str) -> None:
    tracker = open_tracker(tmp_path / "run")
    wait_for_run(tracker)
    lock = sqlite3.connect(tmp_path / "mlflow.db")
    lock.execute("BEGIN EXCLUSIVE")
    for step in range(50):
        tracker.log(step, {"loss": 1.0})
    time.sleep(0.3)
    lock.rollback()
    lock.close()
    tracker.close("FINISHED", {})
    assert steps_of(uri, tracker.run_id, "loss") == list(range(50))


@pytest.mark.usefixtures("plots")
def test_an_artifact_that_cannot_be_kept_is_reported_and_the_run_ends(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = open_tracker(tmp_path / "run")
    tracker.log(1, {"loss": 1.0})
    (tmp_path / "mlartifacts").write_text("a file where the folder of artifacts should be")
    tracker.close("FINISHED", {})
    assert "the artifacts summary.json, plots" in caplog.text
    assert tracker.run_id
    assert connect(uri).get_run(tracker.run_id).info.status == "FINISHED"


def test_system_metrics_are_sampled_and_end_with_the_run(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_feed, "SYSTEM_METRICS_EVERY_S", 0.05)
    first = open_tracker(tmp_path / "run", system=True)
    run_id = wait_for_run(first)
    deadline = time.monotonic() + 300
    while len(steps_of(uri, run_id, "system/cpu_utilization_percentage")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.close("KILLED", {})
    second = open_tracker(tmp_path / "run", system=True, resume_step=0)
    wait_for_run(second)
    time.sleep(1.0)
    second.close("FINISHED", {})
    steps = steps_of(uri, run_id, "system/cpu_utilization_percentage")
    assert steps == list(range(len(steps)))
    assert not [thread.name for thread in threading.enumerate() if "SystemMetrics" in thread.name]
