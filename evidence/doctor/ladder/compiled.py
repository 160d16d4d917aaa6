"""The compiled rungs: whether torch.compile changes what the eager model computes, at which stage, in which block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from evidence.doctor.ladder.rungs import BREAKS, DIFFERS, LEFT_OUT, OK, Rung
from evidence.doctor.step.case import Case, CaseTrainer, Reference
from evidence.doctor.step.finding import DIFFERENCE, FORWARD, OVERFLOW, Finding

ALLOWED = 8
"""A compiled model may differ from the eager one by so many times what the eager one differs from the reference."""
_EMULATED = "inductor, rounding as eager"
_BACKENDS = ("aot_eager", "inductor", _EMULATED)


def compiled_rungs(case: Case, time_left: Callable[[], float]) -> tuple[list[Rung], list[Finding]]:
    """Take the step compiled, in stages, and compare its gradients with those of the eager model.

    Stages: ``aot_eager`` traces and runs torch's own kernels; ``inductor`` makes kernels, which keep in fp32 what eager
    rounds to 16 bits between two operators; then inductor with those roundings.
    """
    eager = _gradients(_without_dropout(_own(case)))
    wide = torch.float64 if case.config.precision.half is None else torch.float32
    reference = _gradients(_without_dropout(Reference(case, wide)))
    noise = max(_difference(eager, reference), torch.finfo(case.config.precision.half or torch.float32).eps / 2)
    result: list[Rung] = []
    for backend in _BACKENDS:
        if backend == _EMULATED and (case.config.precision.half is None or result[-1].status == OK):
            continue
        if time_left() <= 0:
            result.append(Rung(backend, lambda: _own(case), status=LEFT_OUT, why="left out: no time"))
            continue
        found = _difference(_compiled(case, backend), eager)
        rung = Rung(backend, lambda: _own(case), status=OK if found <= ALLOWED * noise else DIFFERS)
        if found != found or found == float("inf"):
            rung.status = BREAKS
        result.append(rung)
        rung.why = f"gradients differ from eager by {found:.2g}, eager from {wide} by {noise:.2g}"
    broken = next((rung for rung in result if rung.status in (BREAKS, DIFFERS)), None)
    if broken is None:
        return result, []
    module = _block(case, broken.name, eager, ALLOWED * noise, time_left)
    kind = DIFFERENCE if broken.status == DIFFERS else OVERFLOW
    cure = ["compile=off", f"report it to PyTorch: {broken.name} computes other numbers than eager"]
    return result, [Finding(kind, FORWARD, module, broken.name, detail=broken.why, cure=cure)]


def _own(case: Case) -> CaseTrainer:
    return case.trainer(case.config.precision, own=True, scale=case.scale)


def _without_dropout(trainer: CaseTrainer) -> CaseTrainer:
    for module in trainer.model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    return trainer


def _gradients(trainer: CaseTrainer) -> list[Tensor]:
    """Return the true gradients of the step, in fp64."""
    scale = trainer.case.scale if not isinstance(trainer, Reference) else 1.0
    found = trainer.attempt(scale)
    named, factor = trainer.sinks(found), found.correction / scale
    return [tensor.double() * factor for name, tensor in named.items() if name in trainer.case.weights]


def _difference(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the relative 2-norm of the difference of two lists of gradients."""
    squares = sum((a - b).square().sum() for a, b in zip(one, other, strict=True))
    size = sum(b.square().sum() for b in other)
    return float((squares / size) ** 0.5) if size else 0.0


@contextmanager
def _options(backend: str) -> Iterator[None]:
    """Let inductor draw eager's random numbers and, where asked, round as eager does."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(fallback_random=True, emulate_precision_casts=backend == _EMULATED):
        yield
    torch._dynamo.reset()


def _compiled(case: Case, backend: str, number: int | None = None) -> list[Tensor]:
    """Return the gradients with the modules that the run compiles, or with one block alone, compiled by a backend."""
    trainer = _without_dropout(_own(case))
    blocks = trainer.recipe.blocks(trainer.model)
    modules = trainer.config.parallel.compiled(trainer.model, blocks) if number is None else [blocks[number]]
    with _options(backend):
        for module in modules:
            module.compile(backend="aot_eager" if backend == "aot_eager" else "inductor")
        return _gradients(trainer)


def _block(case: Case, backend: str, eager: list[Tensor], allowed: float, time_left: Callable[[], float]) -> str:
    """Return the name of the first block that differs when it is compiled alone; an empty string: none was found."""
    trainer = _own(case)
    names = {id(module): name for name, module in trainer.model.named_modules()}
    for number, block in enumerate(trainer.recipe.blocks(trainer.model)):
        if time_left() > 0 and not _difference(_compiled(case, backend, number=number), eager) <= allowed:
            return names[id(block)]
    return ""
