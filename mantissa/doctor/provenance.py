"""The cause of a step that is not finite: which operator, and what kind of fault it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mantissa.display import dtype_name
from mantissa.doctor.samples import far, without, worth_a_word
from mantissa.doctor.sweep import FP32, FP64
from mantissa.doctor.tape import MASKED, UNWRITTEN, Node, Operator, Tape, behind, chain, storage
from mantissa.finding import DOMAIN, FORWARD, INPUT, OVERFLOW, UNDERFLOW, Finding
from mantissa.modules import ModuleTracer
from mantissa.step import Replay, batch_key, map_tensors
from mantissa.tensors import numbers_in, tensors

_CANDIDATES = 12
"""Operators that are tried out, one pass each."""
_DEPTH = 96
"""Operators before one that divides by 0, among which one is looked for whose result became 0."""


def find(passes: Replay, format: str, opened: bool = False) -> Finding | None:
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
    data = [(batch_key(name), tensor) for batch in passes.microbatches for name, tensor in batch.items()]
    known = [*passes.model.named_parameters(), *passes.model.named_buffers(), *data]
    with modules, Tape(modules, known) as tape:
        found = passes.run()
    slice_ = behind([node for name in found.nonfinite for node in tape.writers(found.outputs[name])])
    if not slice_:
        return None
    starts = [node for node in slice_ if node.computes] or slice_[:1]
    cause, alone = _cause(passes, starts)
    path = _path(cause, slice_, found.nonfinite)

    def finding(kind: str, at: Operator, detail: str) -> Finding:
        line = str(at.line or "")
        return Finding(kind, at.direction, at.module, format, at.op, at.dtype, at.shape, detail, path, line=line)

    operator = cause.operator
    masks = [each for each in cause.roots() if not (each.tensor.isnan() | (each.tensor == math.inf)).any()]
    if cause.roots() and (len(masks) < len(cause.roots()) or operator.name not in MASKED):
        return _of_input(passes, cause, finding(INPUT, operator, ""))
    if "scaled_dot_product" in operator.op and not opened:
        with sdpa_kernel(SDPBackend.MATH):
            inside = find(passes, format, opened=True)
        if inside is not None:
            inside.detail += f"; inside {operator.op}, opened (fused kernels keep the scores in fp32)"
            return inside
    kind, detail = _kind(passes, modules, cause.number)
    if kind == DOMAIN and format not in (FP32, FP64) and (source := _flushed(passes, modules, cause.number)):
        flushed, lost = source
        return finding(UNDERFLOW, flushed, f"{lost}; {operator.op} then divides by 0 or takes a logarithm of it")
    if masks:
        detail += f"; {masks[0].name} masks all of it in rows {', '.join(map(str, masks[0].rows[:4]))}"
    if kind == OVERFLOW and operator.direction == FORWARD:
        sample = far(passes.microbatches)
        if format == FP32 and sample is not None and _finite_without(passes):
            result = finding(INPUT, operator, f"{detail}; {sample}")
            result.module, result.tensor = "", sample.place
            result.cure = [f"leave out {sample.place}: with a usual sample in its place, the step is finite"]
            return result
        detail += worth_a_word(passes.microbatches)
    if not alone:
        detail += f"; {len(starts)} operators are not finite independently of each other, this is the first"
    return finding(kind, operator, detail)


def _finite_without(passes: Replay) -> bool:
    """Return whether the step is finite with usual samples in the place of those that are far larger."""
    own = passes.microbatches
    passes.microbatches = list(map(without, own))
    try:
        return not passes.run().nonfinite
    finally:
        passes.microbatches = own


def _of_input(passes: Replay, cause: Node, finding: Finding) -> Finding:
    """Name the tensor and the sample that is not finite before the step, with a cure that was tried."""
    outside = min(cause.roots(), key=lambda each: not each.name.startswith("batch"))
    name, rows = outside.name, outside.rows
    bad = int((~outside.tensor.detach().isfinite()).sum())
    stored = f"{dtype_name(outside.tensor.dtype)}, " if outside.tensor.dtype.itemsize == 2 else ""
    finding.detail = f"{name} ({stored}{bad:,} of {outside.tensor.numel():,} elements) is not finite before the step"
    finding.module, finding.tensor = ("", name) if name.startswith("batch") else (name.rpartition(".")[0], name)
    batches, own, buffers = passes.microbatches, passes.weights, dict(passes.step.buffers)
    size = len(outside.tensor) if outside.tensor.ndim else 0
    if name.startswith("batch") and 0 < len(rows) < size:
        samples = f"sample{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))}{', …' * (len(rows) > 4)}"
        finding.tensor += f", {samples}"
        left = [row for row in range(size) if row not in rows]
        passes.microbatches = [
            map_tensors(batch, lambda tensor: tensor[left] if tensor.shape[:1] == (size,) else tensor)
            for batch in batches
        ]
        cure = f"leave out {samples} of {name}: without, the step is finite"
    else:
        cure = f"finite values in {name}: with zeros in their place, the step is finite"
        passes.microbatches = [map_tensors(batch, _without_infinities) for batch in batches]
        passes.weights = {key: _without_infinities(tensor) for key, tensor in own.items()}
        passes.step.buffers.update({key: _without_infinities(tensor) for key, tensor in passes.step.buffers.items()})
    with suppress(RuntimeError):  # a batch of another size
        finding.cure = [] if passes.run().nonfinite else [cure]
    passes.microbatches, passes.weights = batches, own
    passes.step.buffers.update(buffers)
    return finding


def _without_infinities(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor


def absorbed(passes: Replay, errors: list[Finding]) -> list[Finding]:
    """Return errors of modules, those that are overflows named so: their infinities harm nothing, 1/inf is 0.

    Args:
        passes: in the run's own format, in which the step is finite.
        errors: of the kind ``ERROR``.
    """
    modules = ModuleTracer(passes.model)
    with modules, Tape(modules) as tape:
        passes.run()
    result = []
    for error in errors:
        place = error.module, error.direction
        node = next((each for each in tape.computed if (each.operator.module, each.operator.direction) == place), None)
        if node is not None:
            kind, detail = _kind(passes, modules, node.number)
            if kind == OVERFLOW:
                at, detail = node.operator, f"{detail}; infinities here become finite again, and wrong"
                error = replace(error, kind=kind, op=at.op, dtype=at.dtype, shape=at.shape, detail=detail)
        result.append(error)
    return result


def _cause(passes: Replay, starts: list[Node]) -> tuple[Node, bool]:
    """Return the operator whose repair alone makes the sinks finite; else the first, and False."""
    distinct = list({node.number: node for node in starts}.values())
    if len(distinct) == 1:
        return distinct[0], True
    for node in distinct[:_CANDIDATES]:
        with _At(node.number, _repair):
            found = passes.run()
        if not found.nonfinite:
            return node, True
    return distinct[0], False


def _path(cause: Node, slice_: list[Node], nonfinite: list[str]) -> list[str]:
    """Return what the fault passes through: the modules, or operators outside of them, and at last a sink."""
    if cause.operator.direction == FORWARD and "loss" in nonfinite:
        slice_ = [node for node in slice_ if node.operator.direction == FORWARD]
    operators = [node.operator for node in chain(cause, slice_)[1:]]
    names = [name for name, _ in groupby(each.module or each.op.removeprefix("aten.") for each in operators)]
    if len(names) > 4:
        names = [*names[:2], "…", names[-1]]
    gradients = [name for name in nonfinite if name != "loss"]
    sink = "loss" if "loss" in nonfinite else f"gradient of {gradients[0]}" if gradients else nonfinite[0]
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


def _repair(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, and replace what is not finite in its results by ±1."""
    output = func(*args, **kwargs)
    for result in numbers_in(output):
        result.copy_(torch.nan_to_num(result, nan=1.0, posinf=1.0, neginf=-1.0))
    return output


def _in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the floating-point results of an operator, computed in fp64 from the same inputs; none if it cannot be."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        return numbers_in(func(*tree_map(wide, args), **tree_map(wide, kwargs)))
    except (RuntimeError, NotImplementedError):
        return []


def _kind(passes: Replay, modules: ModuleTracer, number: int) -> tuple[str, str]:
    """Return the kind of fault of an operator, computed again in fp64, and the numbers that say so."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def compare(func: Any, args: Any, kwargs: Any) -> Any:
        wide = _in_fp64(func, args, kwargs)
        output = func(*args, **kwargs)
        pairs.extend(zip([tensor.detach().clone() for tensor in numbers_in(output)], wide, strict=False))
        return output

    with modules, _At(number, compare):
        passes.run()
    for low, wide in pairs:
        bad = ~torch.isfinite(low)
        if low.shape != wide.shape or not bool(bad.any()):
            continue
        reference = wide[bad]
        count = f"{int(bad.sum()):,} of {low.numel():,} elements"
        if bool(torch.isfinite(reference).all()):
            amax, largest = reference.abs().max().item(), torch.finfo(low.dtype).max
            if amax <= largest:
                return OVERFLOW, f"an intermediate result overflows; the reference has at most {amax:.6g}, {count}"
            return OVERFLOW, f"reference amax {amax:.6g} > {largest:.6g}, {count}"
        shown = sorted({f"{value:g}" for value in reference[~reference.isfinite()].tolist()})
        return DOMAIN, f"the reference is {', '.join(shown)} too, {count}"
    return DOMAIN, "the operator could not be computed again in fp64"


class _Flushes(TorchDispatchMode):
    """Keeps the last operators up to one: what each reads and writes, and what became 0 that is not 0 in fp64."""

    def __init__(self, modules: ModuleTracer, last: int) -> None:
        super().__init__()
        self._modules = modules
        self._last = last
        self._number = -1
        self.operators: list[tuple[Operator, set[int], int, str]] = []
        """With the storages that are read, the one that is written, and what became 0 in words; empty: nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._number += 1
        self._modules.line()
        if not self._last - _DEPTH <= self._number <= self._last:
            return func(*args, **kwargs)
        changes = func._schema.is_mutable
        wide = [] if changes or self._number == self._last else _in_fp64(func, args, kwargs)
        read = {storage(tensor) for tensor in tensors((args, kwargs))}
        output = func(*args, **kwargs)
        for result, exact in zip_longest(numbers_in(output), wide):
            unwritten = func.__name__.partition(".")[0] in UNWRITTEN
            if result is None or unwritten or (storage(result) in read and not changes):  # a view has no new values
                continue
            lost = ""
            if exact is not None and exact.shape == result.shape and bool((zero := (result == 0) & (exact != 0)).any()):
                amax = exact[zero].abs().max().item()
                lost = f"{int(zero.sum()):,} of {zero.numel():,} up to {amax:.3g} became 0"
            operator = Operator.of(func, result, self._modules)
            self.operators.append((operator, read, storage(result), lost))
        return output


def _flushed(passes: Replay, modules: ModuleTracer, number: int) -> tuple[Operator, str] | None:
    """Return the last operator before this one, and behind it, in whose result something became 0, and what."""
    with modules, _Flushes(modules, number) as flushes:
        passes.run()
    *before, (_, needed, _, _) = flushes.operators
    for operator, read, written, lost in reversed(before):
        if written in needed:
            if lost:
                return operator, lost
            needed = needed - {written} | read
    return None
