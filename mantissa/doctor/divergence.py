"""Whether a format trains worse within some steps, beyond what a rounding of weights and inputs would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.doctor.explosion import explosion
from mantissa.doctor.module_errors import rounded_away
from mantissa.finding import DIVERGENCE, FORWARD, LOST, UPDATE, Examined, Finding
from mantissa.formats import BF16, FP8, FP32
from mantissa.step import Batch, Replay, Step, map_tensors
from mantissa.tensors import in_dtype, perturbed

STEPS, MOST_STEPS = 20, 60
"""How many steps are trained: more than the first number where there is time."""
REPLAYS = 3
TIMES = 4.0
_IN_A_ROW = 3
_LEAST = 0.003
"""Share of the loss up to which a difference is none: the margin with which ``compare`` calls losses equivalent."""
_MOVED = 0.5
"""Of its way in the reference: a weight that moves less, by updates below its spacing, has lost them."""
_WORSE = 0.25
"""The share of what fp32 has learned that a format may lose."""


@dataclass
class Divergence(Examined):
    """How far the losses of some steps in the run's format are from those in fp32, and how far they may be."""

    away: list[float]
    """The distance of each step's loss from the mean of the fp32 losses."""
    limit: list[float]
    """How much of it rounding explains."""
    mends: Callable[[Sequence[float]], bool] = field(default=lambda losses: False)
    """Whether other losses of the same steps do not diverge, nor lose half as much."""
    at: int = 0
    """The index of the step from which on it diverges."""
    broken: int | None = None
    """The index of the first step that is not finite in fp32 either, whatever the learning rate."""


def divergence(step: Step, batches: list[list[Batch]]) -> Divergence:
    """Train some steps as the run does, and in fp32 from weights and inputs changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row,
    or where it loses a quarter of what fp32 from the very same weights and inputs has learned: where rounding alone
    destroys what a model has to tell apart, the spread says nothing. What explodes in fp32, too, has another cause.

    Args:
        step: the first step.
        batches: the microbatches of each step.
    """
    format, alone = step.format, step.format.number is FP32
    reference = torch.float64 if alone else torch.float32
    wide, low = step.reference(reference), step.as_run()
    exact = _fp64(wide.train(batches))
    if finding := explosion(step, batches, exact, reference):
        return Divergence(away=[], limit=[], findings=[finding])
    if not exact.isfinite().all():
        return Divergence(away=[], limit=[], broken=int((~exact.isfinite()).nonzero()[0]))
    unit = BF16.unit_roundoff if format.number is FP8 else format.number.unit_roundoff
    own = _fp64(low.train(batches))
    middle, limit, first = exact, torch.full_like(exact, math.inf), None
    if not alone:  # in fp32 chaos soon leaves any spread
        references = torch.stack([_fp64(_changed(step, batches, unit, seed, reference)) for seed in range(REPLAYS)])
        spread = (references.max(0).values - references.min(0).values).cummax(0).values
        middle, limit = references.mean(0), TIMES * spread.clamp(min=unit * unit)
        first = leaves(own, middle, limit)
    elif not own.isfinite().all():
        first = int((~own.isfinite()).nonzero()[0])
    result = Divergence(away=(own - middle).abs().tolist(), limit=limit.tolist())
    loss = lost(own, exact)
    # What a change of the last bit does, too, is the chaos of the training.
    chaos = abs(lost(_fp64(_changed(step, batches, FP32.unit_roundoff, 0, reference)), exact)) if loss > _WORSE else 0.0
    worse = loss > max(_WORSE, TIMES * chaos)
    if first is None and not worse:
        return result

    def mends(losses: Sequence[float]) -> bool:
        other = _fp64(losses)
        return lost(other, exact) < loss / 2 if worse else leaves(other, middle, limit) is None

    result.mends = mends
    if first is not None:
        away = (own - middle)[first].item()
        effect = f"differs from that of fp32 by {away:.3g}" if math.isfinite(away) else "is not finite"
        detail = f"from step {step.number + first} on the loss {effect}"
        detail += f"; rounding explains at most {limit[first]:.3g}" if math.isfinite(limit[first]) else ""
    else:
        third = max(1, len(own) // 3)
        detail = (
            f"in {len(own)} steps the loss goes from {exact[0]:.4g} to {exact[-third:].mean():.4g} in "
            f"{dtype_name(reference)}, and to {own[-third:].mean():.4g} here"
        )
    result.at = first or 0
    if alone and (name := _stuck(low, wide, len(batches))):
        detail += f"; {name} moves by less than half of what it moves there: its updates are too small for its size"
        result.findings = [Finding(LOST, UPDATE, name.rpartition(".")[0], format.name, detail=detail, tensor=name)]
        return result
    detail += rounded_away(step)
    # The first loss is computed before any update.
    result.findings = [Finding(DIVERGENCE, UPDATE if first else FORWARD, "", format.name, detail=detail)]
    if format.only_half:
        other = step.with_fp32_weights
        if mends(step.replay(other, as_run=True).train(batches)):
            result.findings[0].cure = [step.remedies.format(other)]
            result.findings[0].detail += f"; {step.remedies.format(other)}: it stays near that of fp32"
    return result


def _stuck(low: Replay, wide: Replay, steps: int) -> str:
    """Return the weight that has moved the least of its way in the reference, as its updates are below its spacing."""
    shares: dict[str, float] = {}
    for (name, real), (_, exact) in zip(low.model.named_parameters(), wide.model.named_parameters(), strict=True):
        start = wide.step.weights[name].to(exact)
        way, spacing = (exact.detach() - start).abs().mean(), torch.finfo(real.dtype).eps * start.abs().mean()
        if 0 < way < spacing * steps:
            shares[name] = ((real.detach().to(exact) - start).abs().mean() / way).item()
    least = min(shares, key=shares.__getitem__, default="")
    return least if least and shares[least] < _MOVED else ""


def leaves(losses: Tensor, middle: Tensor, limit: Tensor) -> int | None:
    """Return the index of the first of three losses in a row that are beyond the limit, or None.

    Steps in which fp32 is not finite are not judged: a format cannot be worse than that.

    Args:
        losses: of each step, fp64.
        middle: the mean of the fp32 losses of each step.
        limit: how far from it a loss may be.
    """
    away = (losses - middle).abs()
    beyond = (~(away <= limit.clamp(min=_LEAST * middle.abs())) & limit.isfinite()).tolist()
    starts = range(len(beyond) - _IN_A_ROW + 1)
    return next((start for start in starts if all(beyond[start : start + _IN_A_ROW])), None)


def lost(losses: Tensor, exact: Tensor) -> float:
    """Return which share of what fp32 has learned other losses have not, both in the mean of the last third.

    0 where fp32 has not learned anything; infinite where the losses are not finite.
    """
    third = max(1, len(exact) // 3)
    learned = (exact[:3].mean() - exact[-third:].mean()).item()
    if not 0 < learned < math.inf:
        return 0.0
    share = ((losses - exact)[-third:].mean() / learned).item()
    return share if math.isfinite(share) else math.inf


def _fp64(losses: Sequence[float]) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64)


def _changed(step: Step, batches: list[list[Batch]], unit: float, seed: int, dtype: torch.dtype) -> list[float]:
    """Return the losses in the reference from weights and inputs changed by ±``unit``, relative to their size."""
    generator = torch.Generator().manual_seed(seed)
    passes = step.reference(dtype)
    passes.weights = {name: perturbed(in_dtype(each, dtype), unit, generator) for name, each in passes.weights.items()}
    inputs = (
        [map_tensors(batch, lambda tensor: perturbed(tensor, unit, generator, data=True)) for batch in step]
        for step in batches
    )
    return passes.train(inputs)
