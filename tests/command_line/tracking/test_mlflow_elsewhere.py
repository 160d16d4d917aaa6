"""A run that was continued in another folder: what is behind neither deletes nor relabels what is ahead in MLflow."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.tracked import open_tracker, record, save, tracked
from trainer.files import write_json
from trainer.tracking.mlflow.checkpoints import CheckpointSender
from trainer.tracking.mlflow.delivery import Delivery
from trainer.tracking.mlflow.record import RunInfo
from trainer.tracking.sync import send


def trained(path: Path, first: int, last: int, resume_step: int | None = None) -> None:
    tracker = open_tracker(path, resume_step=resume_step)
    for step in range(first, last + 1):
        tracker.log(step, {"loss": 1.0 / step})
    save(path, last)
    write_json(path / "config.json", {"steps": last})
    tracker.close("FINISHED" if last == 20 else "KILLED", {})


def killed(path: Path) -> None:
    """As if it was killed before it could end."""
    write_json(path / "mlflow.json", {key: value for key, value in record(path).items() if key != "delivered"})
    (path / "summary.json").unlink()


@pytest.fixture
def behind(folder: Path, store: str) -> Path:
    """Machine A's folder, at step 7 of a run that machine B has finished, at step 20."""
    ours, theirs = folder / "a/run", folder / "b/run"
    trained(ours, 1, 7)
    shutil.copytree(ours, theirs)
    killed(ours)
    trained(theirs, 8, 20, resume_step=7)
    write_json(ours / "config.json", {"stale": True})
    return ours


def state(client: MlflowClient, run_id: str) -> tuple[Any, ...]:
    run = client.get_run(run_id)
    tags = dict(run.data.tags)
    artifacts = {item.path for item in client.list_artifacts(run_id)}
    kept = {item.path for item in client.list_artifacts(run_id, "checkpoints")}
    return run.info.status, run.info.end_time, tags, artifacts, kept, run.data.metrics


def test_a_folder_that_is_behind_changes_nothing_in_mlflow(
    store: str, behind: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, run_id = MlflowClient(store), record(behind)["run_id"]
    before = state(client, run_id)
    assert before[0] == "FINISHED"
    assert "checkpoints/step-00000020" in before[4]
    outcome = send(behind)
    assert outcome.message.startswith("continued elsewhere (MLflow has step 20)")
    assert outcome.status == "skipped"
    assert state(client, run_id) == before
    assert "stale" not in Path(client.download_artifacts(run_id, "config.json")).read_text()
    assert send(behind).status == "complete"
    trained(behind, 8, 9, resume_step=7)
    assert state(client, run_id) == before
    (said,) = [line for line in caplog.messages if "continued elsewhere" in line]
    with (behind / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "time": 1.0, "new": 1.0}\n')  # of a metric that MLflow does not have
    Delivery(behind, store, RunInfo.read(behind), "session").send_new(pause=lambda: None)
    assert state(client, run_id) == before
    assert f"use resume=mlflow:{run_id} and another output_dir" in said


def test_a_run_continued_here_from_an_earlier_checkpoint_is_not_taken_for_one_continued_elsewhere(
    folder: Path, store: str
) -> None:
    path = folder / "a/run"
    trained(path, 1, 7)
    shutil.rmtree(path / "checkpoints")
    tracked(path, 5, "FAILED", resume_step=4)  # where MLflow has step 7
    client, run_id = MlflowClient(store), record(path)["run_id"]
    assert client.get_run(run_id).info.status == "FAILED"
    assert "continued_elsewhere" not in record(path)


def test_no_checkpoint_of_a_later_step_is_removed(folder: Path, store: str) -> None:
    path = folder / "a/run"
    trained(path, 1, 7)
    client = MlflowClient(store)
    run = client.get_run(record(path)["run_id"])
    for step in (3, 9):
        client.log_text(run.info.run_id, "{}", f"checkpoints/step-{step:08d}/manifest.json")
    CheckpointSender(client, run, path, "last").send(lambda name, size: None)
    kept = {item.path.rpartition("-")[2] for item in client.list_artifacts(run.info.run_id, "checkpoints")}
    assert kept == {"00000007", "00000009"}


@pytest.mark.usefixtures("plots")
def test_what_is_refused_for_good_keeps_no_checkpoint_back(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MlflowClient.log_artifact

    def refuse(self: MlflowClient, run_id: str, path: str, *place: Any) -> None:
        if path.endswith("plots"):
            raise PermissionError("no folder may be sent")
        real(self, run_id, path, *place)

    monkeypatch.setattr("trainer.tracking.mlflow.feed.LONGEST_PAUSE_S", 0)
    monkeypatch.setattr(MlflowClient, "log_artifact", refuse)
    path = folder / "a/run"
    trained(path, 1, 7)
    client = MlflowClient(store)
    assert "delivered" not in record(path)
    (kept,) = client.list_artifacts(record(path)["run_id"], "checkpoints")
    assert kept.path == "checkpoints/step-00000007"
    assert client.get_run(record(path)["run_id"]).info.status == "KILLED"
    outcome = send(path)
    assert outcome.status == "incomplete"
    assert outcome.message.endswith("lacks plots: no folder may be sent")
