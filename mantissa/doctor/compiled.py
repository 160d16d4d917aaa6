"""Whether torch.compile changes what the eager model computes, at which stage, and in which block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.compile import compile_in_place
from mantissa.doctor.sweep import BREAKS, DIFFERS, LEFT_OUT, OK, FormatTrial
from mantissa.finding import DIFFERENCE, FORWARD, OVERFLOW, Finding
from mantissa.step import Replay, Step
from mantissa.tensors import in_dtype

ALLOWED = 8
"""A compiled model may differ from the eager one by so many times what the eager one differs from the reference."""
_EMULATED = "inductor, rounding as eager"
_BACKENDS = ("aot_eager", "inductor", _EMULATED)


def compiled_trials(step: Step, time_left: Callable[[], float]) -> tuple[list[FormatTrial], list[Finding]]:
    """Take the step compiled, in stages, and compare its gradients with those of the eager model.

    Stages: ``aot_eager`` traces and runs torch's own kernels; ``inductor`` makes kernels, which keep in fp32 what eager
    rounds to 16 bits between two operators; then inductor with those roundings.
    """
    half = step.format.half
    eager = _gradients(step.as_run())
    wide = torch.float64 if half is None else torch.float32
    noise = max(_difference(eager, _gradients(step.reference(wide))), torch.finfo(half or torch.float32).eps / 2)
    trials: list[FormatTrial] = []
    for backend in _BACKENDS:
        if backend == _EMULATED and (half is None or step.round_as_eager or trials[-1].status == OK):
            continue
        if time_left() <= 0:
            trials.append(FormatTrial(backend, status=LEFT_OUT, why="left out: no time"))
            continue
        found = _difference(_compiled(step, backend), eager)
        status = OK if found <= ALLOWED * noise else DIFFERS if found < float("inf") else BREAKS
        why = f"gradients differ from eager by {found:.2g}, eager from {wide} by {noise:.2g}"
        trials.append(FormatTrial(backend, status=status, why=why))
    broken = next((trial for trial in trials if trial.status in (BREAKS, DIFFERS)), None)
    if broken is None:
        return trials, []
    module = _first_block(step, broken.name, eager, ALLOWED * noise, time_left)
    kind = DIFFERENCE if broken.status == DIFFERS else OVERFLOW
    cure = [step.remedies.eager]
    return trials, [Finding(kind, FORWARD, module, broken.name, detail=broken.why, cure=cure)]


def _gradients(passes: Replay) -> list[Tensor]:
    """Return the true gradients of the step without dropout, in fp64."""
    passes.drop_dropout()
    found = passes.run()
    factor = found.correction / passes.scale
    return [in_dtype(gradient, torch.float64) * factor for gradient in found.gradients.values()]


def _difference(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the relative 2-norm of the difference of two lists of gradients."""
    squares = sum((a - b).square().sum() for a, b in zip(one, other, strict=True))
    size = sum(b.square().sum() for b in other)
    return float((squares / size) ** 0.5) if size else 0.0


def _compiled(step: Step, backend: str, block: int | None = None) -> list[Tensor]:
    """Return the gradients with the modules that the run compiles, or with one block alone, compiled by a backend.

    The switches are the run's; inductor draws eager's random numbers and, where asked, rounds as eager does.
    """
    passes = step.as_run()
    modules: list[nn.Module] = passes.built.compiled if block is None else [passes.built.blocks[block]]
    emulated = step.round_as_eager or backend == _EMULATED
    options: dict[str, Any] = {"mixed": bool(passes.fp32_modules or step.fp32_ops), "round_as_eager": emulated}
    torch._dynamo.reset()
    for module in modules:
        compile_in_place(module, backend.partition(",")[0], **options, fallback_random=True)
    gradients = _gradients(passes)
    torch._dynamo.reset()
    return gradients


def _first_block(step: Step, backend: str, eager: list[Tensor], allowed: float, time_left: Callable[[], float]) -> str:
    """Return the name of the first block that differs when it is compiled alone; an empty string: none was found."""
    passes = step.as_run()
    names = {id(module): name for name, module in passes.model.named_modules()}
    for number, block in enumerate(passes.built.blocks):
        if time_left() > 0 and not _difference(_compiled(step, backend, number), eager) <= allowed:
            return names[id(block)]
    return ""
