"""Whether torch.compile changes what the eager model computes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.modules.dropout import _DropoutNd

from mantissa.doctor.budget import Budget
from mantissa.doctor.finding import DIFFERENCE, Cure, Examined, Finding
from mantissa.doctor.sweep import DIFFERS, OK, FormatTrial
from mantissa.step.compile import compile_in_place
from mantissa.step.replay import Gradients, Replay
from mantissa.step.step import Step
from mantissa.step.trace import FORWARD

ALLOWED = 8
"""Times that a compiled model may differ from the eager one by what that differs from the reference."""


def compiled(step: Step, budget: Budget) -> Examined:
    """Take the step compiled, and compare its gradients with those of the eager model; its row is a ``FormatTrial``.

    Both round, but not alike: inductor's kernels keep in fp32 what eager rounds to 16 bits between two operators.
    """
    if not step.compiles:
        return Examined()
    half = step.format.half
    budget.expect(0 if half else budget.fp64_seconds)
    eager = _without_dropout(Replay.as_run(step))
    noise = max(_difference(eager, _without_dropout(Replay.exact(step))), torch.finfo(half or torch.float32).eps / 2)
    difference = _difference(_compiled(step), eager)
    why = f"gradients differ from eager by {difference:.2g}, eager from {step.exact_dtype} by {noise:.2g}"
    agrees = difference <= ALLOWED * noise  # NaN does not
    trial = FormatTrial("inductor", status=OK if agrees else DIFFERS, why=why)
    cure = Cure(step.remedies.eager, replace(step, compiles=False))
    finding = Finding(DIFFERENCE, FORWARD, "", trial.name, detail=why, candidates=(cure,))
    return Examined(rows=(trial,), findings=() if agrees else (finding,))


def _without_dropout(replay: Replay) -> Gradients:
    for module in replay.model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    replay.keep_attributes()
    return replay.true_gradients()


def _difference(gradients: Gradients, expected: Gradients) -> float:
    """Return the relative 2-norm of the difference of all gradients."""
    names = [name for name in expected if name]
    size = sum(expected[name].abs().square().sum() for name in names)
    squares = sum((gradients[name] - expected[name]).abs().square().sum() for name in names)
    return float((squares / size) ** 0.5) if size else 0.0


def _compiled(step: Step) -> Gradients:
    """Return the gradients of the compiled model. The switches are the run's; inductor draws eager's random numbers."""
    replay = Replay.as_run(step)
    mixed = bool(replay.fp32_modules or step.fp32_ops)
    torch._dynamo.reset()
    compile_in_place(replay.model, mixed=mixed, round_as_eager=step.round_as_eager, fallback_random=True)
    gradients = _without_dropout(replay)
    torch._dynamo.reset()
    return gradients
