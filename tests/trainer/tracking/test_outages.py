"""Nothing is lost or doubled on the way to MLflow, compared with metrics.jsonl point for point.

python -m tests.trainer.tracking.test_outages        the large form
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
from collections.abc import Callable
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


def kill_and_resume(folder: Path, database: Path, count: int, draw: random.Random, server: Server | None) -> None:
    """Train a run that is killed so many times, and its server with it, until it is complete."""
    uri = server.uri if server else f"sqlite:///{database}"
    log = folder / "metrics.jsonl"
    for _ in range(count):
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


def kills(place: Path, database: Path, draw: random.Random, served: bool, count: int) -> None:
    """A run is killed so many times, and a server with it."""
    server = Server(database) if served else None
    try:
        kill_and_resume(place / "run", database, count, draw, server)
    finally:
        if server:
            server.kill()


def down(place: Path, database: Path, draw: random.Random, served: bool, count: float) -> None:
    """A server starts only so many seconds after the run."""
    server = Server(database)
    log = open_log(place / "run", uri=server.uri, upload_timeout_s=600.0)
    later = threading.Timer(count, server.start)
    later.start()
    try:
        train(log)
        later.join()
        log.close("FINISHED", {})
    finally:
        server.kill()


def failures(place: Path, database: Path, draw: random.Random, served: bool, count: int) -> None:
    """A store refuses so many attempts."""
    real, failed = follower.connect, []

    def connect(uri: str) -> Any:
        if len(failed) < count:
            failed.append(uri)
            raise ConnectionError("503")
        return real(uri)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "connect", connect)
        patch.setattr(follower, "FIRST_PAUSE_S", 0.001)
        patch.setattr(follower, "LONGEST_PAUSE_S", 0.01)
        log = open_log(place / "run", uri=f"sqlite:///{database}")
        train(log)
        log.close("FINISHED", {})
    assert len(failed) == count


def train(log: Any) -> None:
    """Log all steps at once."""
    for step in range(1, STEPS + 1):
        log.append(step, {"loss": 1 / step, "lr": float(step)})


OUTAGES: dict[str, tuple[Callable[..., None], bool, float, float]] = {
    "failures": (failures, False, 20, 1100),
    "down": (down, True, 0, 60),
    "kills": (kills, False, 1, 20),
    "kills of a server, too": (kills, True, 1, 20),
}
"""What happens, whether to a server, and how often in the short and the large form (``down``: for how many seconds)."""


def check(name: str, place: Path, empty_store: Path, large: bool) -> None:
    """Let it happen, and compare the log with the store."""
    happens, served, *counts = OUTAGES[name]
    database = Path(shutil.copy(empty_store, place / "mlflow.db"))
    happens(place, database, random.Random(0), served, counts[large])
    logged, lost, others = compare(place / "run", database)
    print(f"{name} ({counts[large]}): {logged} points, {lost} lost, {others} doubled")
    assert (logged, lost, others) == (2 * STEPS, 0, 0)


@pytest.mark.parametrize("name", OUTAGES)
def test_nothing_is_lost_or_doubled(name: str, tmp_path: Path, empty_store: Path) -> None:
    check(name, tmp_path, empty_store, large=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch, "empty.db")
        shortcuts.set_up(empty)
        for name in OUTAGES:
            (place := Path(scratch, name)).mkdir()
            check(name, place, empty, large=True)
