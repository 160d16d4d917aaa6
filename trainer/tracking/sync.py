"""Runs that MLflow lacks or has only partly, sent later by ``scripts/sync.py``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from trainer.errors import UserError, redacted
from trainer.files import SUMMARY_FILE, final_status, in_use
from trainer.tracking.mlflow.addresses import explicit_uri, tracking_uri, whole_uri
from trainer.tracking.mlflow.feed import Feed
from trainer.tracking.mlflow.record import TRACKING_FILE, RunInfo, is_delivered, read_record


@dataclass
class SyncOptions:
    """Of scripts/sync.py."""

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
        options: of the command line.
        named: run folders; none: every run that is not complete.

    Returns:
        The exit code: 1 if something is still missing in MLflow.

    Raises:
        UserError: ``uri`` is not one, or a folder holds no run.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("mantissa").setLevel(logging.INFO)
    uri = options.uri or None
    explicit_uri(uri, "uri")
    if not options.output_dir.is_dir() and not named:
        raise UserError(f"output_dir={options.output_dir}: no such folder; name the one that holds the run folders")
    files = sorted(options.output_dir.glob(f"*/{TRACKING_FILE}"), key=lambda path: path.stat().st_mtime)
    folders = [Path(folder) for folder in named] or [path.parent for path in files]
    for folder in folders if named else ():
        RunInfo.read(folder)
    if not folders:
        print(f"no runs in {options.output_dir}")
    incomplete = False
    for folder in folders:
        result = send(folder, uri, named=bool(named))
        incomplete |= result.status == "incomplete"
        print(f"{folder}: {result.message}")
    return int(incomplete)


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
            return SyncResult("skipped", "tracking=local; skipped")
        if is_delivered(folder, uri):
            return SyncResult("complete", "already complete")
        store = whole_uri(info.uri) if info.uri and not uri else tracking_uri(uri, "uri")
    except UserError as error:
        return SyncResult("incomplete", str(error))
    try:
        with in_use(folder):
            missing = Feed(folder, store, info).conclude(final_status(folder) or "KILLED", patience_s=math.inf)
    except UserError:
        return SyncResult("skipped", "in use by another process; skipped")
    if missing:
        return SyncResult("incomplete", f"upload incomplete: {missing}")
    later = read_record(folder).get("continued_elsewhere")
    if later is not None:
        why = f"continued elsewhere (MLflow has step {later}); skipped to keep that run"
        return SyncResult("skipped", why)
    ended = "" if final_status(folder) else f"; it has no {SUMMARY_FILE}: it was killed, or the file was removed"
    return SyncResult("sent", f"sent to {redacted(store)}{ended}")
