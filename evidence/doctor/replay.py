"""Take a run to the step that is examined, from its newest checkpoint before it or from its beginning."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from evidence.doctor.step import TrainerStep
from mantissa.doctor.diagnosis import Replay
from mantissa.formats import FORMATS
from mantissa.updates import UpdateMeter, elementwise
from trainer.checkpoint import store
from trainer.checkpoint.reader import CheckpointReader
from trainer.config.compose import compose
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import read_object
from trainer.hardware import UNAVAILABLE, detect, peak_memory_bytes, reset_peak_memory
from trainer.optim.classes import optimizer_class
from trainer.parallel.single import Parallel
from trainer.parallel.world import World
from trainer.precision import kernels
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.run.provenance import git_facts, versions
from trainer.run.resume import check_same, recorded_overrides
from trainer.run_folder import RunFolder, local_folder
from trainer.trainer import Trainer

_MAY_CHANGE = ("device", "loader", "loader.workers")
"""Overrides that a run may be examined with."""
OTHERS = 3
"""Following steps whose batches a cure is tried on."""
FAILURE_FILE = "failure.json"
FAILURE_FOLDER = "failure"


def of_overrides(overrides: Sequence[str], step: int, say: Callable[[str], None] = print) -> Replay:
    """Train a new run up to a step, counted from 1, and take it; nothing is written."""
    config = compose(overrides)
    trainer, notes = _trainer(config)
    wanted = max(1, step)
    if wanted > trainer.plan.steps:
        raise UserError(
            f"step={wanted}: the run has {trainer.plan.steps} steps; set steps={wanted}, or a smaller step="
        )
    return _take_or_earlier(config, trainer, wanted, lambda trainer, step: "the beginning", notes, say)


def of_run(resume: str, overrides: Sequence[str], step: int, say: Callable[[str], None] = print) -> Replay:
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
    folder = _folder(resume)
    failure, summary = read_object(folder.path / FAILURE_FILE), folder.summary()
    config = compose([*recorded_overrides(folder), *overrides])
    check_same(folder, flatten(config))
    trainer, notes = _trainer(config)
    notes += _other_software(summary)
    if summary and summary.get("fp32_arithmetic") != (here := _not_timed(trainer)):
        before, now = (each or "torch's own kernels" for each in (summary.get("fp32_arithmetic"), here))
        notes.append(f"the run used {before}; here: {now}; its numbers may differ as by another rounding")
    failed = int(failure.get("step", 0))
    finished = not step and not failed and summary.get("status") == "FINISHED"
    saved = store.steps(folder.checkpoints)
    if failed and step > failed:
        raise UserError(f"step={step}: {folder.path} stopped at step {failed}; set step={failed}, or leave it out")
    wanted = step or failed or int(summary.get("step", 0)) + 1 or (saved[-1] + 1 if saved else 1)
    if wanted > trainer.plan.steps + 1:
        raise UserError(f"step={wanted}: {folder.path} has {trainer.plan.steps} steps; set step={trainer.plan.steps}")
    replay = _take_or_earlier(config, trainer, wanted, functools.partial(_restore, folder), notes, say)
    replay.folder, replay.finished = folder.path, finished
    replay.failed = replay.step.number == failed or replay.step.number < wanted
    if replay.failed and failure.get("loss_scale"):
        replay.step.scale = float(failure["loss_scale"])
    replay.step.ranks = max(1, int(failure.get("processes", summary.get("processes", 1)) or 1))
    return replay


def _take_or_earlier(
    config: Config,
    trainer: Trainer,
    step: int,
    restore: Callable[[Trainer, int], str],
    notes: list[str],
    say: Callable[[str], None],
) -> Replay:
    """Take a step; where the loss of an earlier one is not finite take that one, whose weights it did not harm yet.

    Args:
        config: as composed.
        trainer: at the first step.
        step: that is wanted.
        restore: lets a trainer stand before a step, and returns where it began.
        notes: for the replay.
        say: hears how many steps are taken before it.
    """
    try:
        replay = take(trainer, step, restore(trainer, step), say)
    except _NotFinite as earlier:
        notes.append(f"the loss is not finite at step {earlier.step} already: that step is examined, not step {step}")
        trainer, _ = _trainer(config)
        replay = take(trainer, earlier.step, restore(trainer, earlier.step), say)
    replay.notes = notes + replay.notes
    replay.missing = config.precision.mode if config.precision.mode != replay.precision else ""
    return replay


def _folder(resume: str) -> RunFolder:
    if resume.startswith(("mlflow:", "runs:/")):
        return local_folder(resume, "outputs")
    folder = RunFolder(Path(resume).expanduser())
    if not (folder.path / "config.json").is_file():
        what = " is not a run folder" if folder.path.is_dir() else ": no such folder"
        raise UserError(f"resume={resume}{what}; give a run folder, such as outputs/gpt2-fp16-s0")
    return folder


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


def _restore(folder: RunFolder, trainer: Trainer, step: int) -> str:
    """Restore the newest checkpoint before a step, and return its name."""
    places = [(number, folder.checkpoints) for number in store.steps(folder.checkpoints)]
    places += [(number, folder.path / FAILURE_FOLDER) for number in store.steps(folder.path / FAILURE_FOLDER)]
    for number, place in sorted(places, reverse=True, key=lambda item: item[0]):
        if number >= step:
            continue
        path = store.find_verified(place, number)
        reader = CheckpointReader(path)
        weights = (tensor for name, tensor in reader.tensors().items() if name.startswith("weights/"))
        if all(bool(tensor.isfinite().all()) for tensor in weights):  # else a step before it harmed them
            trainer.restore(reader)
            return path.name
    return "the beginning"


class _NotFinite(Exception):
    """A step before the one that is examined has a loss that is not finite."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss of step {step} is not finite")
        self.step = step


def take(trainer: Trainer, step: int, began: str, say: Callable[[str], None] = print) -> Replay:
    """Take plain steps up to the one before ``step``; keep what it starts from, and take it.

    Raises:
        _NotFinite: the loss of an earlier step is not finite.
    """
    config, left = trainer.config, step - trainer.step
    batching, hardware = trainer.plan.batching, trainer.hardware
    batches = config.loader.steps(
        trainer.datasets.train, trainer.order, batching, trainer.step, left + OTHERS, hardware
    )
    if left > 1:
        say(f"taking {left - 1} step{'s' * (left > 2)} again from {began} …")
    for _ in range(left - 1):
        record = trainer.train_step(next(batches))
        passed_over = trainer.loss_scale.recovers and bool(record.skipped)  # the run went on after it
        if not math.isfinite(record.loss.item()) and not passed_over:
            raise _NotFinite(record.step)
    microbatches = next(batches)
    start = TrainerStep.of(trainer, microbatches)
    start.others = [following[0] for following in start.following(1 + OTHERS)[1:]]
    reset_peak_memory(hardware.device)
    clock = time.monotonic()
    options = config.optimizer
    metered = elementwise(optimizer_class(options.name), options.options)
    meter = UpdateMeter(trainer.model, trainer.update, config.precision.half) if metered else None
    with meter or nullcontext():
        record = trainer.train_step(microbatches)
    loss, norm, skipped = record.loss.item(), record.grad_norm.item(), bool(record.skipped)
    trainer.close()
    seconds = time.monotonic() - clock
    updates = meter.results() if meter is not None and not skipped else {}
    notes = [] if metered else [f"updates: not measured with optimizer.name={options.name}"]
    peak = peak_memory_bytes(hardware.device)
    return Replay(start, loss, norm, skipped, seconds, peak, began, updates=updates, notes=notes)


def _not_timed(trainer: Trainer) -> str | None:
    return kernels.not_timed(trainer.config.precision.mode, trainer.in_fp32_arithmetic, trainer.hardware)


def _other_software(summary: dict[str, Any]) -> list[str]:
    """Return what differs between the software of the run and this one: its bits may then differ, too."""
    before, now = summary.get("versions") or {}, versions()
    notes = [
        f"the run was made with {name} {before[name]}, this is {now[name]}: its numbers may differ in the last bits"
        for name in ("torch", "transformers")
        if before.get(name) and before[name] != now.get(name)
    ]
    commit, here = (summary.get("git") or {}).get("commit"), git_facts().get("commit")
    if commit and here and commit != here:
        notes.append(f"the run was made by commit {commit[:9]}, this is {here[:9]}")
    return notes
