"""The cause of a step that is not finite: which operator, and what kind of fault it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from evidence.doctor.provenance.flushes import flushed, in_fp64
from evidence.doctor.provenance.tape import Node, Operator, Tape, behind, chain, tensors
from evidence.doctor.step.case import CaseTrainer
from evidence.doctor.step.finding import DOMAIN, INPUT, OVERFLOW, UNDERFLOW, Finding
from evidence.doctor.step.modules import ModuleTracer

_CANDIDATES = 12
"""Operators that are tried out, one pass each."""


def find(trainer: CaseTrainer, rung: str, opened: bool = False) -> Finding | None:
    """Return the fault that makes this step of a trainer not finite; None: the step is finite, or not by an operator.

    The tape is sliced from the harmed sinks. Where the slice has several first operators, each is repaired alone (its
    results that are not finite become ±1), and the one without which the sinks are finite is the cause. Fused attention
    is looked into with torch's MATH kernel; ``opened``: it is in use.
    """
    modules = ModuleTracer(trainer.model)
    named = [*trainer.model.named_parameters(), *trainer.model.named_buffers()]
    with modules, Tape(modules, named) as tape:
        found = trainer.attempt()
    sinks = trainer.sinks(found)
    harmed = trainer.harmed(found)
    slice_ = behind([node for name in harmed for node in tape.writers(sinks[name])])
    if not slice_:
        return None
    starts = [node for node in slice_ if node.computes] or slice_[:1]
    cause, alone = _cause(trainer, starts)
    path = _path(cause, slice_, harmed)
    if cause.outside:
        detail = f"{', '.join(dict.fromkeys(cause.outside))} is not finite before the step"
        return Finding(INPUT, *_place(cause), rung, cause.op, cause.dtype, cause.shape, detail, path)
    if "scaled_dot_product" in cause.op and not opened:
        with sdpa_kernel(SDPBackend.MATH):
            inside = find(trainer, rung, opened=True)
        if inside is not None:
            inside.detail += f"; inside {cause.op}, opened (fused kernels keep the scores in fp32)"
            return inside
    capture = Capture(cause.number)
    with modules, capture:
        trainer.attempt()
    kind, detail = capture.kind()
    if kind == DOMAIN and rung not in ("fp32", "fp64") and (source := flushed(trainer, modules, cause.number)):
        why = f"{source.detail}; {cause.op} then divides by 0 or takes a logarithm of it"
        return Finding(UNDERFLOW, *_place(source), rung, source.op, source.dtype, source.shape, why, path)
    if not alone:
        detail += f"; {len(starts)} operators are not finite independently of each other, this is the first"
    return Finding(kind, *_place(cause), rung, cause.op, cause.dtype, cause.shape, detail, path)


def _place(operator: Operator) -> tuple[str, str]:
    """Return the direction and the module of an operator, in the order of a finding's fields."""
    module, direction = operator.place
    return direction, module


def absorbed(trainer: CaseTrainer, errors: list[Finding]) -> list[Finding]:
    """Return errors of modules, those that are overflows named so: their infinities harm nothing, 1/inf is 0.

    Args:
        trainer: of the run's own precision, in which the step is finite.
        errors: of the kind ``ERROR``.
    """
    modules = ModuleTracer(trainer.model)
    with modules, Tape(modules) as tape:
        trainer.attempt()
    result = []
    for error in errors:
        place = error.module, error.direction
        node = next((node for node in tape.computed if node.place == place), None)
        if node is not None:
            capture = Capture(node.number)
            with modules, capture:
                trainer.attempt()
            kind, detail = capture.kind()
            if kind == OVERFLOW:
                detail += "; infinities here become finite again, and wrong"
                error = replace(error, kind=kind, op=node.op, dtype=node.dtype, shape=node.shape, detail=detail)
        result.append(error)
    return result


def _cause(trainer: CaseTrainer, starts: list[Node]) -> tuple[Node, bool]:
    """Return the operator whose repair alone makes the sinks finite; else the first, and False."""
    distinct = list({node.number: node for node in starts}.values())
    if len(distinct) == 1:
        return distinct[0], True
    for node in distinct[:_CANDIDATES]:
        with Repair(node.number):
            found = trainer.attempt()
        if not trainer.harmed(found):
            return node, True
    return distinct[0], False


def _path(cause: Node, slice_: list[Node], harmed: list[str]) -> list[str]:
    """Return what the fault passes through: the modules, or operators outside of them, and at last a sink."""
    names = [node.module or node.op.removeprefix("aten.") for node in chain(cause, slice_)[1:]]
    names = [name for number, name in enumerate(names) if number == 0 or names[number - 1] != name]
    if len(names) > 4:
        names = [*names[:2], "…", names[-1]]
    gradients = [name for name in harmed if name != "loss"]
    sink = "loss" if "loss" in harmed else f"gradient of {gradients[0]}" if gradients else harmed[0]
    return [*names, sink]


class Repair(TorchDispatchMode):
    """Replaces what is not finite in the result of one operator by ±1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.count == self.number:
            for result in tensors(output):
                if result.is_floating_point():
                    result.copy_(torch.nan_to_num(result, nan=1.0, posinf=1.0, neginf=-1.0))
        self.count += 1
        return output


class Capture(TorchDispatchMode):
    """Computes one operator again in fp64, from the inputs that it had."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.count = 0
        self.low: list[Tensor] = []
        self.wide: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.count == self.number:
            self.wide = in_fp64(func, args, kwargs)
        output = func(*args, **kwargs)
        if self.count == self.number:
            self.low = [tensor.detach().clone() for tensor in tensors(output) if tensor.is_floating_point()]
        self.count += 1
        return output

    def kind(self) -> tuple[str, str]:
        """Return the kind of fault, and the numbers that say so."""
        for low, wide in zip(self.low, self.wide, strict=False):
            bad = ~torch.isfinite(low)
            if low.shape != wide.shape or not bool(bad.any()):
                continue
            reference = wide[bad]
            count = f"{int(bad.sum()):,} of {low.numel():,} elements"
            largest = torch.finfo(low.dtype).max
            if bool(torch.isfinite(reference).all()):
                amax = reference.abs().max().item()
                return OVERFLOW, f"reference amax {amax:.6g} > {largest:.6g}, {count}"
            shown = sorted({f"{value:g}" for value in reference[~reference.isfinite()].tolist()})
            return DOMAIN, f"the reference is {', '.join(shown)} too, {count}"
        return DOMAIN, "the operator could not be computed again in fp64"
