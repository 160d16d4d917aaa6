"""Take a run to the step that is examined, from its newest checkpoint before it or from its beginning."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evidence.doctor.step.case import Case
from trainer.checkpoint import store
from trainer.checkpoint.reader import CheckpointReader
from trainer.config.compose import compose
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.data.contract import Batch
from trainer.data.loader import DataOrder
from trainer.errors import UserError
from trainer.files import read_object
from trainer.hardware import UNAVAILABLE, detect, peak_memory_bytes, reset_peak_memory
from trainer.optim.classes import optimizer_class
from trainer.parallel.world import World
from trainer.parallel.wrap import Parallel
from trainer.precision import kernels
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.profiling.updates import ParameterUpdate, UpdateMeter, elementwise
from trainer.run.folder import RunFolder, local_folder
from trainer.run.provenance import git_facts, versions
from trainer.run.resume import check_same, recorded_overrides
from trainer.trainer import Trainer

_MAY_CHANGE = ("device", "loader", "loader.workers")
"""Overrides that a run may be examined with."""
OTHERS = 3
"""Following steps whose batches a cure is tried on."""
FAILURE_FILE = "failure.json"
FAILURE_FOLDER = "failure"


@dataclass
class Replay:
    """A step that was taken again as the run takes it, and the case that it started from."""

    case: Case
    loss: float
    grad_norm: float
    skipped: bool
    seconds: float
    """That the step took."""
    memory_bytes: int
    """At the step's peak, with the trainer's."""
    began: str
    """Where the replay started: a checkpoint's name, or ``the beginning``."""
    updates: list[ParameterUpdate] = field(default_factory=list)
    """What rounding did to the step's update; empty where it was skipped, or cannot be measured."""
    missing: str = ""
    """The run's precision where this machine has not got it, and another one was examined."""
    folder: Path | None = None
    """Of the run; None: a check-up before a run."""
    failed: bool = False
    """Whether the run itself ended at this step, because it was not finite."""
    finished: bool = False
    """Whether the run took all its steps, and this is one more."""
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        """The mode of the run's precision."""
        return self.case.config.precision.mode

    @property
    def finite(self) -> bool:
        """Whether the step was taken."""
        return not self.skipped and math.isfinite(self.loss)


def of_overrides(overrides: Sequence[str], step: int, say: Callable[[str], None] = print) -> Replay:
    """Train a new run up to a step, counted from 1, and take it; nothing is written."""
    config = compose(overrides)
    trainer, notes = _trainer(config)
    wanted = max(1, step)
    if wanted > trainer.plan.steps:
        raise UserError(
            f"step={wanted}: the run has {trainer.plan.steps} steps; set steps={wanted}, or a smaller step="
        )
    try:
        replay = take(trainer, wanted, "the beginning", say)
    except NotFinite as earlier:
        notes.append(earlier.note(wanted))
        trainer, _ = _trainer(config)
        replay = take(trainer, earlier.step, "the beginning", say)
    replay.notes += notes
    replay.missing = _missing(config, trainer)
    return replay


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
    try:
        replay = take(trainer, wanted, _restore(trainer, folder, wanted), say)
    except NotFinite as earlier:  # the cause is there: what comes after it has weights that it harmed
        notes.append(earlier.note(wanted))
        failed = wanted = earlier.step
        trainer, _ = _trainer(config)
        replay = take(trainer, wanted, _restore(trainer, folder, wanted), say)
    replay.folder, replay.finished, replay.notes = folder.path, finished, notes + replay.notes
    replay.failed = wanted == failed
    replay.missing = _missing(config, trainer)
    if replay.failed and failure.get("loss_scale") and replay.case.scale != failure["loss_scale"]:
        replay.case.scale = float(failure["loss_scale"])
    replay.case.ranks = max(1, int(failure.get("processes", summary.get("processes", 1)) or 1))
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
        nearest = "fp32" if mode == "tf32" else "bf16"
        notes.append(f"precision={mode} is not available here: its rung is left out, and steps are taken in {nearest}")
        config = replace(config, precision=_without(config.precision, nearest), scaler=AutoScaler())
    return Trainer.from_config(config, hardware, World()), notes


def _missing(config: Config, trainer: Trainer) -> str:
    """Return the precision that was asked for, if it is not the trainer's."""
    return config.precision.mode if config.precision.mode != trainer.config.precision.mode else ""


def _without(precision: Precision, mode: str) -> Precision:
    if mode == "fp32":
        return Precision()
    return dataclasses.replace(precision, mode=mode, fp8_scaling=None)


def _restore(trainer: Trainer, folder: RunFolder, step: int) -> str:
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


class NotFinite(Exception):
    """A step before the one that is examined has a loss that is not finite."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss of step {step} is not finite")
        self.step = step

    def note(self, wanted: int) -> str:
        """Return what the user reads, who wanted another step."""
        return f"the loss is not finite at step {self.step} already: that step is examined, not step {wanted}"


def take(trainer: Trainer, step: int, began: str, say: Callable[[str], None] = print) -> Replay:
    """Take plain steps up to the one before ``step``; keep what it starts from, and take it.

    Raises:
        NotFinite: the loss of an earlier step is not finite.
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
            raise NotFinite(record.step)
    microbatches = next(batches)
    case = Case.of(trainer, microbatches)
    case.others = [step[0] for step in following(case, 1 + OTHERS)[1:]]
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
    updates = meter.results() if meter is not None and not skipped else []
    notes = [] if metered else [f"updates: not measured with optimizer.name={options.name}"]
    peak = peak_memory_bytes(hardware.device)
    return Replay(case, loss, norm, skipped, seconds, peak, began, updates=updates, notes=notes)


def following(case: Case, count: int) -> list[list[Batch]]:
    """Return the microbatches of a case's step and of those after it."""
    config, plan = case.config, case.plan
    order = DataOrder(len(case.datasets.train), config.seed)
    return list(config.loader.steps(case.datasets.train, order, plan.batching, case.step - 1, count, case.hardware))


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
