"""Whether torch.compile changes what the eager model computes, at which stage, and in which block."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from mantissa.compile import compile_in_place
from mantissa.doctor.sweep import BREAKS, DIFFERS, LEFT_OUT, OK, FormatTrial
from mantissa.finding import DIFFERENCE, FORWARD, OVERFLOW, Finding
from mantissa.step import Gradients, Replay, Step

ALLOWED = 8
"""Times that a compiled model may differ from the eager one by what that differs from the reference."""


def compiled_trials(step: Step, goes_on: Callable[[], bool]) -> tuple[list[FormatTrial], list[Finding]]:
    """Take the step compiled, in two stages, and compare its gradients with those of the eager model.

    ``aot_eager`` traces and runs torch's own kernels; ``inductor`` makes kernels, which keep in fp32 what eager rounds
    to 16 bits between two operators. ``goes_on`` returns whether there is time for another.
    """
    half = step.format.half
    eager = _without_dropout(step.as_run())
    wide = torch.float64 if half is None else torch.float32
    noise = max(_difference(eager, _without_dropout(step.reference(wide))), torch.finfo(half or torch.float32).eps / 2)
    limit = ALLOWED * noise
    trials: list[FormatTrial] = []
    for backend in ("aot_eager", "inductor"):
        if not goes_on():
            trials.append(FormatTrial(backend, status=LEFT_OUT, why="left out: no time"))
            continue
        found = _difference(_compiled(step, backend), eager)
        status = OK if found <= limit else DIFFERS if math.isfinite(found) else BREAKS
        why = f"gradients differ from eager by {found:.2g}, eager from {wide} by {noise:.2g}"
        trials.append(FormatTrial(backend, status=status, why=why))
    broken = next((trial for trial in trials if trial.status in (BREAKS, DIFFERS)), None)
    if broken is None:
        return trials, []
    passes, module = step.as_run(), ""
    names = {id(block): name for name, block in passes.model.named_modules()}
    for number, block in enumerate(passes.built.blocks):  # the first one that differs when it is compiled alone
        if not module and goes_on() and not _difference(_compiled(step, broken.name, number), eager) <= limit:
            module = names[id(block)]
    kind = DIFFERENCE if broken.status == DIFFERS else OVERFLOW
    return trials, [Finding(kind, FORWARD, module, broken.name, detail=broken.why, cure=[step.remedies.eager])]


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


def _compiled(step: Step, backend: str, block: int | None = None) -> Gradients:
    """Return the gradients with the modules that the run compiles, or with one block alone, compiled by a backend.

    The switches are the run's; inductor draws eager's random numbers.
    """
    passes = step.as_run()
    modules: list[nn.Module] = passes.built.compiled if block is None else [passes.built.blocks[block]]
    mixed = bool(passes.fp32_modules or step.fp32_ops)
    torch._dynamo.reset()
    for module in modules:
        compile_in_place(module, backend, mixed=mixed, round_as_eager=step.round_as_eager, fallback_random=True)
    gradients = _without_dropout(passes)
    torch._dynamo.reset()
    return gradients
