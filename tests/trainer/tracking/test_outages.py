"""Nothing is lost or doubled on the way to MLflow, compared with metrics.jsonl point for point.

python -m tests.trainer.tracking.test_outages [kills=20] [down_s=60] [attempts=1100] [seed=0]        the large form
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import shortcuts
from tests.helpers import PROJECT
from tests.tracked import asked, open_log, run_id
from trainer.files import read_json_lines
from trainer.tracking import follower
from trainer.tracking.sync import send

STEPS = 600
RUN = """
import sys, time
from pathlib import Path
from tests.tracked import open_log
from trainer.files import read_json_lines

folder, uri, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
logged = [line["step"] for line in read_json_lines(folder / "metrics.jsonl")]
resumed = max(logged, default=0) // 50 * 50 if (folder / "tracking.json").exists() else None
log = open_log(folder, resumed, uri=uri, upload_timeout_s=60.0)
for step in range((resumed or 0) + 1, steps + 1):
    log.append(step, {"loss": 1 / step, "lr": float(step)})
    time.sleep(0.01)
log.close("FINISHED", {})
"""
SERVER = """
import sys
import uvicorn
from mlflow.server.fastapi_app import app

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[bytes]:
    own = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compare(folder: Path, database: Path) -> tuple[int, int, int]:
    """Return how many points a run has logged, how many of them the store lacks, and how many it has beside them."""
    logged: Counter[tuple[str, int, float]] = Counter()
    for line in read_json_lines(folder / "metrics.jsonl"):
        logged.update((key, line["step"], float(line[key])) for key in ("loss", "lr"))
    query = "select key, step, value from metrics where run_uuid = ? and key in ('loss', 'lr')"
    stored = Counter(map(tuple, asked(f"sqlite:///{database}", query, run_id(folder))))
    return logged.total(), (logged - stored).total(), (stored - logged).total()


class Server:
    """MLflow's server over a database, which may be killed."""

    def __init__(self, database: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._environment = {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{database}",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": str(database.parent / "mlartifacts"),
            "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "true",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = start(SERVER, self.port, **self._environment)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


def kill_and_resume(folder: Path, database: Path, kills: int, draw: random.Random, server: Server | None) -> None:
    """Train a run that is killed so many times, and its server with it, until it is complete."""
    uri = server.uri if server else f"sqlite:///{database}"
    log = folder / "metrics.jsonl"
    for _ in range(kills):
        if server:
            server.start()
        process = start(RUN, folder, uri, STEPS)
        before = log.stat().st_size if log.exists() else -1
        while process.poll() is None and (log.stat().st_size if log.exists() else -1) <= before:
            time.sleep(0.01)
        time.sleep(draw.random() * 6)  # a random moment: while it connects, sends, or ends
        for each in draw.sample([process, server] if server else [process], 1 + bool(server)):
            each.kill()
            time.sleep(draw.random() / 2)
        process.wait()
    if server:
        server.start()
    assert start(RUN, folder, uri, STEPS).wait() == 0
    assert send(folder).status in ("sent", "complete")


def check_kills(tmp_path: Path, empty_store: Path, served: bool, kills: int, seed: int) -> None:
    """A run is killed so many times, and a server with it."""
    database = Path(shutil.copy(empty_store, tmp_path / "mlflow.db"))
    server = Server(database) if served else None
    try:
        kill_and_resume(tmp_path / "run", database, kills, random.Random(seed), server)
    finally:
        if server:
            server.kill()
    report(f"{kills} kills, {'a server that is killed too' if served else 'an embedded store'}", tmp_path)


@pytest.mark.parametrize("served", [False, True])
def test_kills(tmp_path: Path, empty_store: Path, served: bool) -> None:
    check_kills(tmp_path, empty_store, served, kills=1, seed=0)


def check_down(tmp_path: Path, empty_store: Path, down_s: float) -> None:
    """A server starts only so many seconds after the run."""
    server = Server(Path(shutil.copy(empty_store, tmp_path / "mlflow.db")))
    log = open_log(tmp_path / "run", uri=server.uri, upload_timeout_s=600.0)
    later = threading.Timer(down_s, server.start)
    later.start()
    try:
        train(log)
        later.join()
        log.close("FINISHED", {})
    finally:
        server.kill()
    report(f"a store that is down for {down_s:g} s", tmp_path)


def test_a_store_that_is_down_at_first(tmp_path: Path, empty_store: Path) -> None:
    check_down(tmp_path, empty_store, down_s=0.0)


def check_failures(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, attempts: int) -> None:
    """A store refuses so many attempts."""
    database = Path(shutil.copy(empty_store, tmp_path / "mlflow.db"))
    real, failed = follower.connect, []

    def connect(uri: str) -> Any:
        if len(failed) < attempts:
            failed.append(uri)
            raise ConnectionError("503")
        return real(uri)

    monkeypatch.setattr(follower, "connect", connect)
    monkeypatch.setattr(follower, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(follower, "LONGEST_PAUSE_S", 0.01)
    log = open_log(tmp_path / "run", uri=f"sqlite:///{database}")
    train(log)
    log.close("FINISHED", {})
    assert len(failed) == attempts
    report(f"a store that fails {attempts} attempts", tmp_path)


def test_a_store_that_fails(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_failures(tmp_path, empty_store, monkeypatch, attempts=20)


def train(log: Any) -> None:
    """Log all steps at once."""
    for step in range(1, STEPS + 1):
        log.append(step, {"loss": 1 / step, "lr": float(step)})


def report(what: str, place: Path) -> None:
    """Print how many points arrived, and fail where one is lost or doubled."""
    logged, lost, others = compare(place / "run", place / "mlflow.db")
    print(f"{what}: {logged} points, {lost} lost, {others} doubled")
    assert (logged, lost, others) == (2 * STEPS, 0, 0)


if __name__ == "__main__":
    given = {"kills": "20", "down_s": "60", "attempts": "1100", "seed": "0"}
    given |= dict(argument.split("=", 1) for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        empty = Path(scratch, "empty.db")
        shortcuts.set_up(empty)
        places = [Path(scratch, str(number)) for number in range(4)]
        for place in places:
            place.mkdir()
        check_failures(places[0], empty, patch, int(given["attempts"]))
        patch.undo()
        check_down(places[1], empty, float(given["down_s"]))
        for place, served in zip(places[2:], (False, True), strict=True):
            check_kills(place, empty, served, int(given["kills"]), int(given["seed"]))
