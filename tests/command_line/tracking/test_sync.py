"""Nothing is lost or doubled on the way to MLflow: stores that fail, processes that are killed, scripts/sync.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests import forks
from trainer.config import options
from trainer.files import in_use, write_json
from trainer.tracking.mlflow.sync import SyncStatus, send
from trainer.tracking.tracker import Tracker, Tracking

# MLflow's own, raised inside the feed's thread: SQLAlchemy 2.1 deprecates an option of MLflow's models.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

PROJECT = Path(__file__).resolve().parents[3]
SYNC = PROJECT / "scripts" / "sync.py"
BIGNET = ["recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "data.samples=64", "eval_samples=4",
          "profiler=none", "checkpoint=none"]  # fmt: skip
Sync = Callable[..., tuple[int, str]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def store(folder: Path, empty_store: Path) -> Path:
    return Path(shutil.copy(empty_store, folder / "mlflow.db"))


def tracker_of(path: Path, resume_step: int | None = None, **options: Any) -> Tracker:
    path.mkdir(parents=True, exist_ok=True)
    config = Tracking(**{"system_metrics": False, "flush_every_s": 0.05, "patience_s": 300.0} | options)
    described: dict[str, Any] = {"experiment": "e", "params": {"seed": 0}, "tags": {"precision": "bf16"}}
    return Tracker(config, path, run_name=path.name, resume_step=resume_step, **described)


def undelivered(path: Path, steps: int = 5, **options: Any) -> Path:
    """A run that MLflow does not know; a plain file stands for a store that does not work."""
    working = Path("mlflow.db")
    away = working.rename("away.db") if working.exists() else None
    working.mkdir()
    tracker = tracker_of(path, patience_s=0, **options)
    for step in range(1, steps + 1):
        tracker.log(step, {"loss": float(step)})
    tracker.close("FINISHED", {})
    working.rmdir()
    if away:
        away.rename(working)
    return path


def points(store: Path) -> dict[str, Counter[int]]:
    """How often each step of each run's loss is stored."""
    query = "select name, step from metrics join runs using (run_uuid) where key = 'loss'"
    found: dict[str, Counter[int]] = {}
    with closing(sqlite3.connect(store)) as database:
        for name, step in database.execute(query):
            found.setdefault(name, Counter())[step] += 1
    return found


def runs(store: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(store)) as database:
        return database.execute("select name, status from runs order by name").fetchall()


def logged(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def once(steps: int) -> Counter[int]:
    return Counter(range(1, steps + 1))


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


@pytest.fixture
def sync(capsys: pytest.CaptureFixture[str]) -> Sync:
    """scripts/sync.py in this process (a process of its own takes seconds to import MLflow)."""
    from scripts.sync import main

    def command(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = options.run(main, None, arguments)
        return code, "".join(capsys.readouterr())

    return command


# --- lost responses ---


def test_after_a_failed_call_the_store_is_queried_for_what_it_has(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would forgive a point that is sent twice, other stores do not: so it must not be sent."""
    stored: Counter[tuple[str, int]] = Counter()
    lost = {"create_run": 1, "log_batch": 2}
    real_log, real_create = MlflowClient.log_batch, MlflowClient.create_run

    def lose(name: str) -> None:
        lost[name] -= 1
        if lost[name] >= 0:
            raise ConnectionError(f"the answer to {name} was lost")

    def log_batch(self: MlflowClient, run_id: str, metrics: Any = (), **others: Any) -> None:
        real_log(self, run_id, metrics=metrics, **others)
        stored.update((metric.key, metric.step) for metric in metrics)
        if metrics:
            lose("log_batch")

    def create_run(self: MlflowClient, *arguments: Any, **others: Any) -> Any:
        run = real_create(self, *arguments, **others)
        lose("create_run")
        return run

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(MlflowClient, "create_run", create_run)
    tracker = tracker_of(folder / "outputs" / "a")
    for step in range(1, 701):
        tracker.log(step, {"loss": 1.0, "lr": 0.1})
    tracker.close("FINISHED", {})
    assert max(lost.values()) <= 0  # each failure has happened
    assert set(stored.values()) == {1}
    assert points(store) == {"a": once(700)}
    assert runs(store) == [("a", "FINISHED")]


# --- killed between the local log and the delivery ---

KILLED = """
import os, signal, sys, time
from pathlib import Path
from mlflow import MlflowClient
from trainer.tracking.tracker import Tracker, Tracking
moment, folder = sys.argv[1], Path(sys.argv[2])
real = MlflowClient.log_batch
def dies(self, *arguments, **others):
    if moment == "after" or not others.get("metrics"):
        real(self, *arguments, **others)
    if others.get("metrics"):
        os.kill(os.getpid(), signal.SIGKILL)
MlflowClient.log_batch = dies
folder.mkdir(parents=True)
config = Tracking(flush_every_s=0.05, system_metrics=False)
tracker = Tracker(config, folder, experiment="e", run_name=folder.name, params={}, tags={})
for step in range(1, 21):
    tracker.log(step, {"loss": 1.0})
time.sleep(600)
"""


def test_killed_between_log_and_delivery_every_point_arrives_once(folder: Path, store: Path) -> None:
    outputs = folder / "outputs"
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    children = [
        forks.Popen([sys.executable, "-c", KILLED, moment, str(outputs / moment)], env=environment)
        for moment in ("before", "after")
    ]
    assert [child.wait(300) for child in children] == [-signal.SIGKILL] * 2
    assert runs(store) == [("after", "RUNNING"), ("before", "RUNNING")]
    assert points(store) == {"after": once(20)}

    with (outputs / "after" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "los')  # killed while it wrote
    (outputs / "after" / "mlflow.json").unlink()  # as if killed before it could write down MLflow's id
    assert send(outputs / "after").status is SyncStatus.SENT
    assert send(outputs / "after").status is SyncStatus.COMPLETE
    resumed = tracker_of(outputs / "before", resume_step=20)
    resumed.log(21, {"loss": 1.0})
    resumed.close("FINISHED", {})
    assert points(store) == {"after": once(20), "before": once(21)}
    assert runs(store) == [("after", "KILLED"), ("before", "FINISHED")]


def test_resuming_takes_the_mark_of_completeness_away(folder: Path, store: Path) -> None:
    path = folder / "outputs" / "a"
    first = tracker_of(path)
    first.log(1, {"loss": 1.0})
    first.close("KILLED", {})
    assert send(path).status is SyncStatus.COMPLETE
    tracker_of(path, resume_step=1, mlflow=False)._log.close()  # killed before it logged anything
    assert not (path / "summary.json").exists()
    assert send(path, named=True).status is SyncStatus.SENT
    assert runs(store) == [("a", "KILLED")]


# --- ended with something undelivered ---


def test_a_finished_run_that_is_resumed_finishes_its_delivery(
    train: Callable[..., Any], folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*BIGNET, "checkpoint=default", "steps=40", "log_every=1", "resume=auto"]
    path = Path("outputs/bignet-fp32-s0")
    retry = f"Data is safe in {path}; retry with: python scripts/sync.py {path}\n"
    real = MlflowClient.log_batch
    monkeypatch.setattr("trainer.tracking.mlflow.feed.LAST_ATTEMPTS", 1)  # the pauses between them take seconds

    def half(self: MlflowClient, run_id: str, metrics: Any = (), **others: Any) -> None:
        if metrics:
            metrics = metrics[:30]
            real(self, run_id, metrics=metrics, **others)
            raise ConnectionError("the network is down")
        real(self, run_id, **others)

    away = store.rename("away.db")
    store.mkdir()
    first = train(*run)
    assert retry in first.out, first.out
    again = train(*run)
    assert "already complete (40 steps)" in again.out
    assert "lacks this run" in again.out
    assert retry in again.out
    store.rmdir()
    away.rename(store)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", half)
        for _ in range(2):
            some = train(*run)
            assert "lacks the last metrics and the artifacts" in some.out
            assert retry in some.out
    assert 0 < points(store)["bignet-fp32-s0"].total() < 40
    assert runs(store) == [("bignet-fp32-s0", "RUNNING")]

    done = train(*run)
    assert [result.code for result in (first, again, some, done)] == [0] * 4
    assert "MLflow now has the complete run" in done.out
    assert "sync.py" not in done.out
    assert points(store) == {"bignet-fp32-s0": once(40)}
    assert runs(store) == [("bignet-fp32-s0", "FINISHED")]
    silent = train(*run)
    assert "MLflow" not in silent.out


def test_a_user_who_does_not_wait_for_mlflow_sees_how_to_send_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path("mlflow.db").mkdir()
    left = tracker_of(folder / "outputs" / "left")
    left.log(1, {"loss": 1.0})
    left.abandon()
    left.abandon()
    (message,) = [record.getMessage() for record in caplog.records if "incomplete" in record.getMessage()]
    assert "lacks this run: stopped immediately" in message
    assert message.endswith(f"retry with: python scripts/sync.py {folder}/outputs/left")

    caplog.clear()
    interrupted = tracker_of(folder / "outputs" / "interrupted")
    interrupted.log(1, {"loss": 1.0})

    def ctrl_c(timeout: float) -> None:
        raise KeyboardInterrupt

    assert interrupted._feed
    monkeypatch.setattr(interrupted._feed, "join", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        interrupted.close("FINISHED", {})
    interrupted.abandon()
    (message,) = [record.getMessage() for record in caplog.records if "incomplete" in record.getMessage()]
    assert "lacks this run: interrupted" in message
    assert message.endswith(f"retry with: python scripts/sync.py {folder}/outputs/interrupted")


def test_a_run_says_that_it_has_finished_after_all_else_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, it is closed once more when it is resumed; killed after, it is only delivered."""
    seen = []

    def plot(metrics: Path, plots: Path, title: str) -> None:
        seen.append((folder / "a" / "summary.json").exists())

    monkeypatch.setattr("trainer.tracking.plots.plot_run", plot)
    tracker_of(folder / "a", mlflow=False).close("FINISHED", {})
    assert seen == [False]
    assert (folder / "a" / "summary.json").exists()


def test_best_and_final_metrics_arrive_once_and_follow_a_run_that_is_resumed(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "outputs" / "a"
    real, lost = MlflowClient.log_batch, []

    def log_batch(self: MlflowClient, run_id: str, metrics: Any = (), **others: Any) -> None:
        real(self, run_id, metrics=metrics, **others)
        if any(metric.key == "best/valid_loss" for metric in metrics) and not lost:
            lost.append(True)
            raise ConnectionError("the answer was lost")

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    for steps, loss in ((4, 2.0), (8, 1.5), (12, 1.75)):
        tracker = tracker_of(path, resume_step=steps - 4 or None)
        tracker.log(steps, {"loss": 1.0, "tokens_per_s": 10.0, "step_time_s": 0.1})
        tracker.log(steps, {"valid/loss": loss})
        tracker.close("FINISHED", {"best": {"step": min(steps, 8), "value": min(loss, 2.0 if steps < 8 else 1.5)}})
        (path / "mlflow.json").unlink()  # as if it was killed before it could note that all is delivered
        assert send(path).status is SyncStatus.SENT
    query = "select key, step, value from metrics where key like '%/valid_loss' order by key, step"
    with closing(sqlite3.connect(store)) as database:
        assert database.execute(query).fetchall() == [
            ("best/valid_loss", 4, 2.0),
            ("best/valid_loss", 8, 1.5),
            ("final/valid_loss", 4, 2.0),
            ("final/valid_loss", 8, 1.5),
            ("final/valid_loss", 12, 1.75),
        ]
    assert lost


# --- scripts/sync.py ---


@pytest.mark.usefixtures("plots")
def test_sync_reports_what_it_did_with_each_run(folder: Path, store: Path, start: Start, sync: Sync) -> None:
    outputs = folder / "outputs"
    undelivered(outputs / "missed")
    damaged = undelivered(outputs / "damaged")
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    tracker = tracker_of(outputs / "local", mlflow=False)
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED", {})
    training = undelivered(outputs / "training")
    (outputs / "notes").mkdir()

    with in_use(training):
        code, said = finished(start(script=SYNC))
    assert code == 1, said
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines["outputs/missed"] == f"sent to sqlite:///{store}"
    assert "lacks the last metrics" in lines["outputs/damaged"]
    assert lines["outputs/local"] == "tracking=local; skipped"
    assert "in use by another process" in lines["outputs/training"]
    assert len(lines) == 4
    assert points(store)["missed"] == once(5)
    assert set(runs(store)) == {("missed", "FINISHED"), ("damaged", "RUNNING")}

    write_json(training / "summary.json", {"status": "FAILED"})
    code, said = sync("outputs/local", "outputs/missed", "outputs/training")
    assert code == 0, said
    assert "missed: already complete" in said
    assert points(store)["local"] == Counter([1])
    assert ("training", "FAILED") in runs(store)
    client = MlflowClient(f"sqlite:///{store}")
    record = json.loads((outputs / "missed" / "mlflow.json").read_text())
    assert {item.path for item in client.list_artifacts(record["run_id"])} == {"plots", "summary.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere", "nowhere: no such folder; give a run folder"),
        (".", "is not a run folder"),
        ("output_dir=nowhere", "output_dir=nowhere: no such folder"),
        ("--output-dir=runs", "--output-dir=runs: write output_dir=runs, without dashes"),
        ("uri=mlruns", "uri=mlruns is not a URI; use sqlite:///mlruns"),
        ("uri=htp://host", "uri=htp://host is not a URI that MLflow supports"),
    ],
)
def test_mistakes(folder: Path, sync: Sync, arguments: str, message: str) -> None:
    (folder / "outputs").mkdir()
    code, said = sync(*arguments.split())
    assert code == 2
    assert message in said


def test_a_password_is_not_stored_but_requested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "http://me:s3cret@127.0.0.1:9"
    path = undelivered(folder / "outputs" / "a", uri=uri)
    assert "s3cret" not in "".join(file.read_text() for file in path.glob("*.json*"))
    outcome = send(path)
    assert outcome.status is SyncStatus.INCOMPLETE
    assert "the password of http://me:***@127.0.0.1:9 is not stored" in outcome.message
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert "lacks this run" in send(path).message  # nothing listens there


SYNC_KILLED = """
import os, runpy, signal, sys
from mlflow import MlflowClient
real = MlflowClient.log_batch
def dies(self, *arguments, **others):
    real(self, *arguments, **others)
    if others.get("metrics"):
        os.kill(os.getpid(), signal.SIGKILL)
MlflowClient.log_batch = dies
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_sync_that_was_killed_is_run_again(folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = undelivered(folder / "outputs" / "a", steps=1500)
    child = forks.Popen([sys.executable, "-c", SYNC_KILLED, str(SYNC)])
    assert child.wait(300) == -signal.SIGKILL
    assert points(store) == {"a": once(1000)}
    sent: Counter[int] = Counter()
    real = MlflowClient.log_batch

    def log_batch(self: MlflowClient, run_id: str, metrics: Any = (), **others: Any) -> None:
        sent.update(metric.step for metric in metrics)
        real(self, run_id, metrics=metrics, **others)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    assert send(path).status is SyncStatus.SENT
    assert sent == Counter(range(1001, 1501))
    assert points(store) == {"a": once(1500)}
    assert runs(store) == [("a", "FINISHED")]


# --- a later run ---


def test_a_later_run_sends_itself_and_no_other(folder: Path, store: Path) -> None:
    undelivered(folder / "outputs" / "earlier")
    tracker = tracker_of(folder / "outputs" / "next")
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED", {})
    assert points(store) == {"next": once(1)}


# --- through the real command line: absent, slow, locked ---

LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_locked_store_gets_all_of_it_later(train: Callable[..., Any], sync: Sync, folder: Path, store: Path) -> None:
    lock = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert lock.stdout
    assert lock.stdout.readline() == "locked\n"
    for seed in (0, 1):
        done = train(*BIGNET, f"seed={seed}", "steps=60", "log_every=1", "tracking.patience_s=0.5")
        path = Path(f"outputs/bignet-fp32-s{seed}")
        assert done.code == 0, done.err
        assert "lacks this run: no answer within 0.5 s)" in done.out
        assert f"Data is safe in {path}; retry with: python scripts/sync.py {path}\n" in done.out
        assert len([line for line in logged(path) if "loss" in line]) == 60
    lock.communicate("")

    code, said = sync("outputs/bignet-fp32-s0")
    assert code == 0, said
    assert points(store) == {"bignet-fp32-s0": once(60)}
    assert train(*BIGNET, "seed=2", "steps=2").code == 0
    assert points(store) == {"bignet-fp32-s0": once(60), "bignet-fp32-s2": once(2)}
    code, said = sync()
    assert code == 0
    assert said.count(": already complete\n") == 2
    assert points(store) == {"bignet-fp32-s0": once(60), "bignet-fp32-s1": once(60), "bignet-fp32-s2": once(2)}
    assert runs(store) == [(f"bignet-fp32-s{seed}", "FINISHED") for seed in (0, 1, 2)]


SERVER = """
import os, sys, time
from pathlib import Path
database, port, hold_file = sys.argv[1:]
os.environ |= {"_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{database}", "_MLFLOW_SERVER_SERVE_ARTIFACTS": "false",
               "_MLFLOW_SERVER_ARTIFACT_ROOT": f"{Path(database).parent}/artifacts"}
from mlflow.server import app
from werkzeug.serving import make_server
def held(environ, start_response):
    if not Path(hold_file).exists():
        return app(environ, start_response)
    while Path(hold_file).exists():
        time.sleep(0.05)
    start_response("503 Service Unavailable", [])  # whoever asked has gone
    return []
make_server("127.0.0.1", int(port), held, threaded=True).serve_forever()
"""


@pytest.fixture
def serve(folder: Path, store: Path) -> Iterator[Callable[[int], None]]:
    """MLflow's own server, which answers no call while there is a file ``hold``."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(port: int) -> None:
        command = [sys.executable, "-c", SERVER, str(store), str(port), str(folder / "hold")]
        begun.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 300
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.1)

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def test_an_absent_and_a_slow_server_get_all_of_it_later(
    train: Callable[..., Any],
    sync: Sync,
    serve: Callable[[int], None],
    folder: Path,
    store: Path,
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    remote = (f"tracking.uri=http://127.0.0.1:{port}", "tracking.patience_s=1", "tracking.flush_every_s=0.2")
    long = (*BIGNET, "steps=1500", "eval_every=1500", "log_every=10")
    absent = train(*BIGNET, "seed=0", "steps=60", "log_every=1", *remote)
    (folder / "hold").touch()
    serve(port)
    slow = train(*long, "seed=2", *remote)  # it ends, so no step waited for an answer: none comes
    assert [run.code for run in (absent, slow)] == [0, 0]
    for run, seed in ((absent, 0), (slow, 2)):
        assert f"python scripts/sync.py outputs/bignet-fp32-s{seed}\n" in run.out
    assert len([line for line in logged(folder / "outputs/bignet-fp32-s0") if "loss" in line]) == 60
    assert len([line for line in logged(folder / "outputs/bignet-fp32-s2") if "loss" in line]) == 151

    (folder / "hold").unlink()
    code, said = sync()
    assert code == 0, said
    assert len(said.splitlines()) == 2, said  # one for each run, and nothing of MLflow's own
    assert points(store) == {"bignet-fp32-s0": once(60), "bignet-fp32-s2": Counter([1, *range(10, 1501, 10)])}
    assert runs(store) == [("bignet-fp32-s0", "FINISHED"), ("bignet-fp32-s2", "FINISHED")]
    code, said = sync("outputs/bignet-fp32-s0", "outputs/bignet-fp32-s2")
    assert (code, said.count(": already complete\n")) == (0, 2)
