"""Results that became 0 in a narrow format, before something divides by them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from evidence.doctor.provenance.tape import Operator, described, tensors
from evidence.doctor.step.case import CaseTrainer
from evidence.doctor.step.modules import ModuleTracer

_DEPTH = 12
"""Operators between a result that became 0 and the operator that divides by it, at most."""


def in_fp64(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the floating-point results of an operator, computed in fp64 from the same inputs; none if it cannot be."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        output = func(*tree_map(wide, args), **tree_map(wide, kwargs))
    except (RuntimeError, NotImplementedError):
        return []
    return [tensor for tensor in tensors(output) if tensor.is_floating_point()]


@dataclass
class Flushed(Operator):
    """An operator, what its inputs were made by, and what became 0 in its result."""

    sources: list[Flushed] = field(default_factory=list)
    detail: str = ""
    """Empty: nothing became 0."""


class _Flushes(TorchDispatchMode):
    """Follows all operators up to one, and notes where results became 0 that are not 0 in fp64."""

    def __init__(self, modules: ModuleTracer, last: int) -> None:
        super().__init__()
        self.modules = modules
        self.last = last
        self.count = 0
        self.end: Flushed | None = None
        self._written: dict[int, Flushed] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, self.count = self.count, self.count + 1
        near = self.last - 8 * _DEPTH <= number < self.last and not func._schema.is_mutable
        wide = in_fp64(func, args, kwargs) if near else []
        inputs = tensors((args, kwargs))
        keys = [int(tensor.untyped_storage()._cdata) for tensor in inputs]
        output = func(*args, **kwargs)
        if number > self.last:
            return output
        results = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
        for position, result in enumerate(results):
            key = int(result.untyped_storage()._cdata)
            if key in keys and not func._schema.is_mutable:
                continue
            sources = list({id(s): s for k in keys if (s := self._written.get(k)) is not None}.values())
            step = Flushed(*described(number, func, result, self.modules), sources)
            if position < len(wide) and wide[position].shape == result.shape:
                lost = (result == 0) & (wide[position] != 0)
                if bool(lost.any()):
                    amax = wide[position][lost].abs().max().item()
                    step.detail = f"{int(lost.sum()):,} of {lost.numel():,} up to {amax:.3g} became 0"
            self._written[key] = step
            if number == self.last:
                self.end = step
        return output


def flushed(trainer: CaseTrainer, modules: ModuleTracer, number: int) -> Flushed | None:
    """Return the nearest operator before this one whose result became 0, where the reference is not 0."""
    with modules, _Flushes(modules, number) as flushes:
        trainer.attempt()
    left = deque([(flushes.end, 0)] if flushes.end is not None else [])
    seen: set[int] = set()
    while left:
        step, depth = left.popleft()
        if depth and step.detail:
            return step
        if id(step) not in seen and depth < _DEPTH:
            seen.add(id(step))
            left += [(source, depth + 1) for source in step.sources]
    return None
