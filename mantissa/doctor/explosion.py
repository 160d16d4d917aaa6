"""Why training explodes, or learns nothing, in fp32 as well: the data, the loss, the optimizer's state, or its rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.doctor.finding import INPUT, MOMENT, RATE, SCALE, UNDERFLOW, UPDATE, Cure, Finding
from mantissa.doctor.outliers import find_outlier, without_outliers
from mantissa.formats import FP32
from mantissa.step.batch import Batch
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import Trace
from mantissa.tensors import moments

_EXPLODED = 10.0
"""Training explodes where the loss becomes so many times that of weights that stand still, and does not fall below half
of that again."""
_NO_PROGRESS, _CLEAR_PROGRESS = 0.03, 0.15
"""Of its size: training learns nothing if the loss falls by less than the first, and what lets it fall by more than
the second is the cause; by more than the first, of a training that rises by as much."""
_TWICE = 2.0
"""How many times as much a run that failed has to learn without the cause. A loss that rises to so many times that of
weights that stand still, though it comes back, needs a cause: then any more is enough."""
_FACTOR, _TINY = 16.0, 1e-3
"""From the first on a constant factor of the loss is tried as the cause; gradients below the second one, as a share of
the optimizer's eps, move no weight."""
SEARCH = "lower learning rates and other changes in fp32"
"""What is left out where there is no time to try them."""
_RATES = tuple(10.0**-power for power in range(1, 9))


def explosion(
    step: Step,
    batches: list[list[Batch]],
    exact: Tensor,
    goes_on: Callable[[], bool] = lambda: True,
    failed: bool = False,
) -> Finding | None:
    """Return why training explodes or learns nothing in the reference; None: it does neither, or nothing cures it.

    What is named was changed, and the same steps were trained again; of learning rates that is the best of those that
    are ten times lower each.

    Args:
        step: the first step.
        batches: the microbatches of each step.
        exact: the losses in the reference, fp64.
        goes_on: whether there is time for another training.
        failed: whether the run went wrong: then it is a cause, too, without which the steps learn twice as much.
    """
    # Most often it learns: then nothing is trained again.
    if not failed and not explodes(exact, exact[:1]) and _learned(exact, exact[:3]) > _CLEAR_PROGRESS:
        return None

    # It has no other cause where it learns beside weights that stand still.
    still = losses_of(Replay.reference(step.at_rate(0.0)), batches)
    grows = explodes(exact, still)
    share = 0.0 if grows else _learned(exact, still)
    clear = _NO_PROGRESS if share < -_NO_PROGRESS else _CLEAR_PROGRESS
    if not (grows or failed) and share > _NO_PROGRESS:
        return None
    # Chaos may end low by chance: what shot up on the way was no good training.
    shoots_up = bool((exact > _TWICE * still.abs()).any())
    as_much = share if shoots_up else _TWICE * share

    # What happens, in words.
    broken = (~exact.isfinite()).nonzero()
    peak = f" (at most {exact.max():.4g})" if grows or shoots_up else ""  # from which it may have come back
    last = f"{exact[-1]:.4g}{peak}" if not len(broken) else f"not finite at step {step.number + int(broken[0])}"
    went = f"in {dtype_name(step.exact_dtype)} the loss goes from {exact[0]:.4g} to {last} in {len(exact)} steps"

    # The first change after which it learns names the cause; of rates that after which it learns the most.
    best: Finding | None = None
    rises, most = False, share
    for cause in _causes(step, batches, grows):
        if not goes_on():
            rises = False  # as far as is known
            break
        losses = _without(cause, step, batches)
        least = 0.0 if grows or cause.kind == UNDERFLOW else max(clear, as_much)
        learned = -math.inf if explodes(losses, still) else _learned(losses, still)
        if learned > max(least, most if cause.kind == RATE else least):
            best, most = replace(cause, detail=f"{went}, and to {losses[-1]:.4g} {cause.detail}"), learned
            if cause.kind != RATE:
                return best
        elif cause.kind == RATE and 0 < learned < most:  # lower ones learn less still
            break
        rises |= grows and cause.kind == RATE and _learned(losses, still) < 0
    if best is not None or not rises:
        return best
    detail = f"{went}, and it rises with lower learning rates, too; {_RATES[-1]:g} times this one was tried last"
    return Finding(RATE, UPDATE, "", FP32.name, detail=detail)


def _causes(step: Step, batches: list[list[Batch]], grows: bool) -> Iterator[Finding]:
    """Yield what may be the cause, the likeliest first, each with the step without it."""
    # What the optimizer has kept of earlier steps.
    if step.moments:
        name, key, times = _largest_state(step)
        state = f"{key} of {name}"
        detail = (
            f"with a fresh state of the optimizer; the largest, {state}, is {times:.3g} times the gradient of this step"
        )
        cure = _cure(step.remedies.fresh_state, step.with_fresh_state())
        yield _cause(MOMENT, detail, cure, module=name.rpartition(".")[0], tensor=state)

    # Samples that are far larger than others.
    if grows and (sample := find_outlier(batch for microbatches in batches for batch in microbatches)):
        number = step.number + sample.batch // len(batches[0])
        detail = f"with usual samples in the place of such; in step {number}, {sample}"
        usual = step.with_microbatches(map(without_outliers, step.microbatches))
        cure = _cure(f"leave out {sample.place}, and others like it", usual, without_outliers)
        yield _cause(INPUT, detail, cure, tensor=sample.place)

    # A factor of the loss.
    yield from _factors(step, grows)

    # The learning rate.
    for rate in _RATES:
        cure = _cure(step.remedies.rate(rate), step.at_rate(rate))
        yield _cause(RATE, f"with {rate:g} times the learning rate", cure)


def _factors(step: Step, grows: bool) -> Iterator[Finding]:
    """Yield the loss, times a constant: too large for the optimizer, or gradients below its eps."""
    factor, line = _factor(Replay.reference(step))
    detail, cure = f"if the gradients are not multiplied by {factor:g}, as the loss is", "no factor in this line"
    gradients = Replay.exact(step).true_gradients() if step.eps and not grows else {}
    largest = max((gradient.abs().max().item() for name, gradient in gradients.items() if name), default=0.0)
    small = 0 < largest < step.eps
    if small and largest < factor * step.eps:  # a factor in a line is not the reason, or not the only one
        factor, line, cure = largest, "", f"multiply the loss by {1 / largest:.1g}, or a much lower eps"
        detail = f"if the loss is multiplied by {1 / largest:.1g}: its largest gradient is below eps = {step.eps:g}"
    if small or (grows and _FACTOR <= factor < math.inf):
        kind = UNDERFLOW if small and largest < _TINY * step.eps else SCALE
        yield _cause(kind, detail, _cure(cure, step.with_loss_times(1 / factor)), line=line)


def _cause(kind: str, detail: str, cure: Cure, module: str = "", tensor: str = "", line: str = "") -> Finding:
    return Finding(kind, UPDATE, module, FP32.name, detail=detail, tensor=tensor, line=line, candidates=(cure,))


def _cure(text: str, step: Step, data: Callable[[Batch], Batch] | None = None) -> Cure:
    return Cure(text, step, data=data, about="" if step.format.number is FP32 else "trained in fp32")


def _without(cause: Finding, step: Step, batches: list[list[Batch]]) -> Tensor:
    """Return the losses of a step without a cause, in the reference, fp64; they have the factor of the run's."""
    (cure,) = cause.candidates
    return step.loss_factor / cure.step.loss_factor * losses_of(Replay.exact(cure.step), cure.of(batches))


def losses_of(replay: Replay, batches: list[list[Batch]]) -> Tensor:
    """Train some steps, and return their losses, fp64."""
    return torch.tensor(replay.train(batches), dtype=torch.float64)


def _largest_state(step: Step) -> tuple[str, str, float]:
    """Return the parameter and the key of the state that is the largest beside the gradient, and how many times."""
    gradients = Replay.reference(step).run().gradients
    sizes = []
    for name, state in step.moments.items():
        gradient = gradients.get(name)
        if gradient is None or gradient.is_sparse:
            continue
        for key, value in moments(state, gradient).items():
            size = value.double().sqrt() if key.endswith("_sq") else value.double()
            sizes.append((size.norm().item() / max(gradient.double().norm().item(), 1e-30), key, name))
    times, key, name = max(sizes, default=(0.0, "", ""))
    return name, key, times


def _factor(replay: Replay) -> tuple[float, str]:
    """Return the constant that the code multiplies the mean loss by at last, and the line."""
    trace = Trace(replay.model, lines=True)
    node = replay.forward(trace).grad_fn
    constants = [getattr(node, f"_saved_{side}", None) for side in ("self", "other")]
    numbers = [abs(constant.item()) for constant in constants if constant is not None and constant.numel() == 1]
    if replay.step.sums_loss or node is None or len(numbers) != 1 or not numbers[0]:
        return 1.0, ""
    factor = {"MulBackward0": numbers[0], "DivBackward0": 1 / numbers[0]}.get(node.name(), 1.0)
    return factor, str(trace.line_of(node) or "")


def at_end(losses: Tensor) -> Tensor:
    """Return the last third of the losses, by whose mean trainings are compared."""
    return losses[-max(1, len(losses) // 3) :]


def _learned(losses: Tensor, still: Tensor) -> float:
    """Return by which share the last third of the losses is below that of weights that stand still."""
    last, other = at_end(losses).mean().item(), at_end(still).mean().item()
    return (other - last) / abs(other) if other else 0.0


def explodes(losses: Tensor, still: Tensor) -> bool:
    """Return whether losses grow far beyond those of weights that stand still, and stay there, or are not finite."""
    away, size = losses - still, still.abs().mean()
    grows = bool(away.max() > _EXPLODED * size) and bool(at_end(away).mean() > -size / 2)
    return grows or not bool(losses.isfinite().all())
