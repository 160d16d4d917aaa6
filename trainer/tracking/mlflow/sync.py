"""Runs that MLflow lacks or has only partly, sent later by ``scripts/sync.py``."""

from __future__ import annotations

from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError, first_line
from trainer.files import in_use
from trainer.tracking.mlflow.delivery import TRACKING_FILE, Delivery, RunInfo
from trainer.tracking.mlflow.delivery_record import final_status, is_delivered
from trainer.tracking.mlflow.store import tracking_uri, whole_uri, without_password

ATTEMPTS = 2
"""A connection that the server has closed in the meantime fails once."""


class SyncStatus(Enum):
    """What ``send`` did with a run."""

    SENT = "sent"
    COMPLETE = "complete"
    """MLflow had all of it before."""
    SKIPPED = "skipped"
    INCOMPLETE = "incomplete"
    """MLflow still lacks something that it should have."""


class SyncResult(NamedTuple):
    """What ``send`` did with a run, and a sentence about it for the user."""

    status: SyncStatus
    message: str


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
    """Return ``folder``, if it is a run folder.

    Raises:
        UserError: it is not.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a run folder such as outputs/gpt2-bf16-s0")
    RunInfo.read(folder)
    return folder


def send(folder: Path, uri: str | None = None, *, named: bool = False) -> SyncResult:
    """Send to MLflow what it lacks of a run.

    Args:
        folder: the run's.
        uri: of the store; None: the one of the run's config.
        named: whether the user named this run; a run with ``tracking=local`` is sent only then.
    """
    try:
        info = RunInfo.read(folder)
        if info.uri is None and not named:
            return SyncResult(SyncStatus.SKIPPED, "tracking=local; skipped")
        if is_delivered(folder, uri):
            return SyncResult(SyncStatus.COMPLETE, "already complete")
        return _send(folder, _store_of(info, uri), info)
    except UserError as error:
        return SyncResult(SyncStatus.INCOMPLETE, str(error))


def _store_of(info: RunInfo, uri: str | None) -> str:
    return whole_uri(info.uri) if info.uri and not uri else tracking_uri(uri, "uri")


def _send(folder: Path, uri: str, info: RunInfo) -> SyncResult:
    with ExitStack() as stack:
        try:
            stack.enter_context(in_use(folder))
        except UserError:
            return SyncResult(SyncStatus.SKIPPED, "in use by another process; skipped")
        if is_delivered(folder, uri):
            return SyncResult(SyncStatus.COMPLETE, "already complete")
        delivery = Delivery(folder, uri, info, training=False, progress=lambda allowance_s: None)
        problem: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                delivery.complete(final_status(folder) or "KILLED")
                if delivery.elsewhere is not None:
                    step = delivery.elsewhere
                    return SyncResult(
                        SyncStatus.SKIPPED, f"continued elsewhere (MLflow has step {step}); skipped to keep that run"
                    )
                return SyncResult(SyncStatus.SENT, f"sent to {without_password(uri)}")
            except Exception as error:  # of many kinds, by MLflow and what lies below it
                problem = error
                delivery.forget_answers()
        assert problem
        missing = delivery.missing()
        return SyncResult(
            SyncStatus.INCOMPLETE, f"upload incomplete: {without_password(uri)} lacks {missing} ({first_line(problem)})"
        )
