"""Resumable checkpoints of a run as artifacts of MLflow: sent once, verified, removed there when removed here.

MLflow's ``checkpoints/step-00000100`` is the folder of that name. Its manifest is sent last: if it is there, all files
are. ``config.json`` and ``metrics.jsonl``, which are also needed to resume, are beside ``checkpoints``.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.schema import MANIFEST_FILE, STEP_NAME, damage
from trainer.errors import first_line
from trainer.files import METRICS_FILE, link_or_copy

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

CHECKPOINTS = "checkpoints"
COMPANIONS = ("config.json", METRICS_FILE)
_PREFIX = ".mlflow-checkpoint-"


@dataclass
class CheckpointSender:
    """Keeps the checkpoints in MLflow the same as in the run folder."""

    folder: Path
    mode: str
    """``all``: every checkpoint as soon as it is saved; ``last``: when the run ends, the newest, and the best, from
    which a resumed run exports its best weights; ``none``."""
    _settled: dict[str, str] = field(default_factory=dict)
    """The manifests of those that were sent, or are damaged, by name."""
    _may_remove: bool = True
    """False: MLflow has refused to remove one."""

    def unsent(self) -> list[str]:
        """Return the names of the checkpoints that MLflow is not known to have."""
        return [name for name, path in self._wanted().items() if _manifest(path) != self._settled.get(name)]

    def forget(self) -> None:
        """For another run in MLflow: forget what was sent."""
        self._settled.clear()

    def send(self, client: MlflowClient, run: Any, between: Callable[[int], None]) -> None:
        """Send what MLflow lacks, and remove what the run folder no longer has, except steps later than its newest.

        Args:
            client: of the store.
            run: MLflow's.
            between: called before each file, with its bytes, and after it, with 0; it may wait, or raise to stop.
        """
        if self.mode == "none":
            return
        for left in self.folder.glob(f"{_PREFIX}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        wanted = self._wanted()
        for name in self.unsent():
            with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self.folder) as scratch:
                copy = Path(scratch, name)
                copy.mkdir()
                try:  # links, so that the files stay if the run removes the checkpoint
                    for file in wanted[name].iterdir():
                        link_or_copy(file, copy / file.name)
                except (KeyError, FileNotFoundError):  # saved or removed meanwhile
                    continue
                if found := damage(copy, int(name[5:])):
                    log.warning("The checkpoint %s is damaged (%s) and is not sent to MLflow.", name, found)
                else:
                    self._send(client, run, copy, between)
                self._settled[name] = _manifest(copy)
        self._prune(client, run, between)

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

    def _send(self, client: MlflowClient, run: Any, copy: Path, between: Callable[[int], None]) -> None:
        place, run_id = f"{CHECKPOINTS}/{copy.name}", run.info.run_id
        if f"{place}/{MANIFEST_FILE}" in [item.path for item in client.list_artifacts(run_id, place)]:
            with tempfile.TemporaryDirectory() as scratch:
                stored = Path(client.download_artifacts(run_id, f"{place}/{MANIFEST_FILE}", scratch))
                if stored.read_text(encoding="utf-8") == _manifest(copy):
                    return
            with suppress(NotImplementedError):
                _remove(client, run, copy.name)  # of the same step, but not the same weights
        files = sorted(copy.iterdir(), key=lambda path: path.name == MANIFEST_FILE)
        for path, target in [*((self.folder / name, None) for name in COMPANIONS), *((path, place) for path in files)]:
            between(path.stat().st_size)
            client.log_artifact(run_id, str(path), target)
            between(0)

    def _prune(self, client: MlflowClient, run: Any, between: Callable[[int], None]) -> None:
        keep = self._wanted().keys()
        newest = max(keep, default="")  # later ones are of a folder in which the run has continued
        for item in client.list_artifacts(run.info.run_id, CHECKPOINTS) if self._may_remove else ():
            name = item.path.rpartition("/")[2]
            if item.is_dir and STEP_NAME.fullmatch(name) and name not in keep and name < newest:
                try:
                    _remove(client, run, name)
                except Exception as error:  # of many kinds; a checkpoint that stays too long is no failure
                    log.warning("MLflow does not remove old checkpoints (%s); they stay there.", first_line(error))
                    self._may_remove = False
                    return
                between(0)


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
