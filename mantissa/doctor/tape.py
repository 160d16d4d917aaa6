"""A tape of the operators whose results are not finite, and the slice of it that reaches what a step must not harm.

The first such operator is often harmless: healthy T5 computes log(0) in its relative positions, healthy BERT casts
masks to -inf, and both allocate memory that holds anything. So the slice begins at the harmed sinks (the loss, the
gradients, the buffers) and goes back from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mantissa.display import dtype_name
from mantissa.modules import ModuleTracer
from mantissa.places import Line
from mantissa.tensors import finite, tensors

UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that return memory as it is: it may hold anything, and does not matter before it is written."""
_MIXING = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "convolution",
    "native_layer_norm",
    "native_batch_norm",
)
"""Operators that spread an infinity over all that they return: no mask is meant for them."""
MASKED = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "log_softmax", "softmax")
"""Operators that masks of -inf are meant for; they are NaN where all is masked."""


class Operator(NamedTuple):
    """One operator that ran, and its result."""

    op: str
    module: str
    """Which ran it; an empty string: the model itself, or the loss."""
    direction: str
    dtype: str
    shape: tuple[int, ...]
    line: Line | None = None

    @classmethod
    def of(cls, func: Any, result: Tensor, modules: ModuleTracer) -> Operator:
        """Describe an operator while it runs."""
        name, shape = str(func).rpartition(".")[0], tuple(result.shape)
        return cls(name, *modules.place(), dtype_name(result.dtype), shape, modules.line())

    @property
    def name(self) -> str:
        """The operator's name without its namespace."""
        return self.op.removeprefix("aten.")


class Outside(NamedTuple):
    """A tensor that comes from outside of the step and is not finite: a weight, a buffer, data."""

    name: str
    tensor: Tensor

    @property
    def rows(self) -> list[int]:
        """The indices along the first dimension at which it is not finite."""
        bad = ~self.tensor.detach().isfinite()
        return bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if bad.ndim else []


@dataclass(eq=False)
class Node:
    """An operator whose result was not finite."""

    number: int
    """Among all operators of the passes, from 0: the same in every repetition."""
    operator: Operator
    given: bool
    """Whether the infinities were asked for (a mask of -inf), and not computed."""
    sources: list[Node] = field(default_factory=list)
    """What made its inputs that are not finite."""
    outside: list[Outside] = field(default_factory=list)
    """Inputs that are not finite and come from outside."""

    @property
    def computes(self) -> bool:
        """Whether it is the first computed operator of its chain."""
        return not self.given and all(source.given for source in self.sources)

    def roots(self) -> list[Outside]:
        """Return what is not finite outside and reached it through operators that only passed it on."""
        found = [*self.outside, *(each for source in self.sources if source.given for each in source.roots())]
        return list({each.name: each for each in found}.values())


class Tape(TorchDispatchMode):
    """Records operators with results that are not finite, and what they were made from.

    Results are found again by their storage: a view of one that is not finite leads to the operator that wrote it.

    Args:
        modules: of the model, entered.
        named: tensors from outside by name (weights, buffers, data), to name those that are not finite.
    """

    def __init__(self, modules: ModuleTracer, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__()
        self.modules = modules
        self.count = 0
        named = list(named)
        self._names = {storage(tensor): name for name, tensor in named}
        self._weights = {storage(tensor) for _, tensor in named if isinstance(tensor, nn.Parameter)}
        self.computed: list[Node] = []
        """Operators that computed something not finite from finite inputs, harmful or not."""
        self._written: dict[int, list[Node]] = {}
        """By storage. Whatever is written whole replaces the entry, so the address of freed memory misleads nobody."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        name = func.__name__.partition(".")[0]
        self.modules.line()
        inputs = tensors((args, kwargs))
        mutable = func._schema.is_mutable
        held = {storage(tensor) for tensor in inputs}
        for result in tensors(output):
            key = storage(result)
            if not mutable and key in held:  # a view has no new values
                continue
            if name in UNWRITTEN or finite(result):
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
        outside: list[Outside] = []
        wrong_outside = False
        for tensor in inputs:
            key = storage(tensor)
            if tensor is result or finite(tensor):
                continue
            if key in self._written:
                sources += self._written[key]
            else:
                outside.append(Outside(self._names.get(key, "the data"), tensor))
                # What is -inf may be a mask.
                wrong_outside |= key in self._weights or bool((tensor.isnan() | (tensor == math.inf)).any())
        asked = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in tree_leaves(arguments))
        passed = bool(sources or outside) and all(source.given for source in sources) and not wrong_outside
        passed = passed and func.__name__.partition(".")[0] not in _MIXING
        given = (asked or passed) and not bool(result.isnan().any())
        return Node(number, Operator.of(func, result, self.modules), given, sources, outside)

    def writers(self, tensor: Tensor) -> list[Node]:
        """Return the operators that wrote what is not finite in the storage of a tensor."""
        return self._written.get(storage(tensor), [])


def behind(nodes: Sequence[Node]) -> list[Node]:
    """Return these operators and all that they were made from, without infinities that were asked for, in order."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.sources
    return sorted(found, key=lambda node: node.number)


def chain(origin: Node, slice_: Sequence[Node]) -> list[Node]:
    """Return one way through the slice from an operator to the last one that it reaches, the shortest."""
    ways = {origin: [origin]}
    for node in slice_:
        sources = [source for source in node.sources if source in ways]
        if sources and node not in ways:
            ways[node] = [*ways[sources[-1]], node]
    return list(ways.values())[-1]


def storage(tensor: Tensor) -> int:
    """Return what a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
