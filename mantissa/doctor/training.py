"""Whether some steps in a format train worse than rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.doctor.budget import Budget
from mantissa.doctor.cause import find_origin
from mantissa.doctor.data import rounded_away
from mantissa.doctor.dtypes import NO_CAST, casts_in_update
from mantissa.doctor.explosion import explosion, losses_of
from mantissa.doctor.finding import DIVERGENCE, INPUT, LOST, UPDATE, Cure, Examined, Finding
from mantissa.doctor.limits import HARM, WRONG_LOSS
from mantissa.formats import FP32, Format, plain
from mantissa.step.step import Batch, Replay, Step
from mantissa.step.trace import FORWARD
from mantissa.tensors import finite, relative_error

STEPS, MOST_STEPS = 20, 60
"""Numbers of steps that are trained: the second one where they are small."""
_SMALL = 3e8
"""Multiplications of a small step."""
_REPLAYS = 3
_TIMES = 4.0
_IN_A_ROW = 3
_LEAST = 0.003
"""Share of the loss up to which a difference is none: the margin with which ``compare`` calls losses equivalent."""
_MOVED = 0.5
"""Of its way in the reference: a weight that moves less, by updates below its spacing, has lost them."""
_WORSE = 0.25
"""The share of what fp32 has learned that a format may lose."""


def steps_to_train(step: Step) -> int:
    """Return how many steps show whether a format trains worse."""
    count = MOST_STEPS if step.multiplications <= _SMALL else STEPS
    return min(count, step.different or count)


@dataclass(frozen=True)
class _Standard:
    """What a format is compared with: the same steps in the reference, and how much rounding changes them."""

    batches: list[list[Batch]]
    exact: Tensor
    """Losses of the reference, fp64."""
    weights: dict[str, Tensor]
    """What they have become."""
    middle: Tensor
    limit: Tensor
    """How far from the middle the loss of each step may be; infinite: anything is rounding."""


def divergence(step: Step, budget: Budget) -> Examined:
    """Train some steps as the run does, and in fp32 from weights and inputs changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row,
    or where it loses a quarter of what fp32 from the very same weights and inputs has learned: where rounding alone
    destroys what a model has to tell apart, the spread says nothing. What explodes in fp32, too, has another cause.
    """
    count = steps_to_train(step)
    budget.expect(seconds=count * _seconds(step, budget))
    batches = step.following(count)

    # What explodes, learns nothing or breaks in the reference, too, is no matter of the format.
    replay = step.exact()
    exact = losses_of(replay, batches)
    if finding := explosion(step, batches, exact):
        return Examined(findings=(finding,))
    if not exact.isfinite().all():
        broken = _first_infinite(exact)
        later = _broken_later(step, batches, broken, plain(FP32))
        return Examined(findings=(later,) if later else ())

    # The format's losses, beside how far rounding alone takes those of the reference.
    weights = {name: weight.detach().clone() for name, weight in replay.model.named_parameters()}
    standard = _standard(step, batches, exact, weights)
    return replace(_judged(standard, step), again=partial(_judged, standard))


def _seconds(step: Step, budget: Budget) -> float:
    """Return how long one step takes in all trainings, about."""
    taken = budget.step_seconds
    if step.format.half is None:  # the reference in fp64 counts twice
        return taken * 4
    return taken + budget.spent.get(FP32.name, taken) * (_REPLAYS + 2)  # the exact one, and one that stands still


def _standard(step: Step, batches: list[list[Batch]], exact: Tensor, weights: dict[str, Tensor]) -> _Standard:
    if step.format.number is FP32:  # whose chaos soon leaves any spread
        return _Standard(batches, exact, weights, exact, torch.full_like(exact, math.inf))
    unit = step.format.number.unit_roundoff
    references = torch.stack([_perturbed(step, batches, unit, seed) for seed in range(_REPLAYS)])
    spread = (references.max(0).values - references.min(0).values).cummax(0).values
    return _Standard(batches, exact, weights, references.mean(0), _TIMES * spread.clamp(min=unit * unit))


def _perturbed(step: Step, batches: list[list[Batch]], unit: float, seed: int) -> Tensor:
    replay = step.exact()
    return torch.tensor(replay.train(replay.perturb(unit, seed, batches)), dtype=torch.float64)


def _judged(standard: _Standard, step: Step) -> Examined:
    """Train as a step says, and compare the losses with the standard's."""
    # Where the loss leaves the spread.
    batches, exact, middle, limit = standard.batches, standard.exact, standard.middle, standard.limit
    replay = step.as_run()
    losses = losses_of(replay, batches)
    alone = step.format.number is FP32
    first = leaves(losses, middle, limit)
    if alone and not losses.isfinite().all():
        first = _first_infinite(losses)

    # What a change of the last bit does, too, is the chaos of the training.
    share = lost(losses, exact)
    chaos = abs(lost(_perturbed(step, batches, FP32.unit_roundoff, 0), exact)) if share > _WORSE else 0.0
    worse = share > max(_WORSE, _TIMES * chaos)
    if first is None and not worse:
        return Examined()

    # A first loss that is off by little, while gradients are right and the model learns, does no harm.
    if first == 0 and not worse and ((losses - middle).abs() < WRONG_LOSS * middle.abs())[0]:
        low, wide = (
            torch.cat([gradient.flatten() for gradient in side.true_gradients().values()][:-1])  # without the loss
            for side in (step.as_run(), step.exact())
        )
        error = relative_error(low, wide)
        if error < HARM:
            off = f"the loss differs from that of fp32 by {(losses - middle)[0]:.3g}, more than rounding explains"
            return Examined(notes=(f"{off}; its gradients agree within {error:.1%}, and it learns as much",))

    # What happens, in words.
    if first is not None:
        away = (losses - middle)[first].item()
        effect = f"differs from that of fp32 by {away:.3g}" if math.isfinite(away) else "is not finite"
        detail = f"from step {step.number + first} on the loss {effect}"
        detail += f"; rounding explains at most {limit[first]:.3g}" if math.isfinite(limit[first]) else ""
    else:
        third = max(1, len(losses) // 3)
        detail = (
            f"in {len(losses)} steps the loss goes from {exact[0]:.4g} to {exact[-third:].mean():.4g} in "
            f"{dtype_name(step.exact_dtype)}, and to {losses[-third:].mean():.4g} here"
        )

    # In fp32 the only cause is a weight whose updates are lost.
    if alone and (name := _stuck(replay, standard.weights, len(batches))):
        detail += f"; {name} moves by less than half of what it moves there: its updates are too small for its size"
        finding = Finding(LOST, UPDATE, name.rpartition(".")[0], step.format.name, detail=detail, tensor=name)
        return Examined(findings=(finding,))

    # What breaks later has a cause of its own; where it is the update, that has diverged.
    tensor = ""
    if first and not losses[first].isfinite():
        later = _broken_later(step, batches, first)
        if later is not None and later.direction != UPDATE:
            return Examined(findings=(replace(later, candidates=(*later.candidates, *_fp32_weights(step))),))
        if later is not None:
            tensor, detail = later.tensor, f"{detail}; {later.detail}"
    direction = UPDATE if first else FORWARD  # the first loss is computed before any update
    detail += rounded_away(step)
    finding = Finding(
        DIVERGENCE, direction, "", step.format.name, detail=detail, tensor=tensor, candidates=_cures(step)
    )
    return Examined(findings=(finding,))


def _cures(step: Step) -> tuple[Cure, ...]:
    """Return weights in fp32, and the optimizer's step without its casts to 16 bits."""
    cures = _fp32_weights(step)
    for line in casts_in_update(step):
        at = {"direction": UPDATE, "tensor": "the optimizer's step", "line": line}
        cures.append(Cure(NO_CAST, step.without_casts(line), at))
    return tuple(cures)


def _fp32_weights(step: Step) -> list[Cure]:
    if not step.format.only_half:
        return []
    other = step.with_fp32_weights()
    return [Cure(step.remedies.format(other.format), other)]


def _first_infinite(losses: Tensor) -> int:
    return int((~losses.isfinite()).nonzero()[0])


def _broken_later(step: Step, batches: list[list[Batch]], count: int, format: Format | None = None) -> Finding | None:
    """Return the fault of a step that is not finite after ``count`` steps; ``format`` None: as the run takes it."""
    replay = step.replay(format) if format else step.as_run()
    replay.train(batches[:count])
    later = step.after(replay, count)
    broken = later.replay(format) if format else later.as_run()
    broken.run_with_backoff()
    finding = find_origin(broken, (format or step.format).name)
    if finding is None:
        return None
    detail = f"{finding.detail}; in step {later.number}, after {count} finite ones"
    before = (step.stored | step.buffers).get(finding.tensor)
    if finding.kind == INPUT and before is not None and finite(before):  # a step made it so, and will again
        return replace(finding, detail=detail, direction=UPDATE, line="", cure=(), candidates=())
    return replace(finding, detail=detail)


def _stuck(replay: Replay, exact: dict[str, Tensor], steps: int) -> str:
    """Return the weight that has moved the least of its way in the reference, as its updates are below its spacing."""
    shares: dict[str, float] = {}
    for name, real in replay.model.named_parameters():
        end = exact[name]
        start = replay.step.weights[name].to(end)
        way, spacing = (end - start).abs().mean(), torch.finfo(real.dtype).eps * start.abs().mean()
        if 0 < way < spacing * steps:
            shares[name] = ((real.detach().to(end) - start).abs().mean() / way).item()
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
