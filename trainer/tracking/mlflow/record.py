"""What a run's folder keeps about MLflow: ``tracking.json``, what MLflow gets, and ``mlflow.json``, what it has."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import RECORD_FILE, SUMMARY_FILE, read_json, read_object, write_json
from trainer.tracking.mlflow.addresses import lasting_uri

TRACKING_FILE = "tracking.json"


@dataclass(frozen=True)
class RunInfo:
    """What MLflow gets when a run begins; kept as ``tracking.json`` in the run folder."""

    experiment: str
    name: str
    params: dict[str, object]
    tags: dict[str, str]
    uri: str | None = None
    """Of the store, without password; None for ``tracking=local``."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Finds the run in MLflow if the answer to its creation, with MLflow's own id, was lost."""
    started_s: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """See ``trainer.tracking.mlflow.datasets``."""
    checkpoints: str = "none"
    """See ``trainer.tracking.mlflow.checkpoints``."""
    register: str | None = None
    """The registered model that the best weights become a version of."""

    @classmethod
    def read(cls, folder: Path) -> RunInfo:
        """Read a run folder's ``tracking.json``.

        Raises:
            UserError: there is none, or it is damaged.
        """
        path = folder / TRACKING_FILE
        try:
            return cls(**read_json(path))
        except FileNotFoundError:
            raise UserError(f"{folder} is not a run folder (it has no {TRACKING_FILE})") from None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{path} cannot be read ({error}); restore it, or remove it: then MLflow gets a new run"
            ) from None

    def write(self, folder: Path) -> None:
        """Write ``tracking.json``."""
        write_json(folder / TRACKING_FILE, asdict(self), private=True)


def read_record(folder: Path) -> dict[str, Any]:
    """Return ``mlflow.json``: ``run_id``, ``experiment_id``, ``tracking_uri``, the run's ``key``, the ``sessions`` that
    have trained the run here, ``model`` (``models:/MODEL_ID``) once MLflow has the best weights, and once it has all
    ``delivered`` (true), with ``continued_elsewhere`` where that is another's.

    Empty if MLflow has not answered yet, or the file is damaged or another run's: then the run is found by its key.
    """
    record, info = (read_object(folder / name) for name in (RECORD_FILE, TRACKING_FILE))
    return record if info.get("key", record.get("key")) == record.get("key") else {}


def is_delivered(folder: Path, uri: str | None = None) -> bool:
    """Return whether MLflow (at ``uri``; None: at any) has all that is in the folder, by ``mlflow.json``."""
    record = read_record(folder)
    return "delivered" in record and (uri is None or lasting_uri(uri) == record["tracking_uri"])


def reopen(folder: Path) -> None:
    """For a run that is resumed: remove its summary, and what is recorded about the end of its delivery."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    record = read_record(folder)
    if {"delivered", "model"} & record.keys():
        write_record(folder, {key: value for key, value in record.items() if key not in ("delivered", "model")})


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write ``mlflow.json``."""
    write_json(folder / RECORD_FILE, record, private=True)
