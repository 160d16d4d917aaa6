"""A tape of the operators whose results are not finite, and the slice of it that reaches what a step must not harm.

The first such operator is often harmless: healthy T5 computes log(0) in its relative positions, healthy BERT casts
masks to -inf, and both allocate memory that holds anything. So the slice begins at the harmed sinks (the loss, the
gradients, the buffers) and goes back from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mantissa.display import dtype_name
from mantissa.modules import ModuleTracer
from mantissa.step import finite, tensors

_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that return memory as it is: it may hold anything, and does not matter before it is written."""


@dataclass
class Operator:
    """One operator that ran."""

    number: int
    """Among all operators of the passes, from 0: the same in every repetition."""
    op: str
    place: tuple[str, str]
    """The module and the direction."""
    dtype: str
    shape: tuple[int, ...]


def described(
    number: int, func: Any, result: Tensor, modules: ModuleTracer
) -> tuple[int, str, tuple[str, str], str, tuple[int, ...]]:
    """Return the fields of an ``Operator`` with this result, while it runs."""
    return number, str(func).rpartition(".")[0], modules.place(), dtype_name(result.dtype), tuple(result.shape)


@dataclass
class Node(Operator):
    """An operator whose result was not finite."""

    given: bool
    """Whether the infinities were asked for (a mask of -inf), and not computed."""
    sources: list[Node] = field(default_factory=list)
    """What made its inputs that are not finite."""
    outside: list[str] = field(default_factory=list)
    """Inputs that are not finite and come from outside: weights, buffers, data."""

    @property
    def module(self) -> str:
        """Which ran it; an empty string: the model itself, or the loss."""
        return self.place[0]

    @property
    def computes(self) -> bool:
        """Whether it is the first computed operator of its chain."""
        return not self.given and all(source.given for source in self.sources)


class Tape(TorchDispatchMode):
    """Records operators with results that are not finite, and what they were made from.

    Results are found again by their storage: a view of one that is not finite leads to the operator that wrote it.

    Args:
        modules: of the model, entered.
        named: tensors from outside by name (weights, buffers), to name those that are not finite.
    """

    def __init__(self, modules: ModuleTracer, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__()
        self.modules = modules
        self.count = 0
        named = list(named)
        self._names = {_storage(tensor): name for name, tensor in named}
        self._weights = {_storage(tensor) for _, tensor in named if isinstance(tensor, nn.Parameter)}
        self.computed: list[Node] = []
        """Operators that computed something not finite from finite inputs, harmful or not."""
        self._written: dict[int, list[Node]] = {}
        """By storage. Whatever is written whole replaces the entry, so the address of freed memory misleads nobody."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        name = func.__name__.partition(".")[0]
        inputs = tensors((args, kwargs))
        mutable = func._schema.is_mutable
        held = {_storage(tensor) for tensor in inputs}
        for result in tensors(output):
            key = _storage(result)
            if not mutable and key in held:  # a view has no new values
                continue
            if name in _UNWRITTEN or finite(result):
                if _whole(result):
                    self._written.pop(key, None)
                continue
            node = self._node(number, func, result, inputs, (args, kwargs))
            before = self._written.get(key, [])
            if mutable:  # what was not finite before it was changed in place
                node.sources += before
            if node.computes:
                self.computed.append(node)
            self._written[key] = [*([] if _whole(result) else before), node]
        return output

    def _node(self, number: int, func: Any, result: Tensor, inputs: list[Tensor], arguments: Any) -> Node:
        sources: list[Node] = []
        outside: list[str] = []
        wrong_outside = False
        for tensor in inputs:
            key = _storage(tensor)
            if tensor is result or finite(tensor):
                continue
            if key in self._written:
                sources += self._written[key]
            else:
                outside.append(self._names.get(key, "the data"))
                wrong_outside |= key in self._weights or bool(tensor.isnan().any())  # a buffer may be a mask
        asked = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in tree_leaves(arguments))
        passed = bool(sources or outside) and all(source.given for source in sources) and not wrong_outside
        given = (asked or passed) and not bool(result.isnan().any())
        return Node(*described(number, func, result, self.modules), given, sources, outside)

    def writers(self, tensor: Tensor) -> list[Node]:
        """Return the operators that wrote what is not finite in the storage of a tensor."""
        return self._written.get(_storage(tensor), [])


def behind(nodes: Sequence[Node]) -> list[Node]:
    """Return these operators and all that they were made from, without infinities that were asked for, in order."""
    found: dict[int, Node] = {}
    left = list(nodes)
    while left:
        node = left.pop()
        if id(node) not in found:
            found[id(node)] = node
            left += node.sources
    return sorted(found.values(), key=lambda node: node.number)


def chain(origin: Node, slice_: Sequence[Node]) -> list[Node]:
    """Return one way through the slice from an operator to the last one that it reaches, the shortest."""
    before: dict[int, Node | None] = {id(origin): None}
    last = origin
    for node in slice_:
        sources = [source for source in node.sources if id(source) in before]
        if sources and id(node) not in before:
            before[id(node)] = sources[-1]
            last = node
    way: list[Node] = []
    step: Node | None = last
    while step is not None:
        way.append(step)
        step = before[id(step)]
    return way[::-1]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
