"""Resumable checkpoints of a run as artifacts of MLflow: sent once, removed there when removed here.

MLflow's ``checkpoints/step-00000100`` is the folder of that name. Its manifest, with the hashes by which ``fetch``
verifies the files, is sent last: if it is there, all files are. ``config.json`` and ``metrics.jsonl``, which are also
needed to resume, are beside ``checkpoints``.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.schema import MANIFEST_FILE, STEP_NAME, best_step, path_of, steps
from trainer.errors import first_line
from trainer.files import METRICS_FILE
from trainer.tracking.mlflow.addresses import database_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

CHECKPOINTS = "checkpoints"
COMPANIONS = ("config.json", METRICS_FILE)


@dataclass
class CheckpointSender:
    """Keeps the checkpoints in MLflow the same as in the run folder."""

    client: MlflowClient
    run: Any
    """MLflow's."""
    folder: Path
    mode: str
    """``all``: every checkpoint as soon as it is saved; ``last``: when the run ends, the newest, and the best, from
    which a resumed run exports its best weights; ``none``; ``auto``: ``last`` to a server, ``none`` to a file here."""
    _sent: set[str] = field(default_factory=set)
    """The names of those that MLflow has."""
    _may_remove: bool = True
    """False: MLflow has refused to remove one."""

    def unsent(self) -> list[Path]:
        """Return the checkpoints that MLflow is not known to have, oldest first."""
        return [path for path in self._wanted() if path.name not in self._sent]

    def send(self, before: Callable[[str, Path], None]) -> None:
        """Send what MLflow lacks, and remove what the run folder no longer has, except steps later than its newest.

        Args:
            before: called before each file with the name of its checkpoint and its path; it may wait, or raise to
                stop.
        """
        for path in self.unsent():
            with suppress(FileNotFoundError):  # the run has removed it meanwhile
                self._send(path, before)
                self._sent.add(path.name)
        keep = [path.name for path in self._wanted()]
        if keep and self._may_remove:
            stored = names(self.client, self.run.info.run_id)
            try:
                for name in stored:
                    if name not in keep and name < keep[-1]:  # a later one is of a folder where the run has continued
                        self._remove(name)
            except Exception as error:  # of many kinds; a checkpoint that stays too long is no failure
                log.warning("MLflow does not remove old checkpoints (%s); they stay there.", first_line(error))
                self._may_remove = False

    def _wanted(self) -> list[Path]:
        root = self.folder / CHECKPOINTS
        local = self.mode == "auto" and database_file(self.client.tracking_uri) is not None
        if self.mode == "none" or local or not root.is_dir():
            return []
        saved = steps(root)
        if self.mode != "all":
            saved = sorted({*saved[-1:], best_step(root) or -1} & {*saved})
        return [path_of(root, step) for step in saved]

    def _send(self, path: Path, before: Callable[[str, Path], None]) -> None:
        """Send a checkpoint, unless MLflow has it.

        Raises:
            FileNotFoundError: a file of it is gone.
        """
        run_id, place = self.run.info.run_id, f"{CHECKPOINTS}/{path.name}"
        manifest = path / MANIFEST_FILE
        if has_manifest(self.client, run_id, path.name):
            with tempfile.TemporaryDirectory() as scratch:
                stored = Path(self.client.download_artifacts(run_id, f"{place}/{MANIFEST_FILE}", scratch))
                if stored.read_bytes() == manifest.read_bytes():
                    return
            with suppress(NotImplementedError):
                self._remove(path.name)  # of the same step, but not the same weights
        companions = [(self.folder / name, None) for name in COMPANIONS]
        tensors = [(file, place) for file in path.iterdir() if file != manifest]
        for file, target in (*companions, *tensors, (manifest, place)):
            before(path.name, file)
            self.client.log_artifact(run_id, str(file), target)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint from MLflow, its manifest first: without it the rest is not a checkpoint.

        Raises:
            NotImplementedError: the store cannot.
        """
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        repository = get_artifact_repository(self.run.info.artifact_uri, tracking_uri=self.client.tracking_uri)
        for path in (f"{CHECKPOINTS}/{name}/{MANIFEST_FILE}", f"{CHECKPOINTS}/{name}"):
            repository.delete_artifacts(path)


def names(client: MlflowClient, run_id: str) -> list[str]:
    """Return the names of the checkpoints that MLflow has, whole or not, oldest first."""
    found = [item.path.rpartition("/")[2] for item in client.list_artifacts(run_id, CHECKPOINTS) if item.is_dir]
    return sorted(name for name in found if STEP_NAME.fullmatch(name))


def has_manifest(client: MlflowClient, run_id: str, name: str) -> bool:
    """Return whether a checkpoint in MLflow is whole."""
    place = f"{CHECKPOINTS}/{name}"
    return f"{place}/{MANIFEST_FILE}" in [item.path for item in client.list_artifacts(run_id, place)]
