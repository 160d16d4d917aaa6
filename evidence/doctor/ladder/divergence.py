"""Whether a format trains worse within a few steps, beyond what a rounding of the weights would do."""

from __future__ import annotations

from dataclasses import replace

import torch

from evidence.doctor.step.case import Case, CaseTrainer
from evidence.doctor.step.finding import DIVERGENCE, UPDATE, Finding
from trainer.data.contract import Batch
from trainer.precision.modes import Precision

STEPS = 20
REPLAYS = 3
TIMES = 4.0
_IN_A_ROW = 3
_LEAST = 2.0**-10
"""The smallest loss scale that is tried."""
_FORMS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}


def divergence(case: Case, batches: list[list[Batch]]) -> tuple[Finding | None, dict[str, list[float]]]:
    """Train some steps as the run does, and in fp32 from weights that are changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row.

    Args:
        case: the first step.
        batches: the microbatches of each step.

    Returns:
        The finding, if there is one, and the losses by name.
    """
    own = case.config.precision
    unit = _FORMS[own.mode.partition("_")[0]]
    losses = {own.mode: _losses(case.trainer(own, own=True, scale=case.scale), batches)}
    for number in range(REPLAYS):
        trainer = case.trainer(Precision())
        losses[f"fp32, changed {number + 1}"] = _losses(trainer, batches, unit, number)
    references = torch.tensor([values for name, values in losses.items() if name != own.mode], dtype=torch.float64)
    middle = references.mean(0)
    spread = (references.max(0).values - references.min(0).values).cummax(0).values
    away = (torch.tensor(losses[own.mode], dtype=torch.float64) - middle).abs()
    outside = ~(away <= TIMES * spread.clamp(min=unit * unit))
    for first in range(len(batches) - _IN_A_ROW + 1):
        if bool(outside[first : first + _IN_A_ROW].all()):
            detail = (
                f"from step {case.step + first} on the loss is {away[first]:.3g} away from that of fp32, "
                f"whose own spread is {spread[first]:.3g}"
            )
            return Finding(DIVERGENCE, UPDATE, "", own.mode, detail=detail), losses
    return None, losses


def _losses(trainer: CaseTrainer, batches: list[list[Batch]], unit: float = 0.0, seed: int = 0) -> list[float]:
    trainer.continue_training()
    if unit:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                sign = torch.randint(2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                parameter.mul_(1 + unit * sign)
    found = []
    for microbatches in batches:
        trainer.case = replace(trainer.case, microbatches=microbatches)  # whose targets are counted
        record = trainer.train_step(microbatches)
        while bool(record.skipped) and trainer.loss_scale.scale.item() > _LEAST:  # as a dynamic scaler would
            trainer.loss_scale.scale.mul_(0.5)
            trainer.step -= 1
            record = trainer.train_step(microbatches)
        found.append(record.loss.item())
    return found
