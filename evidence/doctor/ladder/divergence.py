"""Whether a format trains worse within a few steps, beyond what a rounding of the weights would do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from evidence.doctor.measured.updates import keeps_16_bits, suspects
from evidence.doctor.step.case import Case, CaseTrainer, update_meter
from evidence.doctor.step.finding import DIVERGENCE, UPDATE, Finding
from trainer.checkpoint.generators import random_state, set_random_state
from trainer.data.contract import Batch
from trainer.precision.modes import Precision, family
from trainer.profiling.updates import ParameterUpdate

STEPS = 20
REPLAYS = 3
TIMES = 4.0
_IN_A_ROW = 3
_LEAST = 2.0**-10
"""The smallest loss scale that is tried."""
_FORMS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}


def divergence(case: Case, batches: list[list[Batch]]) -> tuple[list[Finding], dict[str, list[float]]]:
    """Train some steps as the run does, and in fp32 from weights that are changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row.
    If the weights are kept in 16 bits, the same steps are taken with fp32 masters, too: where their loss does not
    leave, the updates are the cause, and their modules are named.

    Args:
        case: the first step.
        batches: the microbatches of each step.

    Returns:
        What was found, and the losses by name.
    """
    own = case.config.precision
    unit = _FORMS[own.mode.partition("_")[0]]
    trainer = _as_the_run(case, own)
    taken = _measured(trainer, batches) if keeps_16_bits(own) else None
    losses = list(_losses(trainer, batches)) if taken is None else taken.losses
    del trainer  # its memory is for the next ones
    references = {
        f"fp32, changed {number + 1}": list(_losses(_changed(case, unit, number), batches)) for number in range(REPLAYS)
    }
    middle, most = _spread(references, unit)
    first = _leaves(losses, middle, most)
    named = {own.mode: losses} | references
    if first is None:
        return [], named
    away = torch.tensor(losses, dtype=torch.float64) - middle
    effect = f"is {away[first]:.3g} away from that of fp32" if away[first].isfinite() else "is not finite"
    detail = f"from step {case.step + first} on the loss {effect}"
    if taken is not None and first:
        masters = f"{family(own.mode)}_master"
        cured = _measured(_as_the_run(case, replace(own, mode=masters)), batches)
        if _leaves(cured.losses, middle, most) is None:
            before = [each for step in taken.updates[:first] for each in step]
            too_small = taken.distances[first - 1] < cured.distances[first - 1]  # not so where it is NaN
            causes = suspects(before, own, too_large=not too_small)
            for cause in causes:
                cause.detail += f"; {detail}, and with precision={masters} it stays near"
            if causes:
                return causes, named
    detail += f"; rounding explains {most[first]:.3g}"
    return [Finding(DIVERGENCE, UPDATE, "", own.mode, detail=detail)], named


def _spread(references: dict[str, list[float]], unit: float) -> tuple[Tensor, Tensor]:
    """Return the mean of the losses of each step, and the largest distance from it that rounding explains, fp64."""
    values = torch.tensor(list(references.values()), dtype=torch.float64)
    spread = (values.max(0).values - values.min(0).values).cummax(0).values
    return values.mean(0), TIMES * spread.clamp(min=unit * unit)


def _leaves(losses: list[float], middle: Tensor, most: Tensor) -> int | None:
    """Return the index of the first of three losses in a row that are farther away; None: there is none."""
    outside = ~((torch.tensor(losses, dtype=torch.float64) - middle).abs() <= most)
    starts = outside.unfold(0, _IN_A_ROW, 1).all(1).nonzero()
    return int(starts[0]) if len(starts) else None


class _Steps(NamedTuple):
    """Steps that were taken from the run's own weights, with a value for each."""

    losses: list[float]
    updates: list[list[ParameterUpdate]]
    """What rounding did to them."""
    distances: list[float]
    """The norm of all that the weights have changed since the first step."""


def _as_the_run(case: Case, precision: Precision) -> CaseTrainer:
    """Return a trainer from the run's own weights and optimizer state."""
    trainer = case.trainer(precision, own=True, scale=case.scale)
    trainer.continue_training()
    return trainer


def _changed(case: Case, unit: float, seed: int) -> CaseTrainer:
    """Return a trainer in fp32 whose weights are changed by ±``unit``, relative to their size."""
    trainer = case.trainer(Precision())
    trainer.continue_training()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            sign = torch.randint(2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + unit * sign)
    return trainer


def _measured(trainer: CaseTrainer, batches: list[list[Batch]]) -> _Steps:
    """Train some steps from the trainer's weights, and measure each."""
    start = [parameter.detach().clone() for parameter in trainer.update.parameters]
    steps = _Steps([], [], [])
    meter = update_meter(trainer)
    with meter or nullcontext():
        for loss in _losses(trainer, batches):
            steps.losses.append(loss)
            steps.updates.append(meter.results() if meter is not None else [])
            with torch.no_grad():
                changes = [
                    (now.float() - before.float()).norm()
                    for now, before in zip(trainer.update.parameters, start, strict=True)
                ]
            steps.distances.append(torch.stack(changes).norm().item())
    return steps


def _losses(trainer: CaseTrainer, batches: list[list[Batch]]) -> Iterator[float]:
    """Train some steps from the trainer's weights, and yield the loss of each."""
    for microbatches in batches:
        trainer.case = replace(trainer.case, microbatches=microbatches)  # whose targets are counted
        generators = random_state(trainer.device)
        record = trainer.train_step(microbatches)
        while bool(record.skipped) and trainer.loss_scale.scale.item() > _LEAST:  # as a dynamic scaler would
            trainer.loss_scale.scale.mul_(0.5)
            trainer.step -= 1
            set_random_state(generators, trainer.device)  # the same dropout as in fp32, which skips nothing
            record = trainer.train_step(microbatches)
        yield record.loss.item()
