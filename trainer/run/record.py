"""What is recorded about a run before its first step: its options, its precision, and what is sent to MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.schema import Config, flatten
from trainer.precision import attention
from trainer.precision.modes import dtypes_in_use
from trainer.run.folder import RunFolder
from trainer.tracking.mlflow.datasets import dataset_facts
from trainer.tracking.mlflow.store import without_password
from trainer.tracking.tracker import Tracker
from trainer.trainer import Trainer


def write_config(folder: RunFolder, config: Config) -> dict[str, Any]:
    """Write every option into the run folder, and return them by dotted key."""
    options = flatten(config)
    options["tracking.uri"] = options["tracking.uri"] and without_password(options["tracking.uri"])
    folder.write_config(options)
    return options


def precision_manifest(trainer: Trainer) -> dict[str, Any]:
    """Return the content of precision.json: the precision that was requested, and the one in effect."""
    config = trainer.config
    manifest = config.precision.manifest(trainer.hardware, trainer.fp32_modules)
    effective = manifest["effective"]
    effective |= dtypes_in_use(trainer.model, trainer.optimizer) | config.parallel.effective()
    effective |= {"sdpa_allowed": attention.enabled(), "conv_in_fp32": trainer.conv_in_fp32}
    if trainer.device.type == "cuda":
        effective["sdpa_taken"] = trainer.attention_kernels()
    return manifest


def open_tracker(
    trainer: Trainer,
    folder: Path,
    options: dict[str, Any],
    manifest: dict[str, Any],
    git: dict[str, str],
    resume_step: int | None,
) -> Tracker:
    """Open the metric log, with MLflow behind it.

    Args:
        trainer: of the run.
        folder: of the run.
        options: of the run by dotted key; params in MLflow.
        manifest: see ``precision_manifest``.
        git: the commit, where the project is in a repository.
        resume_step: optimizer steps of the checkpoint that the run continues from; None: a new run.
    """
    config = trainer.config
    hardware = {f"hardware.{name}": value for name, value in trainer.hardware.facts().items()}
    tags = {
        "recipe": config.recipe.name,
        "precision": config.precision.mode,
        "precision.support": manifest["support"],
        "hardware": trainer.hardware.name,
        "parallel": config.parallel.kind,
        "processes": str(trainer.world.size),
        "mlflow.source.name": "scripts/train.py",
    }
    facts = config.recipe.facts(trainer.model, trainer.datasets)
    tags |= {name: str(value) for name, value in facts.items()}
    if git:
        tags |= {"mlflow.source.git.commit": git["commit"], "git.dirty": git["dirty"]}
    return Tracker(
        config.tracking,
        folder,
        experiment=config.recipe.name,
        run_name=folder.name,
        params=options | hardware,
        tags=tags,
        datasets=dataset_facts(config.data, trainer.datasets),
        resume_step=resume_step,
    )
