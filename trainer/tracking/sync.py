"""Runs that MLflow lacks or has only partly, sent later by ``scripts/sync.py``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from trainer.errors import UserError, redacted
from trainer.files import SUMMARY_FILE, TRACKING_FILE, final_status, in_use
from trainer.tracking.follower import Follower
from trainer.tracking.options import Tracking
from trainer.tracking.store import configured_uri, store_uri
from trainer.tracking.tracked_run import TrackedRun

log = logging.getLogger("mantissa")


@dataclass
class SyncOptions:
    """Options of scripts/sync.py."""

    output_dir: Path = Path("outputs")
    uri: str = ""


class SyncResult(NamedTuple):
    """What ``send`` did with a run, and a sentence about it for the user."""

    status: Literal["sent", "complete", "skipped", "incomplete"]
    """``complete``: MLflow had all of it before; ``incomplete``: it still lacks something that it should have."""
    message: str


def sync(options: SyncOptions, named: Sequence[str]) -> int:
    """Send runs to MLflow, and print a line for each.

    Args:
        options: the command line's.
        named: run folders; none: every run that is not complete.

    Returns:
        The exit code: 1 if something is still missing in MLflow.

    Raises:
        UserError: ``uri`` is not one, or a folder holds no run.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    log.setLevel(logging.INFO)
    uri = options.uri or None
    configured_uri(uri, "uri")
    if not options.output_dir.is_dir() and not named:
        raise UserError(f"output_dir={options.output_dir}: no such folder; name the one that holds the run folders")
    files = sorted(options.output_dir.glob(f"*/{TRACKING_FILE}"), key=lambda path: path.stat().st_mtime)
    folders = [Path(folder) for folder in named] or [path.parent for path in files]
    for folder in folders if named else ():
        TrackedRun.read(folder)
    if not folders:
        print(f"no runs in {options.output_dir}")
    incomplete = False
    for folder in folders:
        result = send(folder, uri, named=bool(named))
        incomplete |= result.status == "incomplete"
        print(f"{folder}: {result.message}")
    return int(incomplete)


def send(folder: Path, uri: str | None = None, *, named: bool = False) -> SyncResult:
    """Send to MLflow what it lacks of a run, in one attempt.

    Args:
        folder: folder of the run.
        uri: address of the store; None: where the run was sent to before.
        named: whether the user named this run; a run with ``tracking=local`` is sent only then.
    """
    try:
        if TrackedRun.read(folder).uri is None and not named:
            return SyncResult("skipped", "tracking=local; skipped")
    except UserError as error:
        return SyncResult("incomplete", str(error))
    try:
        with in_use(folder):
            return _send(folder, uri, "uri")
    except UserError:
        return SyncResult("skipped", "in use by another process; skipped")


def finish_delivery(folder: Path, config: Tracking) -> None:
    """Send to MLflow what it lacks of a run that is complete, or warn; the caller holds the lock of its folder."""
    (folder / f".{SUMMARY_FILE}.partial").unlink(missing_ok=True)  # of a process that was killed at the very end
    if config.mlflow:
        result = _send(folder, configured_uri(config.uri), "tracking.uri")
        if result.status == "incomplete":
            log.warning("%s", result.message)
        elif result.status == "sent":
            log.info("MLflow now has the complete run.")


def _send(folder: Path, uri: str | None, key: str) -> SyncResult:
    """Send the rest of a run to ``uri``, the value of the option ``key``, else to where it was sent to before."""
    try:
        run = TrackedRun.read(folder)
        store = store_uri(uri, run.uri, key)
    except UserError as error:
        return SyncResult("incomplete", str(error))
    run.send_to(store)
    if run.delivered:
        return SyncResult("complete", f"already complete in {redacted(store)}")
    if incomplete := Follower(folder, store, run).send(final_status(folder) or "KILLED"):
        return SyncResult("incomplete", incomplete)
    ended = "" if final_status(folder) else f"; it has no {SUMMARY_FILE}: it was killed, or the file was removed"
    return SyncResult("sent", f"sent to {redacted(store)}{ended}")
