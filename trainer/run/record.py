"""What is recorded about a run beside its results: its options and precision, what is sent to MLflow, its failure."""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from mantissa.step.trace import DtypeRecorder
from trainer import files
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.store import CheckpointNotWritten, Snapshot
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.config.typed import record_command
from trainer.errors import redacted
from trainer.precision.manifest import dtypes_in_use, manifest_of
from trainer.profiling.flops import ModelFlops
from trainer.profiling.rates import matmul_rates
from trainer.profiling.utilisation import Utilisation, data_sheet
from trainer.run.monitor import NonFiniteGradients
from trainer.run_folder import RunFolder
from trainer.tracking.datasets import dataset_facts
from trainer.tracking.log import MetricLog, strict_json
from trainer.tracking.tracked_run import TrackedRun
from trainer.trainer import Trainer

FAILURE = "failure"
"""The name of the folder with the weights of a failed run that has no checkpoint."""

log = logging.getLogger("mantissa")


def options_of(config: Config) -> dict[str, Any]:
    """Return every option by dotted key, as files keep them: without a password."""
    options = flatten(config)
    return options | {"tracking.uri": options["tracking.uri"] and redacted(options["tracking.uri"])}


def write_config(folder: RunFolder, config: Config) -> dict[str, Any]:
    """Write every option into the run folder, and return them by dotted key."""
    options = options_of(config) | {"run_name": config.name}
    record_command(folder, config.overrides)
    folder.write_config(options)
    return options


def observed(trainer: Trainer) -> tuple[dict[str, Any], Utilisation]:
    """Return the content of precision.json for the format in force, and what turns the run's throughput into MFU."""
    config, precision, hardware = trainer.config, trainer.precision, trainer.hardware
    name = precision.format.number.name

    # What was set in this process, and what became of the model's weights.
    manifest = manifest_of(precision, hardware, trainer.fp32_modules)
    effective = manifest["effective"]
    formats = ["fp32", name, *(each.format.number.name for each in config.precision.phases)]
    formats += [hardware.half.name] * hardware.kind.nvidia  # of which a run in fp32 is told
    rates = partial(matmul_rates, hardware, tuple(dict.fromkeys(formats)))
    effective["matmul_tflops"] = trainer.world.run_on_main(rates)
    effective |= dtypes_in_use(trainer.model, trainer.optimizer)
    if precision.fp32_ops:
        effective["fp32_ops"] = precision.fp32_ops
    effective["kernels"] = trainer.kernels
    not_timed = precision.not_timed(hardware, trainer.convolves)
    effective["arithmetic"] = not_timed or f"{manifest['support']} on this hardware"

    # One forward pass shows what each module computes in, and how many FLOP a sample takes.
    flops, modules = ModelFlops(), DtypeRecorder(trainer.model)
    trainer.observe(flops, modules)
    per_unit, unknown = flops.per_unit(config.recipe.unit, config.recipe.count_units(trainer.first_samples()))
    # MFU relates to one rate: that of the run's format, where it is measured, and modules have no other but fp32.
    others = [mode for mode in precision.modules.values() if mode not in (precision.mode, "fp32")]
    if others:
        unknown = unknown or f"modules in {others[0]} and {name} have no rate in common"
    elif name not in effective["matmul_tflops"]:
        unknown = unknown or f"{name} matmuls are not timed here"
    return manifest | {"modules": modules.modules()}, Utilisation(
        flops_per_unit=per_unit,
        unknown=unknown,
        format=name,
        measured_tflops=None if others else effective["matmul_tflops"].get(name),
        data_sheet_tflops=None if others else data_sheet(hardware.name, name),
        devices=trainer.world.size,
    )


def open_metric_log(
    trainer: Trainer,
    folder: Path,
    options: dict[str, Any],
    manifest: dict[str, Any],
    git: dict[str, str],
    resumed_at: int | None,
) -> MetricLog:
    """Open the metric log, with MLflow behind it.

    Args:
        trainer: of the run.
        folder: of the run.
        options: of the run by dotted key; params in MLflow.
        manifest: see ``observed``.
        git: the commit, where the project is in a repository.
        resumed_at: the step of the checkpoint that the run continues from; None: a new run.
    """
    config = trainer.config
    # Tags: by what runs are found and grouped there.
    hardware = {f"hardware.{name}": value for name, value in trainer.hardware.facts().items()}
    tags = {
        "recipe": config.recipe.name,
        "precision": config.precision.mode,
        "precision.support": manifest["support"],
        "precision.arithmetic": manifest["effective"]["arithmetic"],
        "hardware": trainer.hardware.name,
        "parallel": config.parallel.kind,
        "processes": str(trainer.world.size),
        "mlflow.source.name": "scripts/train.py",
    }
    facts = config.recipe.summary_fields(trainer.model, trainer.datasets)
    tags |= {name: str(value) for name, value in facts.items()}
    if source := files.run_facts(folder, "init_from"):
        tags |= {
            f"init_from.{name}": str(source[name]) for name in ("run", "step", "mlflow_run_id") if source.get(name)
        }
    tags |= config.tags | ({"note": config.note} if config.note else {})
    if git:
        tags |= {"mlflow.source.git.commit": git["commit"], "git.dirty": git["dirty"]}
    # A run that keeps no checkpoints has none to send, unless it was asked to.
    sent = config.tracking.checkpoints
    run = TrackedRun(
        experiment=config.tracking.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or config.recipe.name,
        name=folder.name,
        params={key: value for key, value in options.items() if key not in ("tags", "note")} | hardware,
        tags=tags,
        datasets=dataset_facts(config.data, trainer.datasets),
        checkpoints="none" if config.checkpoint.keep == 0 and sent == "auto" else sent,
        register=config.tracking.register,
    )
    if config.tracking.mlflow and (ignored := {"MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys()):
        log.warning(
            "%s is ignored: each run has its own; set tracking.experiment, or unset it", ", ".join(sorted(ignored))
        )
    metric_log = MetricLog(config.tracking, folder, run)
    metric_log.begin(resumed_at)
    return metric_log


def record_failure(
    error: NonFiniteGradients, trainer: Trainer, folder: RunFolder, progress: dict[str, Any]
) -> dict[str, Any]:
    """Return ``failure`` of summary.json, from which the step that failed can be replayed; every rank has to call it.

    A run without a checkpoint also saves its weights, below ``failure/``, as a checkpoint of the step before: they have
    not changed since, nor has the optimizer's state. Buffers, of which running statistics may be no longer finite, and
    generators are those after the last step that was taken (``generators``).

    Args:
        error: of the step.
        trainer: after it.
        folder: of the run.
        progress: see ``CheckpointWriter.save``, as it was before the step.
    """
    world, saved = trainer.world, None
    facts: dict[str, Any] = {"checkpoint": None, "generators": None}
    if not error.failure["later_updates"] and not world.run_on_main(lambda: checkpoint.steps(folder.checkpoints)):
        training = trainer.state_dict() | {"step": error.failure["step"] - 1}
        training["loss_scale"]["scale"] = error.failure["loss_scale"]
        snapshot = Snapshot.of(training, progress, world)
        try:
            saved = checkpoint.write(folder.path / FAILURE, snapshot, None, world)
            facts |= {"checkpoint": f"{FAILURE}/{saved.name}", "generators": f"of step {trainer.step}"}
        except CheckpointNotWritten as problem:
            log.warning("the weights before step %d were not saved (%s)", error.failure["step"], problem)
    facts |= {"micro_batch_size": trainer.plan.batching.micro_batch_size, "message": str(error)}
    failure: dict[str, Any] = strict_json(error.failure | facts)
    return failure


def forget_failure(folder: RunFolder) -> None:
    """Remove the weights of ``record_failure``: a run that is resumed goes on as it was at its checkpoint."""
    shutil.rmtree(folder.path / FAILURE, ignore_errors=True)
