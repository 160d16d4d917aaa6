"""Whether a format trains worse within a few steps, beyond what a rounding of weights and inputs would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mantissa.finding import DIVERGENCE, FORWARD, UPDATE, Examined, Finding
from mantissa.formats import BF16, FP8
from mantissa.step import Batch, Step, each
from mantissa.tensors import nudged

STEPS = 20
REPLAYS = 3
TIMES = 4.0
_IN_A_ROW = 3


@dataclass
class Divergence(Examined):
    """How far the losses of some steps in the run's format are from those in fp32, and how far they may be."""

    away: list[float]
    """The distance of each step's loss from the mean of the fp32 losses."""
    limit: list[float]
    """How much of it rounding explains."""


def divergence(step: Step, batches: list[list[Batch]]) -> Divergence:
    """Train some steps as the run does, and in fp32 from weights and inputs changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row.
    Where only 16 bits hold the weights, fp32 masters are tried as the cure.

    Args:
        step: the first step.
        batches: the microbatches of each step.
    """
    format = step.format
    unit = BF16.unit_roundoff if format.number is FP8 else format.number.unit_roundoff
    own = _fp64(step.own().train(batches))
    references = _fp64([_changed(step, batches, unit, seed) for seed in range(REPLAYS)])
    spread = (references.max(0).values - references.min(0).values).cummax(0).values
    middle, limit = references.mean(0), TIMES * spread.clamp(min=unit * unit)
    result = Divergence(away=(own - middle).abs().tolist(), limit=limit.tolist())
    first = leaves(own, middle, limit)
    if first is None:
        return result
    away = (own - middle)[first].item()
    effect = f"differs from that of fp32 by {away:.3g}" if math.isfinite(away) else "is not finite"
    detail = f"from step {step.number + first} on the loss {effect}; rounding explains at most {limit[first]:.3g}"
    # The first loss is computed before any update.
    finding = Finding(DIVERGENCE, UPDATE if first else FORWARD, "", format.name, detail=detail)
    masters = f"{format.number.name}_master"
    if format.only_half:
        with_masters = _fp64(step.passes(masters, own=True).train(batches))
        if leaves(with_masters, middle, limit) is None:
            finding.cure = [f"precision={masters}"]
            finding.detail += f"; with precision={masters} it stays near that of fp32"
    result.findings = [finding]
    return result


def leaves(losses: Tensor, middle: Tensor, limit: Tensor) -> int | None:
    """Return the index of the first of three losses in a row that are beyond the limit, or None.

    Steps in which fp32 is not finite are not judged: a format cannot be worse than that.

    Args:
        losses: of each step, fp64.
        middle: the mean of the fp32 losses of each step.
        limit: how far from it a loss may be.
    """
    away = (losses - middle).abs()
    beyond = (~(away <= limit) & limit.isfinite()).tolist()
    starts = range(len(beyond) - _IN_A_ROW + 1)
    return next((start for start in starts if all(beyond[start : start + _IN_A_ROW])), None)


def _fp64(losses: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64)


def _changed(step: Step, batches: list[list[Batch]], unit: float, seed: int) -> list[float]:
    """Return the losses in fp32 from weights and inputs that are changed by ±``unit``, relative to their size."""
    generator = torch.Generator().manual_seed(seed)
    passes = step.passes("fp32")
    passes.weights = {name: nudged(each.float(), unit, generator) for name, each in passes.weights.items()}
    inputs = ([each(batch, lambda tensor: nudged(tensor, unit, generator)) for batch in step] for step in batches)
    return passes.train(inputs)
