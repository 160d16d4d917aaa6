"""Runs that are killed with SIGKILL, and MLflow's server with them, resumed until done, and compared.

Each run is compared with an uninterrupted one: the last checkpoint by bit (weights, optimizer, averages, generators),
the metric log line by line (without clocks), MLflow's points, each exactly once, and the files that are there: none
more, none less. A moment is an event outside (a line is logged, the summary is written) and a random part of a second
after it, or a number of events inside (see tests/kills/killed.py): a file is changed or removed, a module computes.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import forks, shortcuts
from tests.helpers import same_bits
from tests.kills.killed import KINDS
from tests.parallel.conftest import FORKED_TORCHRUN, forked_environment
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import steps as saved_steps
from trainer.files import final_status, read_json_lines
from trainer.tracking.store import curve_key
from trainer.tracking.tracked_run import TrackedRun

PROJECT = Path(__file__).resolve().parents[2]
OPTIONS = [
    *("batch_size=8", "micro_batch_size=2", "eval_every=5", "eval_samples=6", "log_every=4", "checkpoint.every=3"),
    *("deterministic=true", "profiler=none", "clip=norm"),
    *("tracking=mlflow", "tracking.flush_every_s=0.2", "tracking.system_metrics=false", "tracking.upload_timeout_s=30"),
    *("resume=auto", "run_name=run"),
]
CLOCKS = ("time", "step_time_", "throughput", "mfu", "process_memory_", "peak_memory_", "checkpoint_stall_s")
PLAN = ("start", "training", "saving", "closing", "delivery", "sync", *KINDS, "file")
LONGEST_S = 600
SERVER = """
import socket, sys
import uvicorn
from mlflow.server.fastapi_app import app

own = socket.socket()
own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
own.bind(("127.0.0.1", int(sys.argv[1])))
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[own])
"""


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    options: list[str]
    ranks: int = 0
    """Of torchrun; 0: no torchrun."""
    served: bool = False
    """MLflow is a server, which is killed too."""
    own: tuple[str, ...] = ()
    """Moments that only this one has."""


GPT2 = ["recipe=gpt2", "recipe.size=nano", "recipe.context=8", "recipe.dropout=0.1"]
BIGNET = ["recipe=bignet", "recipe.width=64", "recipe.layers=4", "steps=24"]
JOBS = {
    "bignet": Job([*BIGNET, "checkpoint.keep=2", "tracking.checkpoints=all"], own=("set-up",)),
    "gpt2: Muon, EMA, epochs, bf16, text": Job(
        [
            *(*GPT2, "data=text", "data.path=../notes.txt", "data.tokenizer=chars", "data.valid_fraction=0.2"),
            *("optimizer=muon", "ema=default", "precision=bf16", "epochs=2", "eval_every=auto", "batch_size=16"),
        ],
        own=("set-up",),
    ),
    "resnet: SGD, fp16 with a scaler": Job(
        [
            *("recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "recipe.image_size=32", "data=digits", "steps=24"),
            *("optimizer=sgd", "optimizer.lr=0.01", "precision=fp16", "batch_size=4"),
            *("scaler.init=67108864", "scaler.interval=3"),  # too large, and growing again soon: steps are skipped
        ],
    ),
    "gpt2: EMA, two ranks": Job(
        [*GPT2, "data=synthetic", "data.vocab_size=64", "ema=default", "parallel=ddp", "steps=24"],
        ranks=2,
        own=("a rank", "all ranks", "torchrun"),
    ),
    "bignet: EMA, a server": Job(
        [*BIGNET, "ema=default", "tracking.checkpoints=all", "tracking.register=net"],
        served=True,
        own=("server", "server", "server and run", "server down"),
    ),
}


@dataclass
class Place:
    """A folder in which a job runs, and its server."""

    job: Job
    folder: Path
    store: Path
    """MLflow's empty database, to be copied."""
    draw: random.Random = field(default_factory=random.Random)
    counts: dict[str, int] = field(default_factory=dict)
    """By kind, how many events an uninterrupted run has."""
    set_up: bool = False
    """Whether MLflow sets its database up, instead of a copy."""

    def __post_init__(self) -> None:
        for name in ("outputs", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        notes = self.folder.parent / "notes.txt"
        if not notes.exists():
            notes.write_text("the quick brown fox jumps over the lazy dog. " * 30)
        self.log = self.folder / "log.txt"
        self.server: forks.Popen | None = None
        if self.job.served:
            shutil.copy(self.store, self.folder / "mlflow.db")
            self.reserved = socket.socket()  # while the server is down, no other program gets its port
            self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.reserved.bind(("127.0.0.1", 0))
            self.port = self.reserved.getsockname()[1]
            self.serve()

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    def _environment(self) -> dict[str, str]:
        own = {"MANTISSA_CACHE": str(self.folder / "cache"), "TMPDIR": str(self.folder / "tmp")}
        own |= {} if self.set_up else {shortcuts.STORE: str(self.store)}
        return {key: value for key, value in forked_environment().items() if key != shortcuts.STORE} | own

    def serve(self) -> None:
        """Start the server, or start it again."""
        of = {
            "FILE_STORE": f"sqlite:///{self.folder / 'mlflow.db'}",
            "ARTIFACT_ROOT": "mlflow-artifacts:/",
            "SERVE_ARTIFACTS": "true",
            "ARTIFACT_DESTINATION": str(self.folder / "mlartifacts"),
        }
        environment = self._environment() | {f"_MLFLOW_SERVER_{key}": value for key, value in of.items()}
        self.end_server()
        with (self.folder / "tmp" / "server.txt").open("ab") as out:
            command = [sys.executable, "-c", SERVER, str(self.port)]
            self.server = forks.Popen(
                command, cwd=self.folder / "tmp", env=environment, stdout=out, stderr=subprocess.STDOUT
            )

        def answers() -> bool:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            return False

        self.wait_for(answers, self.server, "the server")

    def end_server(self) -> None:
        """Kill the server, if it runs."""
        if self.server and self.server.poll() is None:
            self.server.kill()
            self.server.wait()

    def start(self, kill: str = "", script: str = "scripts/train.py") -> forks.Popen:
        """Start the job; ``kill`` is for tests/kills/killed.py."""
        torchrun = [*FORKED_TORCHRUN, "--standalone", f"--nproc-per-node={self.job.ranks}"]
        command = torchrun if self.job.ranks and "train" in script else [sys.executable]
        command += (
            [str(PROJECT / "tests" / "kills" / "killed.py"), kill, "counts.json"] if kill else [str(PROJECT / script)]
        )
        if "train" in script:
            address = [f"tracking.uri=http://127.0.0.1:{self.port}"] if self.job.served else []
            command += [*OPTIONS, *self.job.options, *address]
        with self.log.open("wb") as out:
            return forks.Popen(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, event: Callable[[], bool], process: forks.Popen, what: str) -> bool:
        """Wait; False: the process has ended before."""
        began = time.monotonic()
        while not event():
            if process.poll() is not None:
                return False
            assert time.monotonic() - began < LONGEST_S, f"{what}: nothing happens in {self.folder}"
            time.sleep(0.002)
        return True

    def kill_at(self, moment: str) -> bool:
        """Start the job and kill it, or the server, at this moment; False: it ended before."""
        if moment in KINDS:
            number = self.draw.randint(1, max(self.counts.get(moment, 20) // 2, 1))
            rank = self.draw.randrange(self.job.ranks or 1) if moment in ("evaluation", "accumulation") else 0
            process = self.start(f"{moment}:{number}:{rank}")
            return process.wait() != 0
        if moment == "server down":
            self.end_server()
            moment = self.draw.choice(("training", "delivery", "start"))
        lines = self._lines() + self.draw.randint(1, 6)
        saves = self.draw.randint(1, 4) + len(list(self.outputs.glob("*/checkpoints/step-*")))
        own = moment in self.job.own and moment != "set-up"
        event = self.draw.choice(("training", "saving", *["delivery"] * (moment == "server"))) if own else moment
        happened: dict[str, Callable[[], bool]] = {
            "set-up": lambda: any(self.folder.glob(".mlflow.db.*.partial")) or (self.folder / "mlflow.db").exists(),
            "training": lambda: self._lines() >= lines,
            "saving": lambda: len(list(self.outputs.glob("*/checkpoints/*"))) >= saves,
            "closing": lambda: any(self.outputs.glob("*/best")),
            "delivery": lambda: any(self.outputs.glob("*/summary.json")),
        }
        process = self.start(script="scripts/sync.py" if moment == "sync" else "scripts/train.py")
        ranks = self._ranks(process) if self.job.ranks and moment != "sync" else []
        if not self.wait_for(happened.get(event, lambda: True), process, moment):
            return False
        time.sleep(self.draw.random() * {"start": 1.5, "set-up": 1.5, "sync": 1.5, "delivery": 0.8}.get(event, 0.3))
        if process.poll() is not None:
            return False
        if moment.startswith("server"):
            self.end_server()
            if moment == "server":  # it comes back while the run goes on
                time.sleep(self.draw.random())
                self.serve()
                process.wait()
                return True
        if moment == "a rank":
            self.draw.choice(ranks).kill()
            process.wait()
        else:
            process.kill()
        if moment == "torchrun":  # the ranks go on without it, for a while
            time.sleep(self.draw.random())
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        process.wait()
        psutil.wait_procs(ranks)
        if self.job.served and self.draw.random() < 0.7:
            self.serve()
        return True

    def _ranks(self, torchrun: forks.Popen) -> list[psutil.Process]:
        found: list[psutil.Process] = []

        def all_there() -> bool:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(torchrun.pid).children(recursive=True)
                found[:] = [child for child in children if child.name().startswith("rank")]
            return len(found) == self.job.ranks

        self.wait_for(all_there, torchrun, "torchrun")
        return found

    def until_done(self) -> Path:
        """Resume until the run has finished and MLflow has it; whoever leaves something undelivered has to say so."""
        for _ in range(10):
            if self.job.served and (not self.server or self.server.poll() is not None):
                self.serve()
            code = self.start().wait()
            text = self.log.read_text(encoding="utf-8", errors="replace")
            assert code == 0, text
            (finished,) = [path for path in self.outputs.iterdir() if final_status(path) == "FINISHED"]
            if TrackedRun.read(finished).delivered:
                break
            assert "python scripts/sync.py" in text, f"ended with something undelivered, and did not say so: {text}"
        else:
            raise AssertionError(f"not delivered after ten attempts: {text}")
        # Those that were killed before their first checkpoint are never resumed.
        assert self.start(script="scripts/sync.py").wait() == 0, self.log.read_text()
        return finished

    def _lines(self) -> int:
        count = 0
        for path in self.outputs.glob("*/metrics.jsonl"):
            with suppress(OSError):
                count += path.read_bytes().count(b"\n")
        return count


@contextmanager
def placed(name: str, folder: Path, store: Path, **given: object) -> Iterator[Place]:
    """A place for a job; its server ends with it."""
    place = Place(JOBS[name], folder, store, **given)  # type: ignore[arg-type]
    try:
        yield place
    finally:
        place.end_server()
        if place.job.served:
            place.reserved.close()


def compared(whole: Path, killed: Path) -> dict[str, list[str]]:
    """Return what differs between the run that nobody disturbed and the one that was killed, by kind."""
    last = saved_steps(whole / "checkpoints")[-1]
    if saved_steps(killed / "checkpoints")[-1] != last:
        return {"bits": ["the last checkpoint is of another step"]}
    one, other = (load(run / "checkpoints", last) for run in (whole, killed))
    tensors, others = one.tensors(), other.tensors()
    bits = [f"tensor {name}" for name in tensors.keys() ^ others.keys()]
    bits += [f"tensor {name}" for name in tensors.keys() & others.keys() if not same_bits(tensors[name], others[name])]
    progress = [{key: value for key, value in each.progress.items() if key != "options"} for each in (one, other)]
    if progress[0] != progress[1] or (one.scores, one.loss_scale) != (other.scores, other.loss_scale):
        bits.append("the checkpoint's progress")
    lines = ["metrics.jsonl"] * (metrics(whole) != metrics(killed))
    stored, expected = _exact(points(killed)), _exact(points(whole))
    # MLflow gets the best value whenever a run ends, also of one that has lost a rank.
    unlike = (expected - stored) | {point for point in stored - expected if not point[0].startswith("best_")}
    found = [f"MLflow's points {sorted(map(str, unlike))[:4]}"] * bool(unlike)
    sent = [path.parent for path in killed.parent.glob("*/tracking.json") if TrackedRun.read(path.parent).run_id]
    found += [difference for run in sent for difference in undelivered(run)]
    return {"bits": bits, "lines": lines, "points": found, "left over": left_over(whole, killed)}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metric log without times and memory, which differ between equal runs."""
    return [
        {key: value for key, value in line.items() if not (key.startswith(CLOCKS) or key.endswith("_per_s"))}
        for line in read_json_lines(run / "metrics.jsonl")
    ]


def undelivered(run: Path) -> list[str]:
    """Return what MLflow has not exactly once, by the run's own log."""
    stored = Counter((key, step) for key, step, _ in points(run))
    logged: Counter[tuple[str, int]] = Counter()
    for text in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            line = json.loads(text)
            step = line.pop("step")
            logged.update((curve_key(key), step) for key, value in line.items() if key != "time" and value is not None)
    twice = [f"{point} {count} times in MLflow" for point, count in stored.items() if count > 1]
    return [f"{point} is not in MLflow" for point in logged if not stored[point]] + twice


def points(run: Path) -> list[tuple[str, int, float]]:
    """Return key, step and value of every point that MLflow has of a run, as often as it has it."""
    query = "select key, step, value from metrics where run_uuid = ?"
    return [(key, step, value) for key, step, value in _asked(run, query, str(TrackedRun.read(run).run_id))]


def _asked(run: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(run.parents[1] / "mlflow.db")) as database:
        return database.execute(query, values).fetchall()


def left_over(whole: Path, killed: Path) -> list[str]:
    """Return which files are there more or less than in the place of the whole run, and what is open in MLflow.

    A run that was killed before its first checkpoint stays as it was.
    """
    one = _files(whole)
    other = {name for name in _files(killed) if ".artifact.uploading." not in name}  # what MLflow leaves is its own
    found = [f"{name} is left over" for name in sorted(other - one)] + [
        f"{name} is gone" for name in sorted(one - other)
    ]
    statuses = [status for (status,) in _asked(killed, "select status from runs where status = 'RUNNING'")]
    return found + [f"{len(statuses)} runs are RUNNING in MLflow"] * bool(statuses)


def _files(run: Path) -> set[str]:
    """Name all files but those of other runs, with MLflow's ids replaced."""
    own, here = str(TrackedRun.read(run).run_id), run.parents[1]
    others = {path.name for path in (here / "outputs").iterdir() if path.name[0] != "."} - {run.name}
    others |= {each for (each,) in _asked(run, "select run_uuid from runs")} - {own} | {"tmp", "log.txt", "counts.json"}
    names = {own: "ID", run.name: "run"}
    places = [path.relative_to(here).parts for path in here.rglob("*")]
    kept = [parts for parts in places if not others & set(parts)]
    return {"/".join(names.get(part, part) for part in parts) for parts in kept}


def _exact(stored: list[tuple[str, int, float]]) -> set[tuple[str, int, float]]:
    names = {point: re.sub("^train/", "", point[0]) for point in stored}
    return {point for point, name in names.items() if not name.startswith(CLOCKS) and not name.endswith("_per_s")}
