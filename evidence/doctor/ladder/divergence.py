"""Whether a format trains worse within a few steps, beyond what a rounding of weights and inputs would do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evidence.doctor.step.case import Case, CaseTrainer
from evidence.doctor.step.finding import DIVERGENCE, FORWARD, UPDATE, Finding
from mantissa.formats import FORMATS
from trainer.data.contract import Batch
from trainer.determinism import random_state, set_random_state
from trainer.precision.modes import Precision

STEPS = 20
REPLAYS = 3
TIMES = 4.0
_IN_A_ROW = 3
_LEAST = 2.0**-10
"""The smallest loss scale that is tried."""
_UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}


@dataclass
class Divergence:
    """The losses of some steps in the run's format, and of the same steps in fp32."""

    precision: Precision
    step: int
    """The first one."""
    losses: dict[str, list[float]]
    """By name, that of the run's precision first."""
    middle: Tensor
    """The mean of the fp32 losses of each step, fp64."""
    limit: Tensor
    """How far from it a loss may be, fp64."""
    masters_cure: bool | None = None
    """Whether the loss with fp32 masters does not leave; None: they were not tried."""

    @property
    def first(self) -> int | None:
        """The index of the first of three losses in a row that are beyond the limit, or None."""
        return self.leaves(self.losses[self.precision.mode])

    def leaves(self, losses: list[float]) -> int | None:
        """Return the index of the first of three losses in a row that are beyond the limit, or None.

        Steps in which fp32 is not finite are not judged: a format cannot be worse than that.
        """
        away = (torch.tensor(losses, dtype=torch.float64) - self.middle).abs()
        beyond = (~(away <= self.limit) & self.middle.isfinite() & self.limit.isfinite()).tolist()
        starts = range(len(beyond) - _IN_A_ROW + 1)
        return next((start for start in starts if all(beyond[start : start + _IN_A_ROW])), None)

    @property
    def findings(self) -> list[Finding]:
        """What was found: nothing, or one divergence."""
        if self.first is None:
            return []
        mode, first = self.precision.mode, self.first
        away = self.losses[mode][first] - self.middle[first].item()
        effect = f"is {away:.3g} away from that of fp32" if math.isfinite(away) else "is not finite"
        detail = (
            f"from step {self.step + first} on the loss {effect}; rounding explains at most {self.limit[first]:.3g}"
        )
        cure = []
        if self.masters_cure:
            masters = f"{FORMATS[mode].number.name}_master"
            detail += f"; with precision={masters} it stays near that of fp32"
            cure = [f"precision={masters}"]
        # The first loss is computed before any update.
        return [Finding(DIVERGENCE, UPDATE if first else FORWARD, "", mode, detail=detail, cure=cure)]


def divergence(case: Case, batches: list[list[Batch]]) -> Divergence:
    """Train some steps as the run does, and in fp32 from weights and inputs changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row.

    Args:
        case: the first step.
        batches: the microbatches of each step.
    """
    own = case.config.precision
    unit = _UNITS[own.format.number.name]
    losses = {own.mode: list(_losses(_as_the_run(case, own), batches))}
    for number in range(REPLAYS):
        losses[f"fp32, changed {number + 1}"] = list(_changed(case, batches, unit, number))
    values = torch.tensor([each for name, each in losses.items() if name != own.mode], dtype=torch.float64)
    spread = (values.max(0).values - values.min(0).values).cummax(0).values
    return Divergence(own, case.step, losses, values.mean(0), TIMES * spread.clamp(min=unit * unit))


def masters_cure(case: Case, batches: list[list[Batch]], found: Divergence) -> bool:
    """Return whether the loss stays near that of fp32 where fp32 masters hold the weights and the optimizer's state."""
    masters = replace(found.precision, mode=f"{found.precision.format.number.name}_master")
    return found.leaves(list(_losses(_as_the_run(case, masters), batches))) is None


def _as_the_run(case: Case, precision: Precision) -> CaseTrainer:
    """Return a trainer with the run's own weights and optimizer state."""
    trainer = case.trainer(precision, own=True, scale=case.scale)
    trainer.continue_training()
    return trainer


def _changed(case: Case, batches: list[list[Batch]], unit: float, seed: int) -> Iterator[float]:
    """Yield the losses in fp32 from weights and inputs that are changed by ±``unit``, relative to their size."""
    generator = torch.Generator().manual_seed(seed)

    def changed(tensor: Tensor) -> Tensor:
        sign = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
        return tensor * (1 + unit * sign) if tensor.is_floating_point() else tensor

    trainer = case.trainer(Precision())
    trainer.continue_training()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(changed(parameter))
    inputs = ([{name: changed(tensor) for name, tensor in batch.items()} for batch in step] for step in batches)
    yield from _losses(trainer, inputs)


def _losses(trainer: CaseTrainer, batches: Iterable[list[Batch]]) -> Iterator[float]:
    """Train some steps, and yield the loss of each."""
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
