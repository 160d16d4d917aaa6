"""Checkpoints in MLflow, through a real server: sent once, pruned, and fetched by a machine that has nothing else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.helpers import same_bits
from trainer.checkpoint.reader import load
from trainer.tracking.mlflow.fetch import fetch
from trainer.tracking.mlflow.store import connect

JOB = (
    *("recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=16", "batch_size=4", "eval_samples=4"),
    *("deterministic=true", "log_every=1", "steps=12", "eval_every=3", "profiler=none", "run_name=run"),
    *("tracking.system_metrics=false", "tracking.flush_every_s=0.05"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[str]:
    """``mlflow server`` over SQLite, which takes artifacts itself."""
    root = tmp_path_factory.mktemp("server")
    shutil.copy(empty_store, root / "mlflow.db")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root}/mlflow.db", "--artifacts-destination", str(root / "files")]
    log = (root / "log").open("w")
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(command, cwd=root, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        while True:
            assert process.poll() is None, (root / "log").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        log.close()


@pytest.fixture
def job(server: str, request: pytest.FixtureRequest) -> tuple[str, ...]:
    """A run into an experiment of this test's own."""
    return (*JOB, f"tracking.uri={server}", f"tracking.experiment={request.node.name}")


def the_run(server: str, experiment: str) -> Any:
    client = connect(server)
    found = client.get_experiment_by_name(experiment)
    assert found
    (run,) = client.search_runs([found.experiment_id])
    return run


def kept(server: str, run_id: str) -> list[str]:
    return sorted(item.path for item in connect(server).list_artifacts(run_id, "checkpoints"))


def points(server: str, run_id: str) -> dict[str, Counter[int]]:
    client = connect(server)
    keys = client.get_run(run_id).data.metrics
    return {key: Counter(point.step for point in client.get_metric_history(run_id, key)) for key in keys}


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Request a stop during a step, like Ctrl-C."""
    import signal

    from trainer.trainer import Trainer

    real = Trainer.train_step

    def train_step(self: Trainer, *given: Any, **options: Any) -> Any:
        if self.step == step - 1:
            signal.raise_signal(signal.SIGINT)
        return real(self, *given, **options)

    monkeypatch.setattr(Trainer, "train_step", train_step)


def empty(folder: Path) -> None:
    """Another machine."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_run_is_continued_on_an_empty_machine_bit_for_bit(
    train: Callable[..., Any],
    folder: Path,
    server: str,
    job: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = train(*job, "tracking=local", "output_dir=whole")
    assert whole.code == 0, whole.err
    expected = load(folder / "whole/run/checkpoints").tensors()
    best = (folder / "whole/run/best/model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (folder / "whole/run/metrics.jsonl").read_text().splitlines()]

    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        stopped = train(*job)
        assert stopped.code == 130, stopped.err
    run_id = the_run(server, request.node.name).info.run_id
    newest = json.loads((folder / "outputs/run/checkpoints/step-00000007/manifest.json").read_text())
    assert newest["step"] == 7
    assert "checkpoints/step-00000007" in kept(server, run_id)
    empty(folder)

    done = train(f"tracking.uri={server}", f"resume=mlflow:{run_id}")  # the recorded config is enough
    assert done.code == 0, done.err
    assert the_run(server, request.node.name).info.run_id == run_id
    assert the_run(server, request.node.name).info.status == "FINISHED"
    assert same_bits(load(folder / "outputs/run/checkpoints").tensors(), expected)
    assert (folder / "outputs/run/best/model.safetensors").read_bytes() == best
    again = [json.loads(line) for line in (folder / "outputs/run/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("loss"), line.get("valid/loss")) for line in again] == [
        (line["step"], line.get("loss"), line.get("valid/loss")) for line in lines
    ]
    counts = points(server, run_id)
    assert counts["loss"] == Counter(range(1, 13))
    assert counts["valid/loss"] == Counter([3, 6, 9, 12])
    assert {path.rpartition("/")[2] for path in kept(server, run_id)} == {
        path.name for path in (folder / "outputs/run/checkpoints").iterdir()
    }
    assert not list((folder / "outputs").glob(".*.partial"))


def test_all_checkpoints_are_sent_as_they_are_saved_and_pruned_with_the_folder(
    train: Callable[..., Any],
    folder: Path,
    server: str,
    job: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: Counter[str] = Counter()
    real = MlflowClient.log_artifact

    def log_artifact(self: MlflowClient, run_id: str, path: str, place: str | None = None) -> None:
        if place:
            sent[f"{place}/{Path(path).name}"] += 1
        real(self, run_id, path, place)

    monkeypatch.setattr(MlflowClient, "log_artifact", log_artifact)
    monkeypatch.setattr("trainer.tracking.mlflow.feed.PAUSE_S", 0.0)  # training, which it would leave time to, waits
    from trainer.run.run import Run

    seen: list[list[str]] = []
    save = Run._save

    def save_and_wait(self: Run, score: float | None) -> None:
        save(self, score)
        step = self.trainer.step
        self.writer.finish()
        while self.tracker and (
            self.tracker.run_id is None
            or f"checkpoints/step-{step:08d}" not in (found := kept(server, self.tracker.run_id))
        ):
            time.sleep(0.05)
        seen.append(found)

    monkeypatch.setattr(Run, "_save", save_and_wait)
    done = train(*job, "tracking.checkpoints=all", "checkpoint.keep=2")
    assert done.code == 0, done.err
    assert len(seen) == 4
    run_id = the_run(server, request.node.name).info.run_id
    here = {path.name for path in (folder / "outputs/run/checkpoints").iterdir()}
    assert {path.rpartition("/")[2] for path in kept(server, run_id)} == here
    assert len(here) in (2, 3)
    assert len({place.split("/")[1] for place in sent}) == 4
    assert set(sent.values()) == {1}  # each file of each checkpoint once


def test_none_sends_none_and_reports_this_on_resume(
    train: Callable[..., Any], server: str, job: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    assert train(*job, "steps=3", "tracking.checkpoints=none").code == 0
    run_id = the_run(server, request.node.name).info.run_id
    assert kept(server, run_id) == []
    refused = train(*job, f"resume=mlflow:{run_id}", "output_dir=other")
    assert refused.code == 2
    assert "MLflow has no complete checkpoint of this run" in refused.err
    assert not list(Path("other").iterdir())


def test_what_does_not_arrive_is_named_and_sent_later(
    train: Callable[..., Any],
    folder: Path,
    server: str,
    job: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainer.tracking.sync import SyncStatus, send

    real = MlflowClient.log_artifact

    def refuse(self: MlflowClient, run_id: str, path: str, place: str | None = None) -> None:
        if "optimizer" in path:
            raise ConnectionError("the line is down")
        real(self, run_id, path, place)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", refuse)
        done = train(*job, "steps=3")
    assert done.code == 0
    assert "lacks its checkpoints: the line is down" in done.out, done.out
    run_id = the_run(server, request.node.name).info.run_id
    refused = train(*job, "steps=3", f"resume=mlflow:{run_id}", "output_dir=other")
    assert refused.code == 2
    assert "no complete checkpoint" in refused.err  # half of one is none
    assert send(folder / "outputs/run").status is SyncStatus.SENT
    assert kept(server, run_id) == ["checkpoints/step-00000003"]
    assert not list((folder / "outputs/run").glob(".mlflow-*"))
    finished = train(*job, "steps=3", f"resume=runs:/{run_id}", "output_dir=other")
    assert finished.code == 0, finished.err
    assert "already complete (3 steps)" in finished.out


@pytest.fixture
def saved(train: Callable[..., Any], server: str, job: tuple[str, ...], request: pytest.FixtureRequest) -> str:
    assert train(*job, "steps=3").code == 0
    return str(the_run(server, request.node.name).info.run_id)


def test_errors_are_reported_in_one_sentence(
    train: Callable[..., Any],
    folder: Path,
    server: str,
    job: tuple[str, ...],
    saved: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = folder / "outputs/run"

    def refusal(*overrides: str) -> str:
        done = train(*job, *overrides)
        assert done.code == 2, done.out
        assert len(done.err.splitlines()) == 1
        assert not list((folder / "outputs").glob(".*.partial"))
        return str(done.err)

    assert "has no such run" in refusal(f"resume=mlflow:{'0' * 32}")
    assert "is not a valid run" in refusal("resume=mlflow:../../etc")
    assert "check tracking.uri" in refusal(f"resume=mlflow:{saved}", "tracking.uri=http://127.0.0.1:9")
    assert "there is no" in refusal(f"resume=mlflow:{saved}", "tracking.uri=sqlite:///absent.db")
    assert not (folder / "absent.db").exists()
    assert "no complete checkpoint of step 2" in refusal(
        f"resume=runs:/{saved}/checkpoints/step-00000002", "output_dir=x"
    )
    step = here / "checkpoints/step-00000003"
    step.rename(step.with_name("step-00000009"))
    refused = refusal(f"resume=runs:/{saved}/checkpoints/step-00000003")
    assert f"use resume={Path('outputs/run')}" in refused
    assert fetch(f"mlflow:{saved}", server, "outputs") == Path("outputs/run")  # a job that is started once more
    said = capsys.readouterr().out
    assert said == "using outputs/run: it has this run at step 9, MLflow has step 3\n"
    step.with_name("step-00000009").rename(step.with_name("step-00000001"))
    assert "is this run at step 1, not 3; use resume=outputs/run" in refusal(f"resume=mlflow:{saved}")
    (here / "mlflow.json").unlink()
    assert "is another run than this would be" in refusal(f"resume=mlflow:{saved}")
