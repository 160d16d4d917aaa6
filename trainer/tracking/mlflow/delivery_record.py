"""``mlflow.json`` in a run folder: which run it is in MLflow, and whether MLflow has all of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from trainer.files import read_json_lines, read_object, write_json
from trainer.tracking.mlflow.store import SESSION_TAG, lasting_uri

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
RECORD_FILE = "mlflow.json"
SOURCE_FILE = "init_from.json"
"""In the folder of a run that started from another one: which one, and which weights of it."""
TOKENIZER = "tokenizer"
"""The folder in a run's that has the tokenizer of its text."""
IMAGES_FILE = "images.json"
"""In the folder of a run on images: the names of their classes, their size, and what they are normalised with."""
PRECISION_FILE = "precision.json"
_FILES = ("config.yaml", "config.json", SOURCE_FILE, IMAGES_FILE, PRECISION_FILE, SUMMARY_FILE, "failure.json")
ARTIFACTS = (*_FILES, TOKENIZER, "plots", "profile", "best")
"""What of a run folder goes to MLflow, beside the metrics: files, and folders under their own names."""


def read_record(folder: Path) -> dict[str, Any]:
    """Return ``mlflow.json``: ``run_id``, ``experiment_id``, ``tracking_uri``, the ``sessions`` that have trained the
    run here, and ``delivered`` once all is.

    Empty if MLflow has not answered yet, or the file is damaged: then the run is found by its key.
    """
    return read_object(folder / RECORD_FILE)


def is_delivered(folder: Path, uri: str | None = None) -> bool:
    """Return whether MLflow (at ``uri``; None: at any) has all that is in the folder, by ``mlflow.json``."""
    record = read_record(folder)
    mark = record.get("delivered")
    if not mark or (uri and lasting_uri(uri) != record.get("tracking_uri")):
        return False
    return bool(mark["metrics_bytes"] == log_size(folder) and final_status(folder) in (None, mark["status"]))


def reopen(folder: Path) -> None:
    """For a run that is resumed: remove its summary, and the mark that MLflow has all of it."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    record = read_record(folder)
    if record.pop("delivered", None):
        write_json(folder / RECORD_FILE, record)


def final_status(folder: Path) -> str | None:
    """Return the status in ``summary.json``; None: the run was killed before it could write one."""
    status = read_object(folder / SUMMARY_FILE).get("status")
    return status if status in ("FINISHED", "FAILED", "KILLED") else None


def step_elsewhere(folder: Path, run: Any, sessions: list[str], training: bool) -> int | None:
    """Return the step that a run has reached in another folder, if that is later than here; else None.

    A later step in the store is not enough: a run that is resumed from an earlier checkpoint removes the later lines of
    its log, and a power failure may too. So each process that trains a run writes its session into a tag.

    Args:
        folder: the run's.
        run: MLflow's.
        sessions: of the processes that have trained the run in this folder.
        training: whether the run is trained here now; then a run without the tag (of an earlier version) is taken as
            this one.
    """
    session = run.data.tags.get(SESSION_TAG)
    if session in sessions or (session is None and training):
        return None
    metrics = run.data.to_proto().metrics
    # MLflow's monitor of the machine counts its own samples.
    newest = max((metric.step for metric in metrics if not metric.key.startswith("system/")), default=-1)
    here = max((int(line["step"]) for line in read_json_lines(folder / METRICS_FILE)), default=0)
    return newest if newest > here else None


def log_size(folder: Path) -> int:
    """Return the bytes of the metric log; 0 where there is none."""
    path = folder / METRICS_FILE
    return path.stat().st_size if path.exists() else 0


def sync_command(folder: Path) -> str:
    """Return the command line that sends a run to MLflow."""
    return shlex.join(["python", "scripts/sync.py", str(folder)])
