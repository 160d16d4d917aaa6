"""Take a run to the step that is examined, from its newest checkpoint before it or from its beginning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from evidence.doctor.history import before, read_history
from evidence.doctor.step import step_of
from evidence.runs import merge_overrides
from mantissa.display import counted
from mantissa.doctor.diagnosis import TakenStep
from mantissa.doctor.examine import take
from trainer.checkpoint import store
from trainer.checkpoint.reader import CheckpointReader
from trainer.config.compose import compose, key_of
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.hardware import detect
from trainer.run.provenance import git_facts, versions
from trainer.run.record import FAILURE
from trainer.run_folder import RunFolder
from trainer.trainer import Trainer

_MAY_CHANGE = ("device", "loader.workers")
"""Overrides that a run may be examined with."""


def of_overrides(overrides: Sequence[str], step: int) -> tuple[TakenStep, Config]:
    """Train a new run up to a step, counted from 1, and take it; nothing is written."""
    config = compose(merge_overrides(overrides, ["parallel=single"]))
    last, wanted = _steps(config), max(1, step)
    if wanted > last:
        raise UserError(f"step={wanted}: the run ends at step {last}", f"step={last}")
    return _take(config, wanted, wanted), config


def of_run(resume: str, overrides: Sequence[str], step: int) -> tuple[TakenStep, Config]:
    """Replay a step of a run: ``step``, or 0 for the one that failed, or one more where the run is complete.

    Raises:
        UserError: there is no such run, or another config was asked for, or the run has not come that far.
    """
    for override in overrides:
        if key_of(override) not in _MAY_CHANGE:
            raise UserError(
                f"{override}: a run is examined as it was trained; to examine another one before its start, leave out "
                f"resume={resume}"
            )
    folder = RunFolder.open("resume", resume, "outputs")
    config = compose([*overrides, "parallel=single"], folder.options())  # its ranks one after another
    summary = folder.summary()
    failure = summary.get("failure") or {}
    steps = _steps(config)
    failed_at = int(failure.get("step", 0))
    if failed_at and step > failed_at:
        raise UserError(
            f"step={step}: {folder.path} stopped at step {failed_at}", f"step={failed_at}", "", mistake=f"step={step}"
        )
    last = max([int(summary.get("step", 0)), *store.steps(folder.checkpoints)])
    wanted = step or failed_at or last + 1
    if wanted > steps + 1:
        raise UserError(f"step={wanted}: {folder.path} ends earlier", f"step={steps}")
    failed = wanted == failed_at
    history = read_history(folder.path, wanted, failed)
    taken = _take(config, wanted, history.start, folder, failure)
    finished = not step and not failed_at and summary.get("status") == "FINISHED"
    notes = taken.notes + differences(summary)
    return replace(taken, notes=notes, finished=finished, history=history.wrong), config


def _take(
    config: Config,
    wanted: int,
    start: int,
    folder: RunFolder | None = None,
    failure: Mapping[str, Any] = {},
    early: bool = False,
) -> TakenStep:
    """Take a step; where the loss of an earlier one is not finite take that one, whose weights it did not harm yet.

    Args:
        config: as composed.
        wanted: the number of the step.
        start: the number of the step from which on training is followed.
        folder: of the run, with its checkpoints; None: there is no run yet.
        failure: how the run ended, if it failed.
        early: whether it is not finite, though the run recorded a later step.
    """
    # Up to the step.
    place = folder.path if folder is not None else None
    trainer = Trainer.from_config(config)
    began, reached = _go_to(trainer, wanted, folder)
    if reached < wanted:
        taken = _take(config, reached, min(start, before(reached)), folder, failure, early=True)
        why = f"step {reached} already raises, or its loss is not finite"
        return replace(taken, notes=[f"{why}: that step is examined instead of step {wanted}", *taken.notes])

    # What failed is taken at the loss scale at which it failed: its scaler would go on to a lower one.
    step = step_of(trainer, place)
    failed = folder is not None and (early or step.number == failure.get("step"))
    scale = failure.get("loss_scale") if failed else None
    step = step.at_scale(float(scale)) if scale else step
    taken = take(step, began, backs_off=not failed)

    # Where training is followed from: a trainer of its own goes there, as checkpoints before the step may be later.
    first = None
    if start < wanted:
        trainer = Trainer.from_config(config)
        _, reached = _go_to(trainer, start, folder)
        first = step_of(trainer, place) if reached == start else None
    return replace(taken, folder=place, failed=failed, start=first)


def _go_to(trainer: Trainer, step: int, folder: RunFolder | None) -> tuple[str, int]:
    """Restore the newest checkpoint before a step, and take plain steps up to it.

    Returns:
        Where that began, and the number of the next step: ``step``, or an earlier one that raises or is not finite.
    """
    began = _restore(folder, trainer, step)
    left = step - 1 - trainer.step
    if left:
        print(f"replaying {counted(left, 'step')} from {began} …")
    for microbatches in islice(trainer.batches(), left):
        try:
            record = trainer.train_step(microbatches)
        except RuntimeError:  # the examination of this step says of what
            return began, trainer.step + 1
        passed_over = trainer.loss_scale.recovers and bool(record.skipped)  # the run went on after it
        if not math.isfinite(record.loss.item()) and not passed_over:
            return began, record.step
    return began, step


def _steps(config: Config) -> int:
    """Return how many steps a run has."""
    return plan_of(config, detect(config.device)).steps


def _restore(folder: RunFolder | None, trainer: Trainer, step: int) -> str:
    """Restore the newest checkpoint before a step, and return its name, or ``the beginning``."""
    places = [folder.checkpoints, folder.path / FAILURE] if folder is not None else []
    saved = [(number, place) for place in places for number in store.steps(place) if number < step]
    if not saved:
        return "the beginning"
    number, place = max(saved)
    path = store.find_verified(place, number)
    trainer.restore(CheckpointReader(path))
    return path.name


def differences(summary: dict[str, Any]) -> list[str]:
    """Return in what the run of a summary was made otherwise than it is replayed: its bits may differ, too."""
    before = {**summary.get("versions", {}), **summary.get("git", {})}
    here = {**versions(), **git_facts()}
    return [
        f"{name}: {before[name]} in the run, {here[name]} here; numbers may differ in the last bits"
        for name in ("torch", "transformers", "commit")
        if name in before and name in here and before[name] != here[name]
    ]
