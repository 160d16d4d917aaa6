"""Whether some steps in a format train worse than rounding explains."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.doctor.budget import Budget
from mantissa.doctor.cause import find_origin
from mantissa.doctor.course import Standard, leaves, seconds_to_train, steps_to_train
from mantissa.doctor.data import rounded_away
from mantissa.doctor.dtypes import NO_CAST, casts_in_update
from mantissa.doctor.explosion import SEARCH, at_end, explosion, losses_of
from mantissa.doctor.finding import DIVERGENCE, INPUT, LOST, UPDATE, Cure, Examined, Finding
from mantissa.doctor.limits import HARM, WRONG_LOSS
from mantissa.formats import FP32, Format, plain
from mantissa.step.batch import Batch
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import FORWARD
from mantissa.tensors import finite, relative_error

_MOVED = 0.5
"""Of its way in the reference: a weight that moves less, by updates below its spacing, has lost them."""


def divergence(step: Step, budget: Budget) -> Examined:
    """Train some steps as the run does, and in fp32 from weights and inputs changed by the format's rounding error.

    The run's format is at fault where its loss leaves ``4 x`` the spread of the fp32 losses for three steps in a row,
    or where it loses a quarter of what fp32 from the very same weights and inputs has learned: where rounding alone
    destroys what a model has to tell apart, the spread says nothing. What explodes in fp32, too, has another cause.
    """
    count = steps_to_train(step)
    budget.expect(seconds=count * seconds_to_train(step, budget))
    batches = step.following(count)

    # What explodes, learns nothing or breaks in the reference, too, is no matter of the format.
    standard = Standard(step, batches)
    exact = standard.exact
    if finding := explosion(step, batches, exact, lambda: budget.goes_on(SEARCH)):
        return Examined(findings=(finding,), again=_is_known)
    if not exact.isfinite().all():
        broken = _first_infinite(exact)
        later = _broken_later(step, batches, broken, plain(FP32))
        return Examined(findings=(later,) if later else (), again=_is_known)

    # The format's losses, beside how far rounding alone takes those of the reference.
    return replace(_judged(standard, step), again=partial(_judged, standard))


def _is_known(_: Step) -> Examined:
    """Find nothing: whether what fp32 shows is gone is known by training with the cure."""
    return Examined()


def _judged(standard: Standard, step: Step) -> Examined:
    """Train as a step says, and compare the losses with the standard's."""
    # Where the loss leaves the spread, or what is learned is lost.
    batches, exact, (middle, limit) = standard.batches, standard.exact, standard.spread
    replay = Replay.as_run(step)
    losses = losses_of(replay, batches)
    alone = step.format.number is FP32
    first = leaves(losses, middle, limit)
    if alone and not losses.isfinite().all():
        first = _first_infinite(losses)

    worse = standard.is_worse(losses, step)
    if first is None and not worse:
        return Examined()

    # A first loss that is off by little, while gradients are right and the model learns, does no harm.
    if first == 0 and not worse and ((losses - middle).abs() < WRONG_LOSS * middle.abs())[0]:
        low, wide = (
            torch.cat([gradient.flatten() for gradient in side.true_gradients().values()][:-1])  # without the loss
            for side in (Replay.as_run(step), Replay.exact(step))
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
        detail = (
            f"in {len(losses)} steps the loss goes from {exact[0]:.4g} to {at_end(exact).mean():.4g} in "
            f"{dtype_name(step.exact_dtype)}, and to {at_end(losses).mean():.4g} here"
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
    replay = Replay.in_format(step, format) if format else Replay.as_run(step)
    replay.train(batches[:count])
    later = replay.after(count)
    broken = Replay.in_format(later, format) if format else Replay.as_run(later)
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
