"""Gradients of the whole step that a format has wrong: also by what no module computes, such as the loss."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mantissa.doctor.budget import Budget
from mantissa.doctor.cures import cast_cures
from mantissa.doctor.data import rounded_away
from mantissa.doctor.finding import ERROR, Examined, Finding
from mantissa.doctor.limits import WRONG_LOSS
from mantissa.doctor.module_errors import FACTOR, gradient_errors
from mantissa.doctor.random import without_dropout
from mantissa.step.replay import Gradients, Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, FORWARD
from mantissa.tensors import relative_error

_WRONG = 0.5
"""Relative error from which on a gradient of the step is wrong."""
_SHOWN = 3
"""Lines of a note, at most."""
_SHARE = 1e-3
"""Share of the whole gradient's norm that a parameter's must have."""
_PERTURBATIONS, _OF_LOSS = 2, 8
"""Perturbed steps that say what rounding explains: of the loss, one number that may change little by chance, more."""


def whole_gradients(step: Step, budget: Budget) -> Examined:
    """Compare the gradients of the whole step, and its loss, with those of the reference."""
    seconds = (1 + _PERTURBATIONS) * budget.fp64_seconds if step.format.half is None else 0
    budget.expect(seconds, steps_in_memory=2)
    with without_dropout():
        reference = Replay.exact(step)
        exact = reference.true_gradients()
        rounding = dict.fromkeys(exact, 0.0)  # errors that it explains
        low = gradient_errors(Replay.as_run(step).true_gradients(), exact)
        for seed in range(_OF_LOSS if low[""] > WRONG_LOSS else _PERTURBATIONS):
            if seed >= _PERTURBATIONS and not budget.goes_on("perturbations of the loss"):
                break
            (perturbed,) = reference.perturb(step.unit_roundoff, seed, [step.microbatches])
            for name, error in gradient_errors(reference.true_gradients(perturbed), exact).items():
                rounding[name] = max(rounding[name], error)
    examined = _judged(exact, rounding, step)
    notes = _mended_loss(step, exact, low[""]) if low[""] > WRONG_LOSS and not examined.findings else ()
    return replace(examined, notes=notes, again=partial(_judged, exact, rounding))


def _mended_loss(step: Step, exact: Gradients, error: float) -> tuple[str, ...]:
    """Return a note where casts of the code make a loss wrong, though rounding explains it, too; empty: none do."""
    lines, other = [str(cure.at["line"]) for cure in cast_cures(step)], step
    for line in lines:
        other = other.without_casts(line)
    left = math.inf
    with without_dropout(), suppress(RuntimeError):  # a layer may need the cast
        left = relative_error(Replay.as_run(other).run().loss, exact[""]) if lines else math.inf
    without = f"without the casts to 16 bits in {'; '.join(lines[:_SHOWN])}"
    mends = left < min(error / 4, WRONG_LOSS)
    return (f"the loss has a relative error of {error:.2g}, and of {left:.2g} {without}",) if mends else ()


def _judged(exact: Gradients, rounding: dict[str, float], step: Step) -> Examined:
    with without_dropout():
        errors = gradient_errors(Replay.as_run(step).true_gradients(), exact)
    total = math.hypot(*(gradient.norm().item() for name, gradient in exact.items() if name))
    limits = {name: max(_WRONG if name else WRONG_LOSS, FACTOR * rounding[name]) for name in errors}
    wrong = {
        name: error / limits[name]
        for name, error in errors.items()
        if error > limits[name] and (not name or float(exact[name].norm()) > _SHARE * total)
    }
    if not wrong:
        return Examined()
    worst = max(wrong, key=wrong.__getitem__)
    what = f"the gradient of {worst}" if worst else "the loss"
    detail = f"{what} has a relative error of {errors[worst]:.2g}; rounding explains {rounding[worst]:.2g}"
    detail += rounded_away(step)
    return Examined(findings=(Finding(ERROR, BACKWARD if worst else FORWARD, "", step.format.name, detail=detail),))
