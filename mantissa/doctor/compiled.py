"""Whether torch.compile changes what the eager model computes."""

from __future__ import annotations

import torch
from torch.nn.modules.dropout import _DropoutNd

from mantissa.doctor.sweep import DIFFERS, OK, FormatTrial
from mantissa.finding import DIFFERENCE, FORWARD, Finding
from mantissa.step.compile import compile_in_place
from mantissa.step.step import Gradients, Replay, Step

ALLOWED = 8
"""Times that a compiled model may differ from the eager one by what that differs from the reference."""


def compiled_trial(step: Step) -> tuple[FormatTrial, list[Finding]]:
    """Take the step compiled, and compare its gradients with those of the eager model.

    Both round, but not alike: inductor's kernels keep in fp32 what eager rounds to 16 bits between two operators.
    """
    half = step.format.half
    eager = _without_dropout(step.as_run())
    noise = max(_difference(eager, _without_dropout(step.exact())), torch.finfo(half or torch.float32).eps / 2)
    difference = _difference(_compiled(step), eager)
    why = f"gradients differ from eager by {difference:.2g}, eager from {step.exact_dtype} by {noise:.2g}"
    agrees = difference <= ALLOWED * noise  # NaN does not
    trial = FormatTrial("inductor", status=OK if agrees else DIFFERS, why=why)
    finding = Finding(DIFFERENCE, FORWARD, "", trial.name, detail=why, cure=[step.remedies.eager])
    return trial, [] if agrees else [finding]


def _without_dropout(passes: Replay) -> Gradients:
    for module in passes.model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    passes.keep_attributes()
    return passes.true_gradients()


def _difference(found: Gradients, expected: Gradients) -> float:
    """Return the relative 2-norm of the difference of all gradients."""
    names = [name for name in expected if name]
    size = sum(expected[name].abs().square().sum() for name in names)
    squares = sum((found[name] - expected[name]).abs().square().sum() for name in names)
    return float((squares / size) ** 0.5) if size else 0.0


def _compiled(step: Step) -> Gradients:
    """Return the gradients of the compiled model. The switches are the run's; inductor draws eager's random numbers."""
    passes = step.as_run()
    mixed = bool(passes.fp32_modules or step.fp32_ops)
    torch._dynamo.reset()
    compile_in_place(passes.model, mixed=mixed, round_as_eager=step.round_as_eager, fallback_random=True)
    gradients = _without_dropout(passes)
    torch._dynamo.reset()
    return gradients
