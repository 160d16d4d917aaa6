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

from trainer.checkpoint.schema import MANIFEST_FILE, STEP_NAME
from trainer.errors import first_line
from trainer.files import METRICS_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

CHECKPOINTS = "checkpoints"
COMPANIONS = ("config.json", METRICS_FILE)


@dataclass
class CheckpointSender:
    """Keeps the checkpoints in MLflow the same as in the run folder."""

    folder: Path
    mode: str
    """``all``: every checkpoint as soon as it is saved; ``last``: when the run ends, the newest, and the best, from
    which a resumed run exports its best weights; ``none``."""
    _sent: dict[str, str] = field(default_factory=dict)
    """The manifests of those that were sent, by name."""
    _may_remove: bool = True
    """False: MLflow has refused to remove one."""

    def unsent(self) -> list[str]:
        """Return the names of the checkpoints that MLflow is not known to have."""
        return [name for name, path in self._wanted().items() if _manifest(path) != self._sent.get(name)]

    def send(self, client: MlflowClient, run: Any, before: Callable[[str, int], None]) -> None:
        """Send what MLflow lacks, and remove what the run folder no longer has, except steps later than its newest.

        Args:
            client: of the store.
            run: MLflow's.
            before: called before each file with the name of its checkpoint and its bytes; it may wait, or raise to
                stop.
        """
        if self.mode == "none":
            return
        for name, path in self._wanted().items():
            manifest = _manifest(path)
            if manifest != self._sent.get(name):
                with suppress(FileNotFoundError):  # the run has removed or replaced it meanwhile
                    _send(client, run, name, path, manifest, before)
                    self._sent[name] = manifest
        if self._may_remove:
            self._prune(client, run)

    def _wanted(self) -> dict[str, Path]:
        """Return the folders by the name of their step (the folder's own name differs while it is being replaced)."""
        root = self.folder / CHECKPOINTS
        if self.mode == "none" or not root.is_dir():
            return {}
        from trainer.checkpoint import store as checkpoint  # with torch

        steps = checkpoint.steps(root)
        if self.mode == "last":
            steps = sorted({*steps[-1:], checkpoint.best_step(root) or -1} & {*steps})
        return {f"step-{step:08d}": checkpoint.path_of(root, step) for step in steps}

    def _prune(self, client: MlflowClient, run: Any) -> None:
        keep = self._wanted().keys()
        newest = max(keep, default="")  # later ones are of a folder in which the run has continued
        for name in names(client, run.info.run_id):
            if name not in keep and name < newest:
                try:
                    _remove(client, run, name)
                except Exception as error:  # of many kinds; a checkpoint that stays too long is no failure
                    log.warning("MLflow does not remove old checkpoints (%s); they stay there.", first_line(error))
                    self._may_remove = False
                    return


def names(client: MlflowClient, run_id: str) -> list[str]:
    """Return the names of the checkpoints that MLflow has, whole or not, oldest first."""
    found = [item.path.rpartition("/")[2] for item in client.list_artifacts(run_id, CHECKPOINTS) if item.is_dir]
    return sorted(name for name in found if STEP_NAME.fullmatch(name))


def has_manifest(client: MlflowClient, run_id: str, name: str) -> bool:
    """Return whether a checkpoint in MLflow is whole."""
    place = f"{CHECKPOINTS}/{name}"
    return f"{place}/{MANIFEST_FILE}" in [item.path for item in client.list_artifacts(run_id, place)]


def _send(
    client: MlflowClient, run: Any, name: str, path: Path, manifest: str, before: Callable[[str, int], None]
) -> None:
    """Send a checkpoint, unless MLflow has it.

    Raises:
        FileNotFoundError: a file of it is gone.
    """
    run_id, place = run.info.run_id, f"{CHECKPOINTS}/{name}"
    if has_manifest(client, run_id, name):
        with tempfile.TemporaryDirectory() as scratch:
            stored = Path(client.download_artifacts(run_id, f"{place}/{MANIFEST_FILE}", scratch))
            if stored.read_text(encoding="utf-8") == manifest:
                return
        with suppress(NotImplementedError):
            _remove(client, run, name)  # of the same step, but not the same weights
    files = [file for file in path.iterdir() if file.name != MANIFEST_FILE]
    for file, target in [*((path.parents[1] / each, None) for each in COMPANIONS), *((file, place) for file in files)]:
        before(name, file.stat().st_size)
        client.log_artifact(run_id, str(file), target)
    # As read before the files: if those were replaced meanwhile, they do not match it, and are sent anew.
    client.log_text(run_id, manifest, f"{place}/{MANIFEST_FILE}")


def _manifest(path: Path) -> str:
    try:
        return (path / MANIFEST_FILE).read_text(encoding="utf-8")
    except OSError:  # removed meanwhile
        return ""


def _remove(client: MlflowClient, run: Any, name: str) -> None:
    """Remove a checkpoint from MLflow, its manifest first: without it the rest is not a checkpoint.

    Raises:
        NotImplementedError: the store cannot.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=client.tracking_uri)
    for path in (f"{CHECKPOINTS}/{name}/{MANIFEST_FILE}", f"{CHECKPOINTS}/{name}"):
        repository.delete_artifacts(path)
