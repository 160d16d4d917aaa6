"""Runs that are killed from outside with SIGKILL at random moments, resumed until done, and compared.

python -m tests.kills [kills=200] [seed=0]

Each run is compared with an uninterrupted one: the last checkpoint by bit (weights, optimizer, generators), the
metric log line by line (without clocks), and MLflow's points, each exactly once. A moment is an event in the run
folder (the database is being set up, a line is logged, the summary is written) and a random part of a second after it,
so how fast the machine is decides only where the kill falls.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from evidence.certificate.certify import COMMON, DEFAULTS
from evidence.certificate.differences import metrics, ulps
from tests import forks
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import steps as saved_steps
from trainer.seals import final_status
from trainer.tracking.mlflow.record import is_delivered, read_record
from trainer.tracking.mlflow.store import valid_key
from trainer.tracking.sync import SyncStatus, send

PROJECT = Path(__file__).resolve().parents[1]
JOBS = {recipe: [f"recipe={recipe}", *DEFAULTS[recipe]] for recipe in ("gpt2", "resnet", "bignet")}
JOBS["resnet"] += ["batch_size=4", "micro_batch_size=2", "checkpoint.every=5"]  # its checkpoints are 130 MB
OPTIONS = [
    *(option for option in COMMON if option != "tracking=local"),
    *("tracking=mlflow", "tracking.flush_every_s=0.2", "tracking.system_metrics=false", "resume=auto"),
]
CLOCKS = ("step_time_s", "mfu", "memory_bytes", "checkpoint_stall_s", "final/")
PLAN = ("start", "set-up", "start", "training", "training", "saving", "closing", "delivery", "delivery", "training")
LONGEST_S = 600


def disturbed(job: list[str], folder: Path, moments: Sequence[str], draw: random.Random) -> tuple[list[str], Path]:
    """Run a job in this folder that is killed at each of these moments, then resumed until it is done.

    Returns:
        The moments at which it was killed, since it may have ended before, and its run folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    killed = [moment for moment in moments if _killed_at(job, folder, moment, draw)]
    return killed, _until_done(job, folder)


def _killed_at(job: list[str], folder: Path, moment: str, draw: random.Random) -> bool:
    """Start the job and kill it a random while after an event; False: it ended before."""
    outputs, fraction = folder / "outputs", draw.random()
    lines = _lines(outputs) + draw.randint(1, 6)
    saves = draw.randint(1, 4) + len(list(outputs.glob("*/checkpoints/step-*")))
    event: Callable[[], bool] = {
        "start": lambda: True,
        "set-up": lambda: any(folder.glob(".mlflow.db.*.partial")) or (folder / "mlflow.db").exists(),
        "training": lambda: _lines(outputs) >= lines,
        "saving": lambda: len(list(outputs.glob("*/checkpoints/*"))) >= saves,
        "closing": lambda: any(outputs.glob("*/best")) or any(outputs.glob("*/plots")),
        "delivery": lambda: any(outputs.glob("*/summary.json")),
    }[moment]
    process = _start(job, folder, folder / "log.txt")
    began = time.monotonic()
    while not event():
        if process.poll() is not None:
            return False
        assert time.monotonic() - began < LONGEST_S, f"{moment}: nothing happens in {folder}"
        time.sleep(0.002)
    time.sleep(fraction * {"start": 2.0, "set-up": 1.5, "delivery": 0.8}.get(moment, 0.3))
    if process.poll() is not None:
        return False
    process.kill()
    process.wait()
    return True


def _start(job: list[str], folder: Path, log: Path) -> forks.Popen:
    with log.open("wb") as out:
        command = [sys.executable, str(PROJECT / "scripts" / "train.py"), *job]
        return forks.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)


def _until_done(job: list[str], folder: Path) -> Path:
    """Resume until the run has finished and MLflow has it; whoever leaves something undelivered has to say so."""
    log = folder / "log.txt"
    for _ in range(10):
        code = _start(job, folder, log).wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        assert code == 0, text
        (finished,) = [path for path in (folder / "outputs").iterdir() if final_status(path) == "FINISHED"]
        if is_delivered(finished):
            return finished
        assert "python scripts/sync.py" in text, f"ended with something undelivered, and did not say so: {text}"
    raise AssertionError(f"not delivered after ten attempts: {text}")


def compared(whole: Path, killed: Path, last_step: int) -> list[str]:
    """Return what differs between the run that nobody disturbed and the one that was killed."""
    one, other = (load(run / "checkpoints", last_step) for run in (whole, killed))
    tensors, others = one.tensors(), other.tensors()
    differences = [f"tensor {name}" for name in tensors.keys() ^ others.keys()]
    differences += [f"tensor {name}" for name in tensors.keys() & others.keys() if ulps(tensors[name], others[name])]
    if one.progress != other.progress:
        differences.append("the checkpoint's progress")
    if metrics(whole) != metrics(killed):
        differences.append("metrics.jsonl")
    if unlike := _exact(points(whole)) ^ _exact(points(killed)):
        differences.append(f"MLflow's points {sorted(map(str, unlike))[:4]}")
    return differences + undelivered(killed)


def undelivered(run: Path) -> list[str]:
    """Return what MLflow has not exactly once, by the run's own log."""
    stored = Counter((key, step) for key, step, _ in points(run))
    logged: Counter[tuple[str, int]] = Counter()
    for text in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            line = json.loads(text)
            step = line.pop("step")
            logged.update((valid_key(key), step) for key, value in line.items() if key != "time" and value is not None)
    twice = [f"{point} {count} times in MLflow" for point, count in stored.items() if count > 1]
    return [f"{point} is not in MLflow" for point in logged if not stored[point]] + twice


def points(run: Path) -> list[tuple[str, int, float]]:
    """Return key, step and value of every point that MLflow has of a run, as often as it has it."""
    query = "select key, step, value from metrics where run_uuid = ? and key not like 'system/%'"
    with closing(sqlite3.connect(run.parents[1] / "mlflow.db")) as database:
        return database.execute(query, (read_record(run)["run_id"],)).fetchall()


def _exact(stored: list[tuple[str, int, float]]) -> set[tuple[str, int, float]]:
    return {point for point in stored if not point[0].startswith(CLOCKS) and not point[0].endswith("_per_s")}


def _lines(outputs: Path) -> int:
    count = 0
    for path in outputs.glob("*/metrics.jsonl"):
        with suppress(OSError):
            count += path.read_bytes().count(b"\n")
    return count


def job_of(recipe: str, steps: int, name: str) -> list[str]:
    """Return the overrides of a job."""
    return [*OPTIONS, *JOBS[recipe], f"steps={steps}", f"run_name={name}"]


def campaign(folder: Path, kills: int, seed: int, steps: int = 40) -> int:
    """Kill runs of the recipes in turn until there were so many kills; return the number of rounds that differ."""
    draw, counted, bad = random.Random(seed), Counter[str](), 0
    jobs = {recipe: job_of(recipe, steps, "run") for recipe in JOBS}
    whole = {recipe: disturbed(job, folder / f"{recipe}-whole", (), draw)[1] for recipe, job in jobs.items()}
    for number, recipe in enumerate(itertools.cycle(JOBS)):
        if counted.total() >= kills:
            break
        moments = [draw.choice(PLAN) for _ in range(min(draw.randint(1, 8), kills - counted.total()))]
        if draw.random() < 0.5:
            moments[0] = "set-up"  # which comes only once
        here = folder / f"{recipe}-{number}"
        here.mkdir(parents=True)
        if "set-up" not in moments:
            shutil.copy(whole[recipe].parents[1] / "mlflow.db", here)
        killed, run = disturbed(jobs[recipe], here, moments, draw)
        assert saved_steps(run / "checkpoints")[-1] == steps
        differences = compared(whole[recipe], run, steps)
        for left in sorted((here / "outputs").glob("*/tracking.json")):  # killed before a checkpoint, never resumed
            outcome = send(left.parent)
            differences += [outcome.message] * (outcome.status is SyncStatus.INCOMPLETE)
            differences += undelivered(left.parent) if (left.parent / "metrics.jsonl").exists() else []
        counted.update(killed)
        bad += bool(differences)
        if not differences:  # what is kept is to be looked at
            shutil.rmtree(here)
        print(f"{here.name}: kills {', '.join(killed)}: {'; '.join(differences[:3]) or 'equal'}", flush=True)
    print(f"{counted.total()} kills in {number} rounds ({dict(counted)}): {bad} rounds differ")
    return bad


def main() -> int:
    """Run the long form in ``kills/``; the exit code is 1 where anything differed."""
    forks.Popen = subprocess.Popen  # type: ignore[misc,assignment]  # not tests.shortcuts: MLflow's set-up is killed too
    options = {"kills": "200", "seed": "0"} | dict(argument.split("=", 1) for argument in sys.argv[1:])
    return int(campaign(Path("kills").resolve(), int(options["kills"]), int(options["seed"])) > 0)


if __name__ == "__main__":
    sys.exit(main())
