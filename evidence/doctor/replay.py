"""Take a run to the step that is examined, from its newest checkpoint before it or from its beginning."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from evidence.doctor.step import TrainerStep
from mantissa.doctor.diagnosis import Replay
from mantissa.formats import FORMATS
from mantissa.updates import UpdateMeter, elementwise
from trainer.checkpoint import store
from trainer.checkpoint.reader import CheckpointReader
from trainer.config.compose import compose
from trainer.config.recorded import options_of
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import read_object
from trainer.hardware import UNAVAILABLE, detect, peak_memory_bytes, reset_peak_memory
from trainer.optim.classes import optimizer_class
from trainer.parallel.single import Parallel
from trainer.parallel.world import World
from trainer.precision.kernels import not_timed
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.run.provenance import git_facts, versions
from trainer.run.record import FAILURE
from trainer.run.resume import check_same
from trainer.run_folder import RunFolder
from trainer.trainer import Trainer

_MAY_CHANGE = ("device", "loader", "loader.workers")
"""Overrides that a run may be examined with."""
OTHERS = 3
"""Following steps whose batches a cure is tried on."""


def of_overrides(overrides: Sequence[str], step: int) -> Replay:
    """Train a new run up to a step, counted from 1, and take it; nothing is written."""
    config = compose(overrides)
    trainer, notes = _trainer(config)
    wanted = max(1, step)
    if wanted > trainer.plan.steps:
        raise UserError(
            f"step={wanted}: the run has {trainer.plan.steps} steps; set steps={wanted}, or a smaller step="
        )
    return _take_or_earlier(config, trainer, wanted, None, notes)


def of_run(resume: str, overrides: Sequence[str], step: int) -> Replay:
    """Take a run's step again: ``step``, or 0 for the one that failed, or one more where the run is complete.

    Raises:
        UserError: there is no such run, or another config was asked for, or the run has not come that far.
    """
    for override in overrides:
        if override.partition("=")[0] not in _MAY_CHANGE:
            raise UserError(
                f"{override}: a run is examined as it was trained; to examine another one before its start, leave out "
                f"resume={resume}"
            )
    folder = RunFolder.open("resume", resume, "outputs")
    config = compose(overrides, options_of(folder))
    check_same(folder, flatten(config))
    failure, summary = read_object(folder.path / f"{FAILURE}.json"), folder.summary()
    trainer, notes = _trainer(config)
    notes += _differences(summary, trainer)
    failed = int(failure.get("step", 0))
    if failed and step > failed:
        raise UserError(f"step={step}: {folder.path} stopped at step {failed}; set step={failed}, or leave it out")
    last = max([int(summary.get("step", 0)), *store.steps(folder.checkpoints)])
    wanted = step or failed or last + 1
    if wanted > trainer.plan.steps + 1:
        raise UserError(f"step={wanted}: {folder.path} has {trainer.plan.steps} steps; set step={trainer.plan.steps}")
    replay = _take_or_earlier(config, trainer, wanted, folder, notes)
    replay.finished = not step and not failed and summary.get("status") == "FINISHED"
    replay.failed = replay.step.number == failed or replay.step.number < wanted
    if replay.failed and failure.get("loss_scale"):
        replay.step.scale = float(failure["loss_scale"])
    replay.step.ranks = int(failure.get("processes", summary.get("processes", 1)))
    return replay


def _take_or_earlier(config: Config, trainer: Trainer, step: int, folder: RunFolder | None, notes: list[str]) -> Replay:
    """Take a step; where the loss of an earlier one is not finite take that one, whose weights it did not harm yet.

    Args:
        config: as composed.
        trainer: at the first step.
        step: that is wanted.
        folder: of the run, with its checkpoints; None: there is no run yet.
        notes: for the replay.
    """
    try:
        replay = take(trainer, step, _restore(folder, trainer, step))
    except _NotFinite as earlier:
        notes.append(f"the loss is not finite at step {earlier.step} already: that step is examined, not step {step}")
        trainer, _ = _trainer(config)
        replay = take(trainer, earlier.step, _restore(folder, trainer, earlier.step))
    replay.notes = notes + replay.notes
    replay.folder = folder.path if folder is not None else None
    replay.missing = config.precision.mode if config.precision.mode != replay.precision else ""
    return replay


def _trainer(config: Config) -> tuple[Trainer, list[str]]:
    """Return a trainer of one process, in the run's precision or, where this machine has not got it, the nearest."""
    notes = []
    hardware = detect(config.device)
    config = replace(config, parallel=Parallel())
    mode = config.precision.mode
    if hardware.support(mode) == UNAVAILABLE:
        half = FORMATS[mode].half is not None
        nearest = "bf16" if half else "fp32"
        notes.append(f"precision={mode} is not available here: its rung is left out, and steps are taken in {nearest}")
        precision = replace(config.precision, mode=nearest, fp8_scaling=None) if half else Precision()
        config = replace(config, precision=precision, scaler=AutoScaler())
    return Trainer.from_config(config, hardware, World()), notes


def _restore(folder: RunFolder | None, trainer: Trainer, step: int) -> str:
    """Restore the newest checkpoint before a step, and return its name, or ``the beginning``."""
    places = [folder.checkpoints, folder.path / FAILURE] if folder is not None else []
    saved = [(number, place) for place in places for number in store.steps(place) if number < step]
    for number, place in sorted(saved, reverse=True):
        path = store.find_verified(place, number)
        reader = CheckpointReader(path)
        saved_tensors = reader.tensors()
        weights = (saved_tensors[f"weights/{name}"] for name, _ in trainer.model.named_parameters())
        if all(bool(tensor.isfinite().all()) for tensor in weights):  # else a step before it harmed them
            trainer.restore(reader)
            return path.name
    return "the beginning"


class _NotFinite(Exception):
    """A step before the one that is examined has a loss that is not finite."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss of step {step} is not finite")
        self.step = step


def take(trainer: Trainer, step: int, began: str) -> Replay:
    """Take plain steps up to the one before ``step``; keep what it starts from, and take it.

    Raises:
        _NotFinite: the loss of an earlier step is not finite.
    """
    config, left = trainer.config, step - trainer.step
    hardware = trainer.hardware
    batches = config.loader.steps(
        trainer.datasets.train, trainer.order, trainer.plan.batching, trainer.step, left, hardware
    )
    if left > 1:
        print(f"taking {left - 1} step{'s' * (left > 2)} again from {began} …")
    for _ in range(left - 1):
        record = trainer.train_step(next(batches))
        passed_over = trainer.loss_scale.recovers and bool(record.skipped)  # the run went on after it
        if not math.isfinite(record.loss.item()) and not passed_over:
            raise _NotFinite(record.step)
    microbatches = next(batches)
    start = TrainerStep.of(trainer, microbatches)
    start.others = [following[0] for following in start.following(1 + OTHERS)[1:]]
    options = config.optimizer
    metered = elementwise(optimizer_class(options.name), options.options)
    meter = UpdateMeter(trainer.model, trainer.update, config.precision.half) if metered else None
    reset_peak_memory(hardware.device)
    clock = time.monotonic()
    with meter or nullcontext():
        record = trainer.train_step(microbatches)
    loss, norm, skipped = record.loss.item(), record.grad_norm.item(), bool(record.skipped)
    seconds = time.monotonic() - clock
    trainer.close()
    return Replay(
        step=start,
        loss=loss,
        grad_norm=norm,
        skipped=skipped,
        seconds=seconds,
        memory_bytes=peak_memory_bytes(hardware.device),
        began=began,
        updates=meter.results() if meter is not None and not skipped else {},
        notes=[] if metered else [f"updates: not measured with optimizer.name={options.name}"],
    )


def _differences(summary: dict[str, Any], trainer: Trainer) -> list[str]:
    """Return in what the run was made otherwise than it is replayed: its bits may differ, too."""
    if not summary:
        return []
    mode, own = trainer.config.precision.mode, "torch's own"
    kernels_here = not_timed(mode, trainer.in_fp32_arithmetic, trainer.hardware)
    before = {**summary["versions"], **summary["git"], "kernels": summary.get("fp32_arithmetic") or own}
    here = {**versions(), **git_facts(), "kernels": kernels_here or own}
    return [
        f"{name}: {before[name]} in the run, {here[name]} here; numbers may differ in the last bits"
        for name in ("torch", "transformers", "commit", "kernels")
        if name in before and name in here and before[name] != here[name]
    ]
