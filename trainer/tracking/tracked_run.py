"""``tracking.json`` in a run's folder: what MLflow gets of the run, and how much of it MLflow has."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import TRACKING_FILE, read_json, read_object, write_json
from trainer.tracking.store import storable_uri


@dataclass
class TrackedRun:
    """What MLflow gets of a run when it begins, and how much it has."""

    experiment: str
    name: str
    params: dict[str, object]
    tags: dict[str, str]
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Facts of the training and the validation data, see ``datasets.py``."""
    checkpoints: str = "none"
    """Value of ``tracking.checkpoints``."""
    register: str | None = None
    """Registered model that the best weights become a version of."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the run, by which it is found in MLflow if the answer to its creation was lost."""
    started_s: float = field(default_factory=time.time)
    """Time of the start, in seconds since the epoch."""

    uri: str | None = None
    """Tracking store without password; None: ``tracking=local``."""
    run_id: str | None = None
    """Id of the run in that store; None: the store has not answered yet."""
    experiment_id: str | None = None
    """Id of the experiment in that store."""
    offset: int = 0
    """Number of bytes of metrics.jsonl that the store has."""
    sent: dict[str, int] = field(default_factory=dict)
    """Files and folders that the store has, by name, with the time of their last change in ns."""
    description: str = ""
    """Description on MLflow's page as it was set last; another one is the user's."""
    delivered: bool = False
    """Whether the store has all of a run that has ended."""
    folder: str = ""
    """Where this was written."""

    @classmethod
    def read(cls, folder: Path) -> TrackedRun:
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
            remedy = f"restore it, or remove it and train on, as a new run in MLflow: resume={folder} steps=…"
            raise UserError(f"{path} cannot be read ({error}); {remedy}") from None

    def write(self, folder: Path) -> None:
        """Write ``tracking.json``."""
        self.folder = str(folder.absolute())
        write_json(folder / TRACKING_FILE, asdict(self))

    def is_copied_to(self, folder: Path) -> bool:
        """Return whether this was read in a copy of the run's folder; one that was moved has left nothing behind."""
        original = Path(self.folder, TRACKING_FILE)
        return (
            bool(self.folder)
            and read_object(original).get("key") == self.key
            and not original.samefile(folder / TRACKING_FILE)
        )

    def resumed_as(self, now: TrackedRun) -> TrackedRun:
        """Return what MLflow gets of this run after a resume, with what it has already.

        Its metric log, which is another one now, is read from its beginning.

        Args:
            now: the run with the options it is resumed with.
        """
        now.key, now.started_s = self.key, self.started_s
        now.uri, now.run_id, now.experiment_id = self.uri, self.run_id, self.experiment_id
        now.sent, now.description = self.sent, self.description
        return now

    def send_to(self, uri: str) -> None:
        """Set the store; one that is another than before has nothing of the run yet."""
        if storable_uri(uri) == self.uri:
            return
        self.uri, self.run_id, self.experiment_id = storable_uri(uri), None, None
        self.offset, self.sent, self.description, self.delivered = 0, {}, "", False

    @property
    def address(self) -> str:
        """``runs:/RUN_ID``; empty: MLflow has nothing of it."""
        return f"runs:/{self.run_id}" if self.run_id else ""
