"""Nothing is lost or doubled on the way to MLflow: stores that fail, processes that are killed, scripts/sync.py."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.command_line.conftest import SMALLEST, Result, Start, Train
from tests.helpers import PROJECT
from tests.tracked import once, open_log, points, run_id, runs, tracked
from trainer.files import command, in_use, write_json
from trainer.tracking.sync import send

SYNC = PROJECT / "scripts" / "sync.py"
Sync = Callable[..., tuple[int, str]]


def undelivered(path: Path, **chosen: Any) -> Path:
    """A run that MLflow does not know; a plain file stands for a store that does not work."""
    working = Path("mlflow.db")
    away = working.rename("away.db") if working.exists() else None
    working.mkdir()
    before = set(threading.enumerate())
    tracked(path, 5, upload_timeout_s=0, **chosen)
    for thread in set(threading.enumerate()) - before:  # one that still sends would open the file that comes back
        thread.join(60)
    working.rmdir()
    if away:
        away.rename(working)
    return path


@pytest.fixture
def sync(script: Callable[..., Result]) -> Sync:
    """scripts/sync.py in this process (a process of its own takes seconds to import MLflow)."""
    from scripts.sync import main

    def command(*arguments: str) -> tuple[int, str]:
        done = script(main, *arguments)
        return done.code, done.out + done.err

    return command


def test_answers_that_are_lost_double_nothing(folder: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"create_run": 1, "log_batch": 2}

    def losing(name: str) -> Callable[..., Any]:
        real = getattr(MlflowClient, name)

        def call(*arguments: Any, **options: Any) -> Any:
            answer = real(*arguments, **options)
            if lost[name] and (name == "create_run" or options.get("metrics")):
                lost[name] -= 1
                raise ConnectionError(f"the answer to {name} was lost")
            return answer

        return call

    for name in lost:
        monkeypatch.setattr(MlflowClient, name, losing(name))
    tracked(folder / "outputs" / "a", 1500)
    assert not any(lost.values())  # each failure has happened
    assert points(store) == {"a": once(1500)}
    assert runs(store) == [("a", "FINISHED")]


def test_resuming_takes_the_mark_of_completeness_away(folder: Path, store: str) -> None:
    path = folder / "outputs" / "a"
    tracked(path, 1, "KILLED")
    assert send(path).status == "complete"
    open_log(path, resume_step=1, mlflow=False).abandon()  # killed before it logged anything
    assert not (path / "summary.json").exists()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "los')  # or while it wrote
    assert send(path, named=True).status == "sent"
    assert points(store) == {"a": once(1)}
    assert runs(store) == [("a", "KILLED")]


def test_a_finished_run_that_is_resumed_finishes_its_delivery(
    train: Train, folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*SMALLEST, "profiler=none", "steps=40", "log_every=1", "resume=auto"]
    path = Path("outputs/bignet-fp32-s0")
    retry = f"Data is safe in {path}; retry with: {command('sync.py', [str(path)])}\n"
    real = MlflowClient.log_batch

    def half(self: MlflowClient, run_id: str, metrics: Any = (), **others: Any) -> None:
        real(self, run_id, metrics=metrics[:30], **others)
        if metrics:
            raise ConnectionError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", half)
        for said in ("lacks the last metrics: the network is down", "already complete (40 steps)"):
            some = train(*run, "tracking.upload_timeout_s=5")
            assert some.code == 0
            assert said in some.out
            assert retry in some.out
    assert 0 < points(store)["bignet-fp32-s0"].total() < 40
    assert runs(store) == [("bignet-fp32-s0", "RUNNING")]

    done = train(*run)
    assert done.code == 0
    assert "MLflow now has the complete run" in done.out
    assert points(store) == {"bignet-fp32-s0": once(40)}
    assert runs(store) == [("bignet-fp32-s0", "FINISHED")]
    assert "MLflow" not in train(*run).out


def test_a_user_who_does_not_wait_for_mlflow_sees_how_to_send_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("mlflow.db").mkdir()
    left = open_log(folder / "outputs" / "left")
    left.abandon()
    left.abandon()
    (message,) = [message for message in caplog.messages if "incomplete" in message]
    assert "lacks this run: stopped immediately" in message
    assert message.endswith(f"retry with: {command('sync.py', [str(left.folder)])}")


@pytest.mark.usefixtures("plots")
def test_sync_reports_what_it_did_with_each_run(
    folder: Path, store: str, empty_store: Path, start: Start, sync: Sync
) -> None:
    outputs = folder / "outputs"
    undelivered(outputs / "missed")
    damaged = undelivered(outputs / "damaged")
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    tracked(outputs / "local", mlflow=False)
    training = undelivered(outputs / "training")
    (outputs / "notes").mkdir()

    with in_use(training):
        process = start(script=SYNC)
        said = "".join(process.communicate(timeout=300))
    assert process.returncode == 1, said
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    expected = {"missed": f"sent to {store}", "damaged": "lacks the last metrics", "local": "tracking=local; skipped",
                "training": "in use by another process"}  # fmt: skip
    assert lines.keys() == {f"outputs/{name}" for name in expected}
    for name, words in expected.items():
        assert words in lines[f"outputs/{name}"]
    assert points(store)["missed"] == once(5)
    assert set(runs(store)) == {("missed", "FINISHED"), ("damaged", "RUNNING")}

    write_json(training / "summary.json", {"status": "FAILED", "log": None})
    code, said = sync("outputs/local", "outputs/missed", "outputs/training")
    assert code == 0, said
    assert f"missed: already complete in {store}" in said
    assert points(store)["local"] == Counter([1])
    assert ("training", "FAILED") in runs(store)
    sent = MlflowClient(store).list_artifacts(run_id(outputs / "missed"))
    assert {item.path for item in sent} == {"plots", "summary.json"}

    other = f"sqlite:///{shutil.copy(empty_store, folder / 'other.db')}"
    code, said = sync(f"uri={other}", "outputs/missed")  # what one store has, another one lacks
    assert (code, points(other)) == (0, {"missed": once(5)}), said


def test_a_password_is_not_stored_but_requested(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri, shown = "http://me:s3cret@127.0.0.1:9", "http://***@127.0.0.1:9"
    path = undelivered(folder / "outputs" / "a", uri=uri)
    assert "s3cret" not in "".join(file.read_text() for file in path.glob("*.json*")) + caplog.text
    outcome = send(path)
    assert outcome.status == "incomplete"
    assert f"the password of {shown} is not stored" in outcome.message
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert f"{shown} lacks this run" in send(path).message  # nothing listens there
