"""Resumable checkpoints of a run as artifacts of MLflow: each once, verified, removed there when removed here.

MLflow's ``checkpoints/step-00000100`` is the folder of that name, its manifest last: where that stands, all of it does.
``config.json`` and ``metrics.jsonl``, which continuing a run takes too, stand beside ``checkpoints``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint_schema import MANIFEST_FILE, STEP_NAME
from trainer.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

CHECKPOINTS = "checkpoints"
COMPANIONS = ("config.json", "metrics.jsonl")
MODES = ("last", "all", "none")
_PREFIX = ".mlflow-checkpoint-"


def check_mode(mode: str) -> None:
    """Refuse what is no way to keep checkpoints in MLflow."""
    if mode not in MODES:
        raise UserError(f"tracking.checkpoints={mode} is unknown; use tracking.checkpoints=last, all or none")


class CheckpointSender:
    """Keeps the checkpoints of one run in MLflow as the run folder has them."""

    def __init__(self, folder: Path, mode: str) -> None:
        """Prepare.

        Args:
            folder: the run's.
            mode: ``all``: every checkpoint as soon as it is saved; ``last``: when the run ends, the newest, and the
                best where that is another, whose weights a run that continues exports in the end; ``none``.

        """
        self.mode = mode
        self._folder = folder
        self._sent: dict[str, str] = {}

    def unsent(self) -> list[str]:
        """Return the names of the checkpoints that MLflow is not known to have."""
        return [path.name for path in self._wanted() if self._sent.get(path.name) != _manifest(path)]

    def forget(self) -> None:
        """After a failure: ask MLflow again what it has."""
        self._sent.clear()

    def send(self, client: MlflowClient, run: Any, between: Callable[[int], None]) -> None:
        """Send what MLflow lacks and remove there what the run folder has removed, none of a later step than it has.

        Args:
            client: of the store.
            run: MLflow's.
            between: called before each file, with its bytes, and after it, with 0; it may wait, or raise to stop.

        """
        if self.mode == "none":
            return
        for left in self._folder.glob(f"{_PREFIX}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        for path in self._wanted():
            if self._sent.get(path.name) == _manifest(path):
                continue
            with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self._folder) as scratch:
                copy = _snapshot(path, Path(scratch))
                if copy is not None and _is_whole(copy):
                    self._send(client, run, copy, between)
                    self._sent[path.name] = _manifest(copy)
        keep = {path.name for path in self._wanted()}
        newest = max(keep, default="")  # what is later comes from a folder that is further
        for item in client.list_artifacts(run.info.run_id, CHECKPOINTS):
            name = item.path.rpartition("/")[2]
            if item.is_dir and STEP_NAME.fullmatch(name) and name not in keep and name < newest:
                _remove(client, run, name)
                between(0)

    def _wanted(self) -> list[Path]:
        root = self._folder / CHECKPOINTS
        if self.mode == "none" or not root.is_dir():
            return []
        from trainer import checkpoint  # with torch

        steps = checkpoint.steps(root)
        if self.mode == "last":
            steps = sorted({*steps[-1:], checkpoint.best_step(root) or -1} & {*steps})
        return [checkpoint.path_of(root, step) for step in steps]

    def _send(self, client: MlflowClient, run: Any, copy: Path, between: Callable[[int], None]) -> None:
        place, run_id = f"{CHECKPOINTS}/{copy.name}", run.info.run_id
        files = sorted((path for path in copy.iterdir() if path.is_file()), key=lambda path: path.name == MANIFEST_FILE)
        if _sizes(client, run_id, place).get(MANIFEST_FILE, 0) != 0:
            if _read_manifest(client, run_id, place) == _manifest(copy) and _arrived(client, run_id, place, files):
                return
            _remove(client, run, copy.name)  # of the same step, but not the same weights
        for path, target in [*((self._folder / name, None) for name in COMPANIONS), *((path, place) for path in files)]:
            between(path.stat().st_size)
            client.log_artifact(run_id, str(path), target)
            between(0)
        if not _arrived(client, run_id, place, files):
            _remove(client, run, copy.name)
            raise OSError(f"{place} did not arrive whole")


def _snapshot(path: Path, scratch: Path) -> Path | None:
    """Link the files, so that they stay while the run removes the checkpoint; None: it already has."""
    copy = scratch / path.name
    copy.mkdir()
    try:
        for file in path.iterdir():
            try:
                os.link(file, copy / file.name)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links
                shutil.copyfile(file, copy / file.name)
    except FileNotFoundError:
        return None
    return copy if (copy / MANIFEST_FILE).exists() else None


def _is_whole(copy: Path) -> bool:
    """Check the hashes: what is damaged here must not be kept as good there."""
    manifest = json.loads(_manifest(copy))
    for name, expected in manifest["sha256"].items():
        try:
            with (copy / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:  # removed while it was linked
            return False
        if found != expected:
            log.warning("The checkpoint %s is damaged (%s) and is not sent to MLflow.", copy.name, name)
            return False
    return True


def _manifest(path: Path) -> str:
    try:
        return (path / MANIFEST_FILE).read_text(encoding="utf-8")
    except OSError:  # removed meanwhile
        return ""


def _sizes(client: MlflowClient, run_id: str, place: str) -> dict[str, int | None]:
    items = client.list_artifacts(run_id, place)
    return {item.path.rpartition("/")[2]: item.file_size for item in items if not item.is_dir}


def _arrived(client: MlflowClient, run_id: str, place: str, files: list[Path]) -> bool:
    there = _sizes(client, run_id, place)
    return all(there.get(path.name, -1) in (None, path.stat().st_size) for path in files)  # None: it lists no sizes


def _read_manifest(client: MlflowClient, run_id: str, place: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        return Path(client.download_artifacts(run_id, f"{place}/{MANIFEST_FILE}", scratch)).read_text(encoding="utf-8")


def _remove(client: MlflowClient, run: Any, name: str) -> None:
    """Remove a checkpoint from MLflow, its manifest first: half of one is none. Some stores cannot."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=client.tracking_uri)
    try:
        for path in (f"{CHECKPOINTS}/{name}/{MANIFEST_FILE}", f"{CHECKPOINTS}/{name}"):
            repository.delete_artifacts(path)
    except NotImplementedError:
        log.warning("MLflow's artifact store cannot remove %s; it stays there.", name)
