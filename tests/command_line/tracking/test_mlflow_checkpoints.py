"""Checkpoints in MLflow: sent once, pruned, and fetched by a machine that has nothing else."""

from __future__ import annotations

import errno
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from tests.command_line.conftest import SMALLEST, Train
from tests.helpers import same_bits
from tests.tracked import run_id, save, tracked
from trainer.checkpoint.reader import load
from trainer.errors import UserError
from trainer.run.run import Run
from trainer.tracking import follower
from trainer.tracking.checkpoints import stored_names
from trainer.tracking.fetch import fetch
from trainer.tracking.sync import send
from trainer.tracking.tracked_run import TrackedRun

JOB = (
    *SMALLEST,
    *("deterministic=true", "log_every=1", "steps=6", "eval_every=3", "profiler=none", "run_name=run"),
    *("tracking.system_metrics=false", "tracking.flush_every_s=0.05"),
)
RUN = Path("outputs/run")


@pytest.fixture
def client(store: str) -> MlflowClient:
    return MlflowClient(store)


@pytest.fixture
def saved(succeed: Train, store: str) -> str:
    """The id of a run that has finished, with the checkpoints of steps 3 and 6 in MLflow."""
    succeed(*JOB, "tracking.checkpoints=all", "checkpoint.keep=2")
    return run_id(RUN)


def state(client: MlflowClient, run_id: str) -> tuple[Any, ...]:
    run = client.get_run(run_id)
    steps = Counter(point.step for point in client.get_metric_history(run_id, "train/loss"))
    return run.info.status, run.info.end_time, dict(run.data.tags), steps


def test_what_cannot_be_removed_is_reported_once_and_stops_nothing(
    folder: Path, client: MlflowClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*given: Any, **options: Any) -> None:
        raise PermissionError("no right at http://me:s3cret@host to delete")

    save(folder / "run", 3)
    (folder / "run" / "config.json").write_text("{}")
    tracked(folder / "run", 3, "KILLED")
    shutil.rmtree(save(folder / "run", 6).with_name("step-00000003"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalArtifactRepository, "delete_artifacts", forbidden)
        tracked(folder / "run", 6, resume_step=3)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "mantissa"]
    assert "no right at http://***@host to delete" in said
    assert len(stored_names(client, run_id(folder / "run"))) == 2


def test_all_checkpoints_are_sent_as_they_are_saved_and_pruned_with_the_folder(
    succeed: Train, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[str] = Counter()
    real, real_save = MlflowClient.log_artifact, Run._save

    def log_artifact(self: MlflowClient, run_id: str, path: str, place: str | None = None) -> None:
        if place and place.startswith("checkpoints/"):
            sent[f"{place}/{Path(path).name}"] += 1
        real(self, run_id, path, place)

    def save_and_wait(self: Run, score: Any) -> None:
        real_save(self, score)
        self.writer.finish()
        assert self.metric_log
        while not (own := self.metric_log.run.run_id) or f"step-{self.trainer.step:08d}" not in stored_names(
            client, own
        ):
            time.sleep(0.05)

    monkeypatch.setattr(MlflowClient, "log_artifact", log_artifact)
    monkeypatch.setattr(Run, "_save", save_and_wait)
    succeed(*JOB, "steps=12", "tracking.checkpoints=all", "checkpoint.keep=2")
    here = sorted(path.name for path in (RUN / "checkpoints").iterdir())
    assert stored_names(client, run_id(RUN)) == here
    assert len(here) in (2, 3)
    assert len({place.split("/")[1] for place in sent}) == 4
    assert set(sent.values()) == {1}  # each file of each checkpoint once


def test_what_does_not_arrive_is_named_and_sent_later(
    train: Train, succeed: Train, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MlflowClient.log_artifact

    def refuse(self: MlflowClient, run_id: str, path: str, place: str | None = None) -> None:
        if path.endswith("state.json"):
            raise ConnectionError("the line is down")
        real(self, run_id, path, place)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", refuse)
        patch.setattr(follower, "UPLOAD_BYTES", -1)  # an upload that always goes on is not refused forever
        done = train(*JOB, "steps=3", "tracking.checkpoints=last", "tracking.upload_timeout_s=10")
    assert done.code == 0
    assert "lacks its checkpoints: the line is down" in done.out, done.out
    own, moved = run_id(RUN), RUN.rename("outputs/moved")
    refused = train(*JOB, f"resume=mlflow:{own}", "output_dir=other")
    assert refused.code == 2
    assert "MLflow has no complete checkpoint of this run" in refused.err  # half of one is none
    assert not list(Path("other").iterdir())
    moved.rename(RUN)
    assert send(RUN).status == "sent"
    assert stored_names(client, run_id(RUN)) == ["step-00000003"]
    finished = succeed(*JOB, "steps=3", f"resume=runs:/{run_id(RUN)}", "output_dir=other")
    assert "already complete (3 steps)" in finished.out


def test_a_run_is_continued_in_its_own_folder_while_that_is_there(succeed: Train, client: MlflowClient) -> None:
    succeed(*JOB, "steps=3")
    own = run_id(RUN)
    done = succeed(f"resume=mlflow:{own}", "steps=6", "output_dir=other")
    assert "run, resumed after step 3" in done.out
    assert "output_dir=other has no effect: the run continues in " in done.out
    assert not list(Path("other").iterdir())
    assert state(client, own)[3] == Counter(range(1, 7))


def test_a_store_on_this_machine_gets_links_that_outlive_the_folder(
    succeed: Train, folder: Path, client: MlflowClient
) -> None:
    succeed(*JOB, "schedule=constant", "steps=9", "tracking=local", "output_dir=whole")
    succeed(*JOB, "schedule=constant", "steps=3")
    own = run_id(RUN)
    (artifacts,) = (folder / "mlartifacts").glob(f"*/{own}/artifacts")
    linked = [file.relative_to(RUN) for file in (RUN / "checkpoints").rglob("*.safetensors")]
    assert len(linked) == 3
    assert all((artifacts / file).samefile(RUN / file) for file in linked)
    others = [file for file in artifacts.rglob("*") if file.is_file() and file.relative_to(artifacts) not in linked]
    assert {file.stat().st_nlink for file in others} == {1}  # metrics.jsonl is appended to

    succeed(f"resume={RUN}", "steps=6", "eval_every=3")
    assert stored_names(client, own) == sorted(path.name for path in (RUN / "checkpoints").iterdir())
    shutil.rmtree("outputs")
    assert "of run, step 6" in succeed(*JOB, f"init_from=mlflow:{own}", "run_name=tuned", "tracking=local").out
    succeed(f"resume=mlflow:{own}", "steps=9")
    expected = load(folder / "whole/run/checkpoints").tensors()
    assert same_bits(load(folder / RUN / "checkpoints").tensors(), expected)
    assert state(client, own)[3] == Counter(range(1, 10))


def test_where_no_links_can_be_made_only_last_copies(
    succeed: Train, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    done = succeed(*JOB, "steps=3")
    assert done.out.count("No links can be made in ") == 1
    assert client.list_artifacts(run_id(RUN), "checkpoints") == []
    assert not [item.path for item in client.list_artifacts(run_id(RUN)) if item.path == "metrics.jsonl"]
    succeed(f"resume={RUN}", "tracking.checkpoints=last", "steps=6")
    assert "step-00000006" in stored_names(client, run_id(RUN))


def test_what_somebody_removed_from_mlflow_is_sent_again(succeed: Train, folder: Path, client: MlflowClient) -> None:
    succeed(*JOB, "steps=6", "checkpoint.keep=3")
    succeed(f"resume={RUN}", "steps=9")  # MLflow has the newest
    shutil.rmtree(RUN / "checkpoints" / "step-00000009")
    (RUN / "summary.json").unlink()
    succeed(f"resume={RUN}", "steps=6")
    assert stored_names(client, run_id(RUN)) == ["step-00000006"]
    shutil.rmtree(*folder.glob("mlartifacts/*/*/artifacts/checkpoints"))
    replace(TrackedRun.read(RUN), delivered=False).write(RUN)
    assert send(RUN).status == "sent"
    assert stored_names(client, run_id(RUN)) == ["step-00000006"]


def test_a_damaged_folder_is_passed_over_for_mlflows_copy(
    succeed: Train, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.tracking.checkpoints.can_link", lambda *_: False)
    succeed(*JOB, "steps=3", "tracking.checkpoints=last")
    weights = RUN / "checkpoints/step-00000003/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = succeed(f"resume=mlflow:{run_id(RUN)}", "output_dir=fresh", "steps=6")
    assert "run, resumed after step 3" in done.out
    assert list(Path("fresh").iterdir())


def test_a_finished_run_that_is_fetched_is_the_same(succeed: Train, client: MlflowClient, saved: str) -> None:
    before = state(client, saved)
    for _ in range(2):  # the second job finds what the first one has fetched
        assert "already complete (6 steps)" in succeed(f"resume=mlflow:{saved}", "output_dir=same").out
    assert state(client, saved) == before
    succeed(f"resume=mlflow:{saved}", "output_dir=same", "steps=9")
    assert state(client, saved)[3] == Counter(range(1, 10))


def test_what_cannot_be_fetched_is_said_in_a_sentence(store: str, saved: str) -> None:
    def refusal(resume: str, uri: str = store, output_dir: str = "outputs") -> str:
        with pytest.raises(UserError) as raised:
            fetch("resume", resume, uri, output_dir)
        assert len(str(raised.value).splitlines()) == 1
        assert not list(Path(output_dir).glob(".*.partial"))
        return str(raised.value)

    own = f"mlflow:{saved}"
    assert "has no such run" in refusal(f"mlflow:{'0' * 32}")
    assert "is not a valid run" in refusal("mlflow:../../etc")
    assert "check MLFLOW_TRACKING_URI" in refusal(own, "http://127.0.0.1:9")
    assert "there is no" in refusal(own, "sqlite:///absent.db")
    shutil.rmtree(RUN / "checkpoints" / "step-00000006")
    assert "outputs/run has another run, or this one at an earlier step than 6; use resume=outputs/run" in refusal(own)
    (RUN / "tracking.json").unlink()
    assert f"use resume={RUN}" in refusal(own)
