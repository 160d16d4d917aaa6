"""Runs that MLflow does not have whole, sent later: by ``scripts/sync.py``, or beside a later run."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from trainer.delivery import TRACKING_FILE, Delivery, Progress, RunInfo, first_line
from trainer.errors import UserError
from trainer.mlflow_record import final_status, is_delivered
from trainer.mlflow_store import lasting_uri, tracking_uri, whole_uri, without_password

log = logging.getLogger("mantissa")

ATTEMPTS = 2
"""A connection that a server has closed meanwhile fails once."""
SHARE = 0.1
"""Of the time while a run trains: Python's threads take turns, and training needs most of them."""
LONGEST_PAUSE_S = 5.0
LAST_S = 3.0
"""How long a run that has ended lets the sending of earlier ones continue."""


class Stopped(Exception):
    """Nobody waits for this delivery any more."""


class Outcome(NamedTuple):
    """What became of one run."""

    left_over: bool
    """Whether MLflow still lacks something that it should have."""
    text: str
    sent: bool = False
    """Whether MLflow lacked something of it, and has it now."""


def command(folder: Path) -> str:
    """Return the command line that sends a run to MLflow."""
    return shlex.join(["python", "scripts/sync.py", str(folder)])


def runs_in(output_dir: Path) -> list[Path]:
    """Return the run folders in an output folder, the oldest first.

    Raises:
        UserError: there is no such folder.

    """
    if not output_dir.is_dir():
        raise UserError(f"output_dir={output_dir}: no such folder; name the one that holds the run folders")
    files = sorted(output_dir.glob(f"*/{TRACKING_FILE}"), key=lambda path: path.stat().st_mtime)
    return [path.parent for path in files]


def check_run(folder: Path) -> Path:
    """Return a run folder that the user named.

    Raises:
        UserError: it is none.

    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a run folder such as outputs/gpt2-bf16-s0")
    RunInfo.read(folder)
    return folder


def send(folder: Path, uri: str | None = None, *, named: bool = False) -> Outcome:
    """Send to MLflow what it lacks of a run.

    Args:
        folder: the run's.
        uri: of the store; None: the one the run was told when it was trained.
        named: whether the user asked for this run, which a run with ``tracking=local`` needs.

    """
    try:
        info = RunInfo.read(folder)
        if info.uri is None and not named:
            return Outcome(False, "tracking=local; skipped")
        if is_delivered(folder, uri):
            return Outcome(False, "already complete")
        return _send(folder, _store_of(info, uri), info, lambda allowance_s: None)
    except UserError as error:
        return Outcome(True, str(error))


def _store_of(info: RunInfo, uri: str | None) -> str:
    return whole_uri(info.uri) if info.uri and not uri else tracking_uri(uri, "uri")


def _send(folder: Path, uri: str, info: RunInfo, progress: Progress) -> Outcome:
    from trainer.folder import RunFolder  # with torch, which a mistake need not wait for

    with ExitStack() as stack:
        try:
            stack.enter_context(RunFolder(folder).locked())
        except UserError:
            return Outcome(False, "is being trained or sent by another process; skipped")
        if is_delivered(folder, uri):
            return Outcome(False, "already complete")
        delivery = Delivery(folder, uri, info, training=False, progress=progress)
        problem: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                delivery.complete(final_status(folder) or "KILLED")
                if delivery.elsewhere is not None:
                    step = delivery.elsewhere
                    return Outcome(False, f"continued elsewhere (MLflow has step {step}); not sent over that")
                return Outcome(False, f"sent to {without_password(uri)}", sent=True)
            except Stopped:
                raise
            except Exception as error:  # of many kinds, by MLflow and what lies below it
                problem = error
                delivery.doubt()
        assert problem
        missing = delivery.missing()
        return Outcome(True, f"upload incomplete: {without_password(uri)} lacks {missing} ({first_line(problem)})")


class Backlog(threading.Thread):
    """Sends earlier runs of the same output folder to the store that takes the present one. Gives up at any trouble."""

    def __init__(self, present: Path, uri: str) -> None:
        super().__init__(name="mlflow-backlog", daemon=True)
        self._present = present
        self._uri = uri
        self._ending = threading.Event()
        self._stopped = False
        self._since = time.monotonic()

    def run(self) -> None:
        """Send one run after the other."""
        try:
            for folder in runs_in(self._present.parent):
                if folder.name == self._present.name or is_delivered(folder):
                    continue
                info = RunInfo.read(folder)
                if info.uri != lasting_uri(self._uri):  # of another store nothing is known, not even that it answers
                    continue
                self._pause()
                outcome = _send(folder, self._uri, info, lambda allowance_s: self._pause())
                if outcome.left_over:
                    return
                if outcome.sent:
                    log.info("MLflow has now been sent the earlier run %s too.", folder.name)
        except (Stopped, UserError, OSError):
            return

    def end(self, at_once: bool) -> None:
        """Stop: at once, or after a few seconds more of work; the call in progress is waited for a little."""
        self._ending.set()
        self.join(0 if at_once else LAST_S)
        self._stopped = True
        self.join(0 if at_once else 1.0)

    def _pause(self) -> None:
        """Between two calls: leave training most of the time."""
        if not self._ending.is_set():
            worked_s = time.monotonic() - self._since
            self._ending.wait(min(worked_s * (1 / SHARE - 1), LONGEST_PAUSE_S))
        self._since = time.monotonic()
        if self._stopped:
            raise Stopped
