"""Resumable checkpoints of a run as artifacts of MLflow, in the places that they have in the run's folder.

The manifest of a checkpoint is sent last: if it is there, all files are. What else is needed to resume is beside
``checkpoints``. Where MLflow's artifacts are a folder of the same file system, tensors are hard links, which take no
space: a finished checkpoint is never written to again. Other files are copies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.schema import MANIFEST_FILE, STEP_NAME, best_step, path_of, steps
from trainer.files import CHECKPOINTS, CONFIG_FILE, METRICS_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient

COMPANIONS = (CONFIG_FILE, METRICS_FILE)


def wanted(folder: Path, mode: str) -> list[Path]:
    """Return the checkpoints of a run that MLflow should have, oldest first.

    Args:
        folder: folder of the run.
        mode: ``tracking.checkpoints``: ``all``; ``none``; ``last`` and ``auto``: the newest, and the best, from which a
            resumed run exports its best weights.
    """
    root = folder / CHECKPOINTS
    if mode == "none":
        return []
    saved = steps(root)
    if mode != "all":
        saved = sorted({*saved[-1:], best_step(root) or -1} & {*saved})
    return [path_of(root, step) for step in saved]


def artifact_folder(client: MlflowClient, run_id: str) -> Path | None:
    """Return the folder of a run's artifacts, if MLflow keeps them on this machine and not behind a server."""
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    repository = _repository(client, run_id)
    return Path(repository.artifact_dir) if isinstance(repository, LocalArtifactRepository) else None


def can_link(file: Path, artifacts: Path) -> bool:
    """Return whether hard links to a file can be made in a folder of MLflow's, by making one.

    Raises:
        OSError: of another kind than that there are no links, or not between two file systems or mounts.
    """
    trial = artifacts / ".link"
    artifacts.mkdir(parents=True, exist_ok=True)
    trial.unlink(missing_ok=True)  # of a process that was killed
    try:
        os.link(file, trial)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            return False
        raise
    trial.unlink()
    return True


def link_tensors(checkpoint: Path, target: Path) -> None:
    """Hard-link the safetensors of a checkpoint into a folder."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.glob("*.safetensors")):
        to = target / file.name
        if to.exists():
            if to.samefile(file):
                continue
            to.unlink()  # a copy, or another checkpoint's of the same step
        os.link(file, to)


def remove(client: MlflowClient, run_id: str, names: Iterable[str]) -> None:
    """Remove checkpoints from MLflow, of each the manifest first: without it the rest is not a checkpoint."""
    repository = _repository(client, run_id)
    for name in names:
        for path in (f"{CHECKPOINTS}/{name}/{MANIFEST_FILE}", f"{CHECKPOINTS}/{name}"):
            repository.delete_artifacts(path)


def stored_names(client: MlflowClient, run_id: str) -> list[str]:
    """Return the names of the checkpoints that MLflow has, whole or not, oldest first."""
    found = [item.path.rpartition("/")[2] for item in client.list_artifacts(run_id, CHECKPOINTS) if item.is_dir]
    return sorted(name for name in found if STEP_NAME.fullmatch(name))


def complete_steps(client: MlflowClient, run_id: str) -> list[int]:
    """Return the steps of the checkpoints that MLflow has as a whole, oldest first."""
    found = {name: client.list_artifacts(run_id, f"{CHECKPOINTS}/{name}") for name in stored_names(client, run_id)}
    return [
        int(name.removeprefix("step-"))
        for name, files in found.items()
        if any(file.path.endswith(f"/{MANIFEST_FILE}") for file in files)
    ]


def _repository(client: MlflowClient, run_id: str) -> Any:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    place = client.get_run(run_id).info.artifact_uri
    return get_artifact_repository(place, tracking_uri=client.tracking_uri)
