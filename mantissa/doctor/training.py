"""Whether a format trains worse than rounding explains, and why training explodes or learns nothing in any."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.doctor.data import rounded_away
from mantissa.doctor.limits import HARM
from mantissa.finding import DIVERGENCE, FORWARD, INPUT, LOST, MOMENT, RATE, SCALE, UNDERFLOW, UPDATE, Examined, Finding
from mantissa.formats import FP32
from mantissa.step.step import Batch, Replay, Step, batch_key, map_tensors
from mantissa.step.trace import Trace
from mantissa.tensors import moments, relative_error

STEPS, MOST_STEPS = 20, 60
"""Numbers of steps that are trained: the second one where they are small."""
_SMALL = 3e8
"""Multiplications of a small step."""
REPLAYS = 3
TIMES = 4.0
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


@dataclass
class Divergence(Examined):
    """Whether the losses of some steps in the run's format leave those in fp32, and where."""

    fixes: Callable[[Sequence[float]], bool] = field(default=lambda losses: False)
    """Whether other losses of the same steps do not diverge, nor lose what is too much, or half as much."""
    at: int = 0
    """The index of the step from which on it diverges."""
    is_finite: bool = True
    """Whether its loss is finite there."""
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
    wide, low = step.exact(), step.as_run()
    exact = _fp64(wide.train(batches))
    if finding := explosion(step, batches, exact):
        return Divergence(findings=[finding])
    if not exact.isfinite().all():
        return Divergence(broken=int((~exact.isfinite()).nonzero()[0]))

    def perturbed(unit: float, seed: int) -> Tensor:
        passes = step.exact()
        return _fp64(passes.train(passes.perturb(unit, seed, batches)))

    unit = format.number.unit_roundoff
    own = _fp64(low.train(batches))
    middle, limit, first = exact, torch.full_like(exact, math.inf), None
    if not alone:  # in fp32 chaos soon leaves any spread
        references = torch.stack([perturbed(unit, seed) for seed in range(REPLAYS)])
        spread = (references.max(0).values - references.min(0).values).cummax(0).values
        middle, limit = references.mean(0), TIMES * spread.clamp(min=unit * unit)
        first = leaves(own, middle, limit)
    elif not own.isfinite().all():
        first = int((~own.isfinite()).nonzero()[0])
    result = Divergence()
    loss = lost(own, exact)
    # What a change of the last bit does, too, is the chaos of the training.
    chaos = abs(lost(perturbed(FP32.unit_roundoff, 0), exact)) if loss > _WORSE else 0.0
    most = max(_WORSE, TIMES * chaos)
    worse = loss > most
    if first is None and not worse:
        return result
    if first == 0 and not worse:
        sides = (torch.cat([*map(torch.flatten, each.true_gradients().values())]) for each in (low, wide))
        error = relative_error(*(side[:-1] for side in sides))  # without the loss
        if error < HARM:
            off = f"the loss differs from that of fp32 by {(own - middle)[0]:.3g}, more than rounding explains"
            result.notes = [f"{off}; its gradients agree within {error:.1%}, and it learns as much"]
            return result

    def fixes(losses: Sequence[float]) -> bool:
        other = _fp64(losses)
        return lost(other, exact) < min(most, loss / 2) if worse else leaves(other, middle, limit) is None

    result.fixes = fixes
    if first is not None:
        away = (own - middle)[first].item()
        effect = f"differs from that of fp32 by {away:.3g}" if math.isfinite(away) else "is not finite"
        detail = f"from step {step.number + first} on the loss {effect}"
        detail += f"; rounding explains at most {limit[first]:.3g}" if math.isfinite(limit[first]) else ""
    else:
        third = max(1, len(own) // 3)
        detail = (
            f"in {len(own)} steps the loss goes from {exact[0]:.4g} to {exact[-third:].mean():.4g} in "
            f"{dtype_name(step.exact_dtype)}, and to {own[-third:].mean():.4g} here"
        )
    result.at = first or 0
    result.is_finite = math.isfinite(own[result.at])
    if alone and (name := _stuck(low, wide, len(batches))):
        detail += f"; {name} moves by less than half of what it moves there: its updates are too small for its size"
        result.findings = [Finding(LOST, UPDATE, name.rpartition(".")[0], format.name, detail=detail, tensor=name)]
        return result
    detail += rounded_away(step)
    # The first loss is computed before any update.
    result.findings = [Finding(DIVERGENCE, UPDATE if first else FORWARD, "", format.name, detail=detail)]
    if format.only_half:
        other = step.with_fp32_weights()
        if fixes(other.as_run().train(batches)):
            result.findings[0].cure = [step.remedies.format(other.format)]
            result.findings[0].detail += f"; {step.remedies.format(other.format)}: it stays near that of fp32"
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


_EXPLODED = 10.0
"""Training explodes where the loss becomes so many times that of weights that stand still, and does not fall below half
of that again."""
_NO_PROGRESS, _CLEAR_PROGRESS = 0.03, 0.15
"""Of its size: training learns nothing if the loss falls by less than the first, and what lets it fall by more than
the second is the cause."""
_FACTOR, _TINY = 16.0, 1e-3
"""From the first on a constant factor of the loss is tried as the cause; gradients below the second one, as a share of
the optimizer's eps, move no weight."""
RATES = tuple(10.0**-power for power in range(1, 9))


def explosion(step: Step, batches: list[list[Batch]], exact: Tensor) -> Finding | None:
    """Return why training explodes or learns nothing in the reference; None: it does neither, or nothing cures it.

    What is named was changed, and the same steps were trained again.

    Args:
        step: the first step.
        batches: the microbatches of each step.
        exact: the losses in the reference, fp64.
    """
    if not _explodes(exact, exact[:1]) and _learned(exact, exact[:3]) > _CLEAR_PROGRESS:
        return None
    still = _fp64(step.at_rate(0.0).reference().train(batches))
    explodes = _explodes(exact, still)
    if not explodes and _learned(exact, still) > _NO_PROGRESS:
        return None
    broken = (~exact.isfinite()).nonzero()
    peak = f" (at most {exact.max():.4g})" * explodes  # from which it may have come back
    last = f"{exact[-1]:.4g}{peak}" if not len(broken) else f"not finite at step {step.number + int(broken[0])}"
    went = f"in {dtype_name(step.exact_dtype)} the loss goes from {exact[0]:.4g} to {last} in {len(exact)} steps"
    rises = False
    for finding, losses in _explanations(step, batches, explodes):
        least = 0.0 if explodes or finding.kind == UNDERFLOW else _CLEAR_PROGRESS
        if not _explodes(losses, still) and _learned(losses, still) > least:
            finding.detail = f"{went}, and to {losses[-1]:.4g} {finding.detail}"
            return finding
        rises |= explodes and finding.kind == RATE and _learned(losses, still) < 0
    if not rises:
        return None
    detail = f"{went}, and it rises with much lower learning rates, too, as with a wrong sign, or weight decay"
    return Finding(RATE, UPDATE, "", "fp32", detail=detail)


def _explanations(step: Step, batches: list[list[Batch]], explodes: bool) -> Iterator[tuple[Finding, Tensor]]:
    """Yield what may be the cause, and the losses of the same steps without it."""

    def trained(step: Step, steps: list[list[Batch]] = batches) -> Tensor:
        return _fp64(step.exact().train(steps))

    def finding(kind: str, detail: str, cure: str, module: str = "", tensor: str = "", line: str = "") -> Finding:
        return Finding(kind, UPDATE, module, "fp32", detail=detail, cure=[cure], tensor=tensor, line=line)

    if step.moments:
        state, times = _largest_state(step)
        detail = (
            f"with a fresh state of the optimizer; the largest, {state}, is {times:.3g} times the gradient of this step"
        )
        module = state.rpartition(" of ")[2].rpartition(".")[0]
        yield finding(MOMENT, detail, step.remedies.fresh_state, module, state), trained(step.with_fresh_state())
    sample = find_outlier(batch for microbatches in batches for batch in microbatches) if explodes else None
    if sample is not None:
        detail = f"with usual samples in the place of such; in step {step.number + sample.batch // len(batches[0])}, "
        cure = f"leave out {sample.place}, and others like it"
        usual = [list(map(without_outliers, microbatches)) for microbatches in batches]
        yield finding(INPUT, f"{detail}{sample}", cure, tensor=sample.place), trained(step, usual)
    factor, line = _factor(step.reference())
    detail, cure = f"if the gradients are not multiplied by {factor:g}, as the loss is", "no factor in this line"
    gradients = step.exact().true_gradients() if step.eps and not explodes else {}
    largest = max((each.abs().max().item() for name, each in gradients.items() if name), default=0.0)
    small = 0 < largest < step.eps
    if small and largest < factor * step.eps:  # a factor in a line is not the reason, or not the only one
        factor, line, cure = largest, "", f"multiply the loss by {1 / largest:.1g}, or a much lower eps"
        detail = f"if the loss is multiplied by {1 / largest:.1g}: its largest gradient is below eps = {step.eps:g}"
    if small or (explodes and factor >= _FACTOR):
        losses = factor * trained(step.with_loss_times(1 / factor))
        yield finding(UNDERFLOW if small and largest < _TINY * step.eps else SCALE, detail, cure, line=line), losses
    for rate in RATES if explodes else RATES[:2]:
        detail = f"with {rate:g} times the learning rate"
        yield finding(RATE, detail, step.remedies.rate(rate)), trained(step.at_rate(rate))


def _largest_state(step: Step) -> tuple[str, float]:
    """Find the optimizer tensor that is the largest beside this step's gradient, and how many times as large."""
    gradients, found = step.reference().run().gradients, []
    for name, state in step.moments.items():
        if name not in gradients or gradients[name].is_sparse:
            continue
        gradient = gradients[name]
        for key, value in moments(state, gradient).items():
            kept = value.double().sqrt() if key.endswith("_sq") else value.double()
            times = kept.norm().item() / max(gradient.double().norm().item(), 1e-30)
            found.append((times, f"{key} of {name}"))
    times, place = max(found, default=(0.0, ""))
    return place, times


def _factor(passes: Replay) -> tuple[float, str]:
    """Return the constant that the code multiplies the mean loss by at last, and the line."""
    trace = Trace(passes.model, lines=True)
    node = passes.forward(trace).grad_fn
    constants = [getattr(node, f"_saved_{side}", None) for side in ("self", "other")]
    numbers = [abs(each.item()) for each in constants if each is not None and each.numel() == 1]
    if passes.step.sums_loss or node is None or len(numbers) != 1 or not numbers[0]:
        return 1.0, ""
    factor = {"MulBackward0": numbers[0], "DivBackward0": 1 / numbers[0]}.get(node.name(), 1.0)
    return factor, str(trace.line_of(node) or "")


def _learned(losses: Tensor, still: Tensor) -> float:
    """Return by which share the last third of the losses is below that of weights that stand still."""
    third = max(1, len(losses) // 3)
    last, other = losses[-third:].mean().item(), still[-third:].mean().item()
    return (other - last) / abs(other) if other else 0.0


def _explodes(losses: Tensor, still: Tensor) -> bool:
    """Return whether losses grow far beyond those of weights that stand still, and stay there, or are not finite."""
    third, size = max(1, len(losses) // 3), still.abs().mean()
    away = losses - still
    grows = bool(away.max() > _EXPLODED * size) and bool(away[-third:].mean() > -size / 2)
    return grows or not bool(losses.isfinite().all())


_OUTLIER_RATIO = 30.0
"""A sample is tried as a cause if its largest number is so many times that of the median sample."""


class Sample(NamedTuple):
    """Samples of a batch that are far larger than the others."""

    place: str
    """The batch's tensor, and the numbers of such samples."""
    largest: float
    usual: float
    """The largest number of the median sample."""
    batch: int
    """The number of the batch, from 0."""

    def __str__(self) -> str:
        return f"{self.place}: numbers up to {self.largest:.3g}, in half of the others none above {self.usual:.3g}"


def find_outlier(batches: Iterable[Batch]) -> Sample | None:
    """Return the samples that are farther from the others of their batch than all; None: there are none."""
    found = []
    for number, name, tensor in ((number, *item) for number, batch in enumerate(batches) for item in batch.items()):
        sizes, usual = _sizes(tensor)
        if rows := (sizes > _OUTLIER_RATIO * usual).nonzero().flatten().tolist():
            found.append(Sample(f"{batch_key(name)}, {samples(rows)}", sizes.max().item(), usual, number))
    return max(found, key=lambda sample: sample.largest / sample.usual, default=None)


def without_outliers(batch: Batch) -> Batch:
    """Return a batch of the same size with the median sample in the place of each that is far larger."""
    rows: dict[int, int] = {}
    count = 0
    for tensor in batch.values():
        sizes, usual = _sizes(tensor)
        for row in (sizes > _OUTLIER_RATIO * usual).nonzero().flatten().tolist():
            rows[row], count = int((sizes - usual).abs().argmin()), len(sizes)
    if not rows:
        return batch
    taken = [rows.get(row, row) for row in range(count)]
    return map_tensors(batch, lambda tensor: tensor[taken] if tensor.shape[:1] == (count,) else tensor)


def samples(rows: list[int]) -> str:
    """Return samples in words."""
    return f"sample{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))}{', …' * (len(rows) > 4)}"


def _sizes(tensor: Tensor) -> tuple[Tensor, float]:
    """Return the largest number of each sample, and that of the median sample; none where there are few, or it is 0."""
    is_dense = tensor.ndim and tensor.layout == torch.strided
    if is_dense and len(tensor) > 2 and tensor.numel() and tensor.dtype != torch.bool and not tensor.is_complex():
        sizes = tensor.detach().abs().reshape(len(tensor), -1).amax(1).double()
        if usual := sizes.median().item():
            return sizes, usual
    return torch.zeros(0), 0.0
