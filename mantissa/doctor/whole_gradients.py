"""Gradients of the whole step that a format has wrong: also by what no module computes, such as the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from mantissa.doctor.budget import Budget
from mantissa.doctor.data import rounded_away
from mantissa.doctor.finding import ERROR, Examined, Finding
from mantissa.doctor.module_errors import FACTOR, gradient_errors
from mantissa.doctor.random import without_dropout
from mantissa.step.step import Gradients, Step
from mantissa.step.trace import BACKWARD, FORWARD

_WRONG, _WRONG_LOSS = 0.5, 0.25
"""Relative errors from which on a gradient of the step, and its loss, are wrong."""
_SHARE = 1e-3
"""Share of the whole gradient's norm that a parameter's must have."""
_PERTURBATIONS = 2


def whole_gradients(step: Step, budget: Budget) -> Examined:
    """Compare the gradients of the whole step, and its loss, with those of the reference."""
    budget.expect(steps_in_memory=2)
    with without_dropout():
        reference = step.exact()
        exact = reference.true_gradients()
        rounding = dict.fromkeys(exact, 0.0)  # errors that it explains
        for seed in range(_PERTURBATIONS):
            (perturbed,) = reference.perturb(step.format.number.unit_roundoff, seed, [step.microbatches])
            for name, error in gradient_errors(reference.true_gradients(perturbed), exact).items():
                rounding[name] = max(rounding[name], error)
    return replace(_judged(exact, rounding, step), again=partial(_judged, exact, rounding))


def _judged(exact: Gradients, rounding: dict[str, float], step: Step) -> Examined:
    with without_dropout():
        errors = gradient_errors(step.as_run().true_gradients(), exact)
    total = math.hypot(*(gradient.norm().item() for name, gradient in exact.items() if name))
    limits = {name: max(_WRONG if name else _WRONG_LOSS, FACTOR * rounding[name]) for name in errors}
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
