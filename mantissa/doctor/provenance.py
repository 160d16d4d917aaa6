"""The cause of a step that is not finite: which operator, and what kind of fault it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mantissa.doctor.sweep import FP32, FP64
from mantissa.doctor.tape import Node, Operator, Tape, behind, chain, described
from mantissa.finding import DOMAIN, INPUT, OVERFLOW, UNDERFLOW, Finding
from mantissa.modules import ModuleTracer
from mantissa.step import Passes, tensors

_CANDIDATES = 12
"""Operators that are tried out, one pass each."""
_DEPTH = 12
"""Operators between a result that became 0 and the operator that divides by it, at most."""


def find(passes: Passes, format: str, opened: bool = False) -> Finding | None:
    """Return the fault that makes this step not finite; None: the step is finite, or not by an operator.

    The tape is sliced from the harmed sinks. Where the slice has several first operators, each is repaired alone (its
    results that are not finite become ±1), and the one without which the sinks are finite is the cause. Fused attention
    is looked into with torch's MATH kernel.

    Args:
        passes: of the step, at the loss scale that is not finite.
        format: of the finding.
        opened: whether the MATH kernel is in use.
    """
    modules = ModuleTracer(passes.model)
    named = [*passes.model.named_parameters(), *passes.model.named_buffers()]
    with modules, Tape(modules, named) as tape:
        found = passes.attempt()
    sinks = passes.sinks(found)
    harmed = passes.harmed(found)
    slice_ = behind([node for name in harmed for node in tape.writers(sinks[name])])
    if not slice_:
        return None
    starts = [node for node in slice_ if node.computes] or slice_[:1]
    cause, alone = _cause(passes, starts)
    path = _path(cause, slice_, harmed)

    def finding(kind: str, operator: Operator, detail: str) -> Finding:
        module, direction = operator.place
        result = operator.op, operator.dtype, operator.shape
        return Finding(kind, direction, module, format, *result, detail, path)

    if cause.outside:
        return finding(INPUT, cause, f"{', '.join(dict.fromkeys(cause.outside))} is not finite before the step")
    if "scaled_dot_product" in cause.op and not opened:
        with sdpa_kernel(SDPBackend.MATH):
            inside = find(passes, format, opened=True)
        if inside is not None:
            inside.detail += f"; inside {cause.op}, opened (fused kernels keep the scores in fp32)"
            return inside
    kind, detail = _kind(passes, modules, cause.number)
    if kind == DOMAIN and format not in (FP32, FP64) and (source := _flushed(passes, modules, cause.number)):
        return finding(UNDERFLOW, source, f"{source.lost}; {cause.op} then divides by 0 or takes a logarithm of it")
    if not alone:
        detail += f"; {len(starts)} operators are not finite independently of each other, this is the first"
    return finding(kind, cause, detail)


def absorbed(passes: Passes, errors: list[Finding]) -> list[Finding]:
    """Return errors of modules, those that are overflows named so: their infinities harm nothing, 1/inf is 0.

    Args:
        passes: in the run's own format, in which the step is finite.
        errors: of the kind ``ERROR``.
    """
    modules = ModuleTracer(passes.model)
    with modules, Tape(modules) as tape:
        passes.attempt()
    result = []
    for error in errors:
        node = next((node for node in tape.computed if node.place == (error.module, error.direction)), None)
        if node is not None:
            kind, detail = _kind(passes, modules, node.number)
            if kind == OVERFLOW:
                detail += "; infinities here become finite again, and wrong"
                error = replace(error, kind=kind, op=node.op, dtype=node.dtype, shape=node.shape, detail=detail)
        result.append(error)
    return result


def _cause(passes: Passes, starts: list[Node]) -> tuple[Node, bool]:
    """Return the operator whose repair alone makes the sinks finite; else the first, and False."""
    distinct = list({node.number: node for node in starts}.values())
    if len(distinct) == 1:
        return distinct[0], True
    for node in distinct[:_CANDIDATES]:
        with _At(node.number, _repair):
            found = passes.attempt()
        if not passes.harmed(found):
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


class _At(TorchDispatchMode):
    """Runs one operator, which has this number among all, in another way."""

    def __init__(self, number: int, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._left = number
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        return self._run(func, args, kwargs or {}) if self._left == -1 else func(*args, **(kwargs or {}))


def _numbers(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]


def _repair(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, and replace what is not finite in its results by ±1."""
    output = func(*args, **kwargs)
    for result in _numbers(output):
        result.copy_(torch.nan_to_num(result, nan=1.0, posinf=1.0, neginf=-1.0))
    return output


def _in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the floating-point results of an operator, computed in fp64 from the same inputs; none if it cannot be."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        return _numbers(func(*tree_map(wide, args), **tree_map(wide, kwargs)))
    except (RuntimeError, NotImplementedError):
        return []


def _kind(passes: Passes, modules: ModuleTracer, number: int) -> tuple[str, str]:
    """Return the kind of fault of an operator, computed again in fp64, and the numbers that say so."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def compare(func: Any, args: Any, kwargs: Any) -> Any:
        wide = _in_fp64(func, args, kwargs)
        output = func(*args, **kwargs)
        pairs.extend(zip([tensor.detach().clone() for tensor in _numbers(output)], wide, strict=False))
        return output

    with modules, _At(number, compare):
        passes.attempt()
    for low, wide in pairs:
        bad = ~torch.isfinite(low)
        if low.shape != wide.shape or not bool(bad.any()):
            continue
        reference = wide[bad]
        count = f"{int(bad.sum()):,} of {low.numel():,} elements"
        if bool(torch.isfinite(reference).all()):
            amax, largest = reference.abs().max().item(), torch.finfo(low.dtype).max
            return OVERFLOW, f"reference amax {amax:.6g} > {largest:.6g}, {count}"
        shown = sorted({f"{value:g}" for value in reference[~reference.isfinite()].tolist()})
        return DOMAIN, f"the reference is {', '.join(shown)} too, {count}"
    return DOMAIN, "the operator could not be computed again in fp64"


@dataclass
class _Flushed(Operator):
    """An operator, what its inputs were made by, and what became 0 in its result."""

    sources: list[_Flushed] = field(default_factory=list)
    lost: str = ""
    """What became 0, in words; empty: nothing."""


class _Flushes(TorchDispatchMode):
    """Follows all operators up to one, and notes where results became 0 that are not 0 in fp64."""

    def __init__(self, modules: ModuleTracer, last: int) -> None:
        super().__init__()
        self._modules = modules
        self._last = last
        self._count = 0
        self.end: _Flushed | None = None
        self._written: dict[int, _Flushed] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, self._count = self._count, self._count + 1
        if number > self._last:
            return func(*args, **kwargs)
        near = self._last - 8 * _DEPTH <= number < self._last and not func._schema.is_mutable
        wide = _in_fp64(func, args, kwargs) if near else []
        keys = [int(tensor.untyped_storage()._cdata) for tensor in tensors((args, kwargs))]
        output = func(*args, **kwargs)
        for position, result in enumerate(_numbers(output)):
            key = int(result.untyped_storage()._cdata)
            if key in keys and not func._schema.is_mutable:  # a view has no new values
                continue
            sources = list({id(s): s for k in keys if (s := self._written.get(k)) is not None}.values())
            operator = _Flushed(*described(number, func, result, self._modules), sources)
            if position < len(wide) and wide[position].shape == result.shape:
                lost = (result == 0) & (wide[position] != 0)
                if bool(lost.any()):
                    amax = wide[position][lost].abs().max().item()
                    operator.lost = f"{int(lost.sum()):,} of {lost.numel():,} up to {amax:.3g} became 0"
            self._written[key] = operator
            if number == self._last:
                self.end = operator
        return output


def _flushed(passes: Passes, modules: ModuleTracer, number: int) -> _Flushed | None:
    """Return the nearest operator before this one whose result became 0, where the reference is not 0."""
    with modules, _Flushes(modules, number) as flushes:
        passes.attempt()
    left = deque([(flushes.end, 0)] if flushes.end is not None else [])
    seen: set[int] = set()
    while left:
        operator, depth = left.popleft()
        if depth and operator.lost:
            return operator
        if id(operator) not in seen and depth < _DEPTH:
            seen.add(id(operator))
            left += [(source, depth + 1) for source in operator.sources]
    return None
