"""Whether a format trains worse within a few steps, beyond what a rounding of weights and inputs would do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mantissa.finding import DIVERGENCE, FORWARD, UPDATE, Finding
from mantissa.formats import BF16, FP8, Format
from mantissa.step import Batch, Passes, Step, nudged

STEPS = 20
REPLAYS = 3
TIMES = 4.0
_IN_A_ROW = 3


@dataclass
class Divergence:
    """The losses of some steps in the run's format, and of the same steps in fp32."""

    format: Format
    step: int
    """The first one."""
    losses: dict[str, list[float]]
    """By name, that of the run's format first."""
    middle: Tensor
    """The mean of the fp32 losses of each step, fp64."""
    limit: Tensor
    """How far from it a loss may be, fp64."""
    masters_cure: bool | None = None
    """Whether the loss with fp32 masters does not leave; None: they were not tried."""

    @property
    def first(self) -> int | None:
        """The index of the first of three losses in a row that are beyond the limit, or None."""
        return self.leaves(self.losses[self.format.name])

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
        name, first = self.format.name, self.first
        away = self.losses[name][first] - self.middle[first].item()
        effect = f"is {away:.3g} away from that of fp32" if math.isfinite(away) else "is not finite"
        detail = (
            f"from step {self.step + first} on the loss {effect}; rounding explains at most {self.limit[first]:.3g}"
        )
        cure = []
        if self.masters_cure:
            cure = [f"precision={_with_masters(self.format)}"]
            detail += f"; with {cure[0]} it stays near that of fp32"
        # The first loss is computed before any update.
        return [Finding(DIVERGENCE, UPDATE if first else FORWARD, "", name, detail=detail, cure=cure)]


def divergence(step: Step, batches: list[list[Batch]]) -> Divergence:
    """Train some steps as the run does, and in fp32 from weights and inputs changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row.

    Args:
        step: the first step.
        batches: the microbatches of each step.
    """
    number = step.format.number
    unit = BF16.unit_roundoff if number is FP8 else number.unit_roundoff
    losses = {step.format.name: _losses(step.own(), batches)}
    for seed in range(REPLAYS):
        losses[f"fp32, changed {seed + 1}"] = _changed(step, batches, unit, seed)
    values = torch.tensor([each for name, each in losses.items() if name != step.format.name], dtype=torch.float64)
    spread = (values.max(0).values - values.min(0).values).cummax(0).values
    return Divergence(step.format, step.number, losses, values.mean(0), TIMES * spread.clamp(min=unit * unit))


def do_masters_cure(step: Step, batches: list[list[Batch]], found: Divergence) -> bool:
    """Return whether the loss stays near that of fp32 where fp32 masters hold the weights and the optimizer's state."""
    masters = step.passes(_with_masters(step.format), own=True, scale=step.scale)
    return found.leaves(_losses(masters, batches)) is None


def _with_masters(format: Format) -> str:
    return f"{format.number.name}_master"


def _losses(passes: Passes, batches: list[list[Batch]]) -> list[float]:
    passes.continue_training()
    return list(passes.train(batches))


def _changed(step: Step, batches: list[list[Batch]], unit: float, seed: int) -> list[float]:
    """Return the losses in fp32 from weights and inputs that are changed by ±``unit``, relative to their size."""
    generator = torch.Generator().manual_seed(seed)
    passes = step.passes("fp32")
    passes.continue_training()
    with torch.no_grad():
        for parameter in passes.model.parameters():
            parameter.copy_(nudged(parameter, unit, generator))
    inputs = (
        [{name: nudged(tensor, unit, generator) for name, tensor in batch.items()} for batch in each]
        for each in batches
    )
    return list(passes.train(inputs))
