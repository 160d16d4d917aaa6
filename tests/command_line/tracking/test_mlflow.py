"""Runs that go to a real MLflow store, through the tracker."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import shlex
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import forks
from tests.command_line.conftest import SMALLEST, Train
from tests.helpers import Arrays
from tests.serving import NOBODY
from tests.tracked import once, open_log, points, run_id, runs, tracked
from trainer.data.contract import Datasets
from trainer.errors import UserError
from trainer.files import write_json
from trainer.recipe import DataSource
from trainer.tracking import follower
from trainer.tracking.datasets import dataset_facts
from trainer.tracking.results import summary_lines
from trainer.tracking.store import configured_uri, connect
from trainer.tracking.sync import send
from trainer.tracking.tracked_run import TrackedRun

INF, NAN = float("inf"), float("nan")


def forget(path: Path) -> None:
    """As if the run was killed before it could note what MLflow has."""
    replace(TrackedRun.read(path), run_id=None, offset=0, sent={}, delivered=False).write(path)


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def type_in(command: str) -> None:
    """Run a command that was printed."""
    words = shlex.split(command)
    python = words.index("python")
    set_there = dict(word.split("=", 1) for word in words[:python])
    forks.run([sys.executable, *words[python + 1 :]], env=os.environ | set_there, check=True)


@pytest.mark.usefixtures("plots")
def test_a_run_arrives_whole(folder: Path, store: str) -> None:
    path = folder / "gpt2 bf16 s0"
    params: dict[str, object] = {
        "recipe.size": "mini", "seed": 0, "resume": None, "deterministic": False, "betas": [0.9, 0.95],
        "empty": "", "long": "x" * 9000, "files[0]": "a",
    } | {f"many.{index}": index for index in range(150)}  # fmt: skip
    tags = {"precision": "bf16", "hardware": "CPU"}
    train, valid = (Arrays(x=torch.zeros(length, 1)) for length in (8, 4))
    facts_of_data = dataset_facts(DataSource(), Datasets(train, valid, "zeros"))
    opened = open_log(path, experiment="gpt2", params=params, tags=tags, datasets=facts_of_data)
    for step in range(1, 301):
        opened.append(step, {"loss": NAN if step == 7 else INF if step == 8 else 1.0 / step})
    opened.append(300, {"valid/loss": 0.2})
    write_json(path / "config.json", {"seed": 0})
    write_json(path / "precision.json", {})
    for kept in ("best", "checkpoints"):
        (path / kept).mkdir()
        (path / kept / "model.safetensors").write_bytes(b"w")
    opened.close("FINISHED", {"loss": 0.1})

    client = connect(store)
    assert opened.run.run_id
    run = client.get_run(opened.run.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "gpt2 bf16 s0")
    assert run.data.params.pop("long").endswith("x…")
    assert run.data.params == {
        "recipe.size": "mini", "seed": "0", "resume": "null", "deterministic": "false", "betas": "[0.9, 0.95]",
        "empty": "", "files_0_": "a",
    } | {f"many.{index}": str(index) for index in range(150)}  # fmt: skip
    assert tags.items() <= run.data.tags.items()
    data = {each.tags[0].value: each.dataset for each in run.inputs.dataset_inputs}
    assert {role: (each.name, json.loads(each.profile)["num_rows"]) for role, each in data.items()} == {
        "training": ("own", 8),
        "validation": ("own", 4),
    }
    view = json.loads(client.get_experiment(run.info.experiment_id).tags["mlflow.sharedViewState.mantissa"])
    shown = [re.findall("`(.+)`", column)[0] for column in json.loads(view["state"])["selectedColumns"]]
    facts = {"units_per_s": 1.0, "peak_memory_bytes": 1, "process_memory_bytes": 1}
    sent = {name for line in summary_lines(path / "metrics.jsonl", facts) for name in line}
    assert shown[:3] == ["precision", "best_loss", "throughput"]
    assert {*shown} <= {"precision"} | sent
    assert points(store) == {path.name: Counter(step for step in range(1, 301) if step not in (7, 8))}
    assert points(store, "loss_nonfinite") == {path.name: Counter([7, 8])}
    first = json.loads((path / "metrics.jsonl").read_text().partition("\n")[0])
    history = client.get_metric_history(opened.run.run_id, "train/loss")
    assert min(point.timestamp for point in history) == int(first["time"] * 1000)
    assert {item.path for item in client.list_artifacts(opened.run.run_id)} == {
        "config.json", "summary.json", "plots", "best", "precision.json",
    }  # fmt: skip
    assert list((folder / "mlartifacts" / "gpt2" / opened.run.run_id).rglob("model.safetensors"))
    forget(path)
    assert send(path).status == "sent"  # all of it once more
    assert points(store) == {path.name: Counter(step for step in range(1, 301) if step not in (7, 8))}


def test_resuming_continues_the_same_run_and_duplicates_no_point(
    folder: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mantissa")
    path = folder / "run"
    first = open_log(path, params={"steps": 8, "seed": 0})
    for step in range(1, 9):
        first.append(step, {"loss": float(step)})
        if step % 2 == 0:
            first.append(step, {"valid/loss": float(step)})
    first.close("KILLED", {})
    with (path / "metrics.jsonl").open("a") as file:  # logged, but killed before it was sent
        file.write(json.dumps({"step": 8, "time": 1.0, "other": 8.0}) + "\n")
        file.write(json.dumps({"step": 10, "time": 1.0, "loss": 10.0, "valid/loss": 10.0}) + "\n{")

    # Back to a checkpoint after what was sent, to one before it, and after it again.
    for resume_step, last in ((8, 8), (6, 12), (12, 13)):
        second = open_log(path, params={"steps": 14, "seed": 0}, resume_step=resume_step)
        for step in range(resume_step + 1, last + 1):
            second.append(step, {"loss": float(step)} | ({"valid/loss": float(step)} if step in (7, 8, 13) else {}))
        second.close("FINISHED", {})
        assert second.run.run_id == first.run.run_id

    assert points(store) == {"run": once(13)}
    assert points(store, "valid/loss") == {"run": Counter([2, 4, 6, 8, 13])}
    assert points(store, "other") == {"run": Counter([8])}
    assert first.run.run_id
    run = connect(store).get_run(first.run.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"steps": "8", "seed": "0"}
    assert run.data.tags["changed_on_resume"] == "steps=14"
    assert run.data.tags["kept_on_resume"] == "points of steps 7 to 8 from before the resume"
    assert "MLflow cannot replace points: of steps 9 to 10 it keeps what it has" in caplog.text


def test_a_run_that_failed_says_why_until_it_goes_on(folder: Path, store: str) -> None:
    failed = open_log(folder / "run")
    failed.append(1, {"loss": 1.0})
    failed.close("FAILED", {"error": "step 2: not finite"})
    tags = connect(store).get_run(run_id(folder / "run")).data.tags
    assert tags["error"] == "step 2: not finite"
    tracked(folder / "run", 2, resume_step=1)
    assert "error" not in connect(store).get_run(run_id(folder / "run")).data.tags


def test_a_run_deleted_in_mlflow_continues_as_a_new_one(
    folder: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracked(folder / "run", 1, "KILLED")
    client, first = connect(store), run_id(folder / "run")
    client.delete_run(first)
    tracked(folder / "run", 2, resume_step=1)
    second = run_id(folder / "run")
    assert second != first
    assert [point.step for point in client.get_metric_history(second, "train/loss")] == [1, 2]
    assert "continues as a new one" in caplog.text


def test_a_copy_of_a_run_is_a_run_of_its_own_in_mlflow_and_a_moved_one_is_not(
    folder: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mantissa")
    tracked(folder / "run", 2, "KILLED")
    shutil.copytree(folder / "run", folder / "copy")
    tracked(folder / "copy", 3, resume_step=1)
    assert f"{folder / 'copy'} is a copy of {folder / 'run'}: in MLflow it is a run of its own" in caplog.text
    assert "MLflow cannot replace points" not in caplog.text
    (folder / "copy").rename(folder / "moved")
    for name in ("run", "moved"):
        before = run_id(folder / name)
        tracked(folder / name, 4, resume_step=3 if name == "moved" else 2)
        assert run_id(folder / name) == before
    assert sorted(points(store).values(), key=str) == [once(4), once(4)]


PROCESS = """
import sys
from pathlib import Path
from tests.tracked import tracked
from trainer.files import in_use
folder = Path(sys.argv[1])
folder.mkdir()
with in_use(folder):  # as training does: what one has not sent yet, the other must not send too
    tracked(folder, 200, experiment="race")
"""


def test_processes_that_start_at_once_share_a_fresh_store(folder: Path) -> None:
    started = [
        forks.Popen(
            [sys.executable, "-c", PROCESS, str(folder / name)], stdout=forks.PIPE, stderr=forks.STDOUT, text=True
        )
        for name in "ab"
    ]
    outputs = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert not any("MLflow" in output for output in outputs), outputs
    store = f"sqlite:///{folder}/mlflow.db"
    assert len(connect(store).search_experiments(filter_string="name = 'race'")) == 1
    assert runs(store) == [("a", "FINISHED"), ("b", "FINISHED")]
    assert points(store) == dict.fromkeys("ab", once(200))


def test_a_server_that_does_not_answer_neither_slows_nor_fails_a_run(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "36000")  # whoever waited for an answer would not come back
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(300)
        silent = f"http://127.0.0.1:{server.getsockname()[1]}"
        opened = open_log(folder / "run", uri=silent, upload_timeout_s=1.5)
        opened.append(0, {"loss": 1.0})
        with server.accept()[0]:  # from here on the feed waits for an answer
            for step in range(1, 500):
                opened.append(step, {"loss": 1.0})
            opened.close("FINISHED", {"loss": 1.0})
    (warning,) = [message for message in caplog.messages if "upload incomplete" in message]
    assert f"{silent} lacks this run: no answer within 1.5 s" in warning
    assert f"scripts/sync.py {folder / 'run'}" in warning
    assert opened.run.run_id is None
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 500
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["loss"]) == ("FINISHED", 1.0)


def test_an_sqlite_file_that_does_not_answer_gets_no_longer_than_another_store(
    folder: Path, store: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang(uri: str) -> None:
        hangs.set()
        released.wait()

    monkeypatch.setattr(follower, "connect", hang)
    monkeypatch.setattr(follower, "SET_UP_S", 36_000.0)  # whoever waited for it would not come back
    opened = open_log(folder / "run", uri=store, upload_timeout_s=0.2)
    opened.append(0, {"loss": 1.0})
    assert hangs.wait(60)
    opened.close("FINISHED", {})
    released.set()
    assert any("no answer within 0.2 s" in message for message in caplog.messages)


def test_a_run_with_an_upload_that_hangs_is_not_running(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, released, hours = threading.Event(), threading.Event(), count(3600, 3600)

    def hang(*_: object) -> None:
        hangs.set()
        released.wait()
        raise ConnectionError("the line is down")

    later = SimpleNamespace(monotonic=lambda: time.monotonic() + next(hours) * hangs.is_set(), time=time.time)
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient.log_artifact", hang)
        patch.setattr(follower, "time", later)  # the patience ends when the upload hangs
        tracked(folder / "run", upload_timeout_s=600)
        assert runs(store) == [("run", "FINISHED")]
        released.set()
    assert send(folder / "run").status == "sent"
    sent = connect(store).list_artifacts(run_id(folder / "run"))
    assert [item.path for item in sent] == ["summary.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a process reads")
def test_an_upload_that_goes_on_slowly_is_waited_for(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks, seconds = queue.Queue[int](), count(0, 10)

    def monotonic() -> float:
        ticks.put(0)
        return next(seconds)

    def trickle(*_: object) -> None:
        while not ticks.empty():
            ticks.get()
        with open("/dev/zero", "rb", buffering=0) as line:
            for _ in range(20):
                line.read(1 << 14)
                ticks.get()  # ten seconds later
                ticks.get()

    monkeypatch.setattr("mlflow.MlflowClient.log_artifact", trickle)
    monkeypatch.setattr(follower, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    tracked(folder / "run", upload_timeout_s=100)
    assert runs(store) == [("run", "FINISHED")]
    assert "upload incomplete" not in caplog.text


def test_a_deleted_experiment_is_named_and_the_remedy_sends_what_it_missed(
    folder: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(store)
    client.delete_experiment(client.create_experiment("gpt2"))
    with caplog.at_level(logging.INFO, "mantissa"):
        opened = open_log(folder / "run", experiment="gpt2")
        opened.append(1, {"loss": 1.0})
        wait_until(lambda: "does not accept this run yet" in caplog.text)
        assert opened.run.run_id is None
        assert "its experiment 'gpt2' is deleted; set another tracking.experiment" in caplog.text
        (command,) = {*re.findall(r"restore it with: (.*?)\)", caplog.text)}
        type_in(command)
        wait_until(lambda: opened.run.run_id)
        opened.close("FINISHED", {})
    assert points(store) == {"run": Counter([1])}
    assert "upload incomplete" not in caplog.text


def test_tags_and_note_are_the_runs_own_and_the_last_count(succeed: Train, folder: Path, store: str) -> None:
    done = succeed(*SMALLEST, "steps=1", "tags.team=vision", "note=first, with a comma")
    assert "\n  tags       team=vision\n  note       first, with a comma\n" in done.out
    path = folder / "outputs" / "bignet-fp32-s0"
    summary = json.loads((path / "summary.json").read_text())
    assert summary["tags"] == {"team": "vision"}
    client, own = connect(store), run_id(path)

    def tags() -> dict[str, str]:
        return dict(client.get_run(own).data.tags)

    assert tags()["mlflow.note.content"].startswith("first, with a comma\n\n**bignet** in fp32 finished")
    succeed(f"resume={path}", "steps=2", "tags.team=audio", "tags.try=2", "note=second")
    assert {"team": "audio", "try": "2", "note": "second"}.items() <= tags().items()
    assert tags()["mlflow.note.content"].startswith("second\n\n**bignet** in fp32 finished at step 2")
    client.set_tag(own, "mlflow.note.content", "my own words")
    succeed(f"resume={path}", "steps=3", "note=third")
    assert (tags()["mlflow.note.content"], tags()["note"]) == ("my own words", "third")
    assert not {"tags", "note"} & client.get_run(own).data.params.keys()


def test_system_metrics_are_sampled_and_end_with_the_run(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = "system/cpu_utilization_percentage"
    monkeypatch.setattr(follower, "SYSTEM_METRICS_EVERY_S", 0.05)
    first = open_log(folder / "run", system_metrics=True)
    first.append(1, {"loss": 1.0})
    wait_until(lambda: points(store, metric).get("run", Counter()).total() >= 2)
    first.close("KILLED", {})
    before = points(store, metric)["run"].total()
    second = open_log(folder / "run", system_metrics=True, resume_step=0)
    second.append(2, {"loss": 1.0})
    wait_until(lambda: points(store, metric)["run"].total() >= before + 2)
    second.close("FINISHED", {})
    steps = points(store, metric)["run"]
    assert steps == Counter(range(len(steps)))
    assert not [thread.name for thread in threading.enumerate() if "SystemMetrics" in thread.name]


def test_a_machine_that_cannot_be_sampled_keeps_no_metrics_back(
    folder: Path, store: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlflow.system_metrics.system_metrics_monitor.SystemMetricsMonitor", None)
    opened = open_log(folder / "run", system_metrics=True)
    opened.append(1, {"loss": 1.0})
    wait_until(lambda: points(store) or "does not accept" in caplog.text)
    assert points(store) == {"run": once(1)}, "while it trains"
    opened.close("FINISHED", {})
    assert caplog.text.count("MLflow cannot sample this machine") == 1


def test_a_server_that_never_answers_is_not_waited_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_log(folder / "run", uri=NOBODY, upload_timeout_s=1e9)
    sender = opened._follower
    assert sender
    opened.append(1, {"loss": 1.0})
    wait_until(lambda: sender._failures)
    opened.close("FINISHED", {})
    assert "lacks this run: no connection: Connection refused). Data is safe" in caplog.text


def test_a_folder_of_runs_is_migrated_by_the_printed_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mlruns/0").mkdir(parents=True)
    (folder / "mlruns/0/meta.yaml").write_text(
        f"artifact_location: {folder}/mlruns/0\nexperiment_id: '0'\nlifecycle_stage: active\nname: mine\n"
    )
    for uri in (f"file://{folder}/mlruns", "file:./mlruns", "./mlruns"):
        with pytest.raises(UserError, match=r"is a folder, which MLflow no longer writes to") as caught:
            configured_uri(uri)
    (command,) = re.findall(r"its runs go to a database by: (.+)\)", caught.value.problem)
    type_in(command)
    (uri,) = (remedy.removeprefix("tracking.uri=") for remedy in caught.value.remedies)
    assert configured_uri(uri) == uri
    assert [each.name for each in connect(uri).search_experiments()] == ["mine"]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert configured_uri("./mlruns") == "./mlruns"


def test_mlflows_variables_are_honoured_or_said(
    train: Train, folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from outside")
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    done = train(*SMALLEST, "steps=1")
    assert done.code == 0, done.err
    assert "MLFLOW_RUN_ID is ignored: each run has its own" in done.out
    assert TrackedRun.read(folder / "outputs/bignet-fp32-s0").experiment == "from outside"
