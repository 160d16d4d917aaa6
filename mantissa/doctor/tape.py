"""What is not finite in a step, and what it was made from.

The first operator whose result is not finite is often harmless: healthy T5 computes log(0) in its relative positions,
healthy BERT casts masks to -inf, and both allocate memory that holds anything. So a tape is kept of all of them, and
the slice of it that matters begins at what a step must not harm (the loss, the gradients, the buffers) and goes back
from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mantissa.step.trace import PRODUCTS, Op, Site
from mantissa.tensors import finite, storage

UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that return memory as it is: it may hold anything, and does not matter before it is written."""
_MIXING = (*PRODUCTS, "native_layer_norm", "native_batch_norm")
"""Operators that spread an infinity over all that they return: no mask is meant for them."""


class Outside(NamedTuple):
    """A tensor that comes from outside of the step and is not finite: a weight, a buffer, data."""

    name: str
    tensor: Tensor
    in_batch: bool
    """Whether it is a tensor of the batch."""

    @property
    def is_mask(self) -> bool:
        """Whether all that is not finite is -inf."""
        return not bool((self.tensor.isnan() | (self.tensor == math.inf)).any())

    @property
    def rows(self) -> list[int]:
        """Indices along the first dimension at which it is not finite."""
        bad = ~self.tensor.detach().isfinite()
        return bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if bad.ndim else []


@dataclass(eq=False)
class Node:
    """An operator whose result was not finite."""

    number: int
    """Number among all operators of the passes, from 0: the same in every repetition."""
    index: int
    """Index of the result among those of the operator."""
    site: Site
    given: bool
    """Whether the infinities were asked for (a mask of -inf), and not computed."""
    sources: list[Node]
    """Operators that made its inputs that are not finite."""
    outside: list[Outside]
    """Inputs that are not finite and come from outside."""

    @property
    def computes(self) -> bool:
        """Whether it is the first computed operator of its chain."""
        return not self.given and all(source.given for source in self.sources)

    def roots(self) -> list[Outside]:
        """Return what is not finite outside and reached it through operators that only passed it on."""
        passed_on = (root for source in self.sources if source.given for root in source.roots())
        return list({root.name: root for root in [*self.outside, *passed_on]}.values())


class Tape:
    """Records operators with results that are not finite, and what they were made from; it visits a trace with lines.

    Results are known again by their storage: a view of one that is not finite leads to the operator that wrote it.

    Args:
        model: weights and buffers by name, to name those that are not finite.
        data: the batch's tensors by name.
    """

    def __init__(self, model: Iterable[tuple[str, Tensor]] = (), data: Iterable[tuple[str, Tensor]] = ()) -> None:
        model, data = list(model), list(data)
        self._names = {storage(tensor): name for name, tensor in [*model, *data]}
        self._weights = {storage(tensor) for _, tensor in model if isinstance(tensor, nn.Parameter)}
        self._data = {storage(tensor) for _, tensor in data}
        self.computed: list[Node] = []
        """Operators that computed something not finite from finite inputs, harmful or not."""
        self._written: dict[int, list[Node]] = {}
        """Operators by the storage that they wrote. Whatever is written whole replaces the entry, so the address of
        freed memory misleads nobody."""

    def visit(self, op: Op) -> None:
        """Record an operator."""
        read = {storage(tensor) for tensor in op.inputs}
        for index, result in enumerate(op.results):
            key = storage(result)
            if not op.is_mutable and key in read:  # a view has no new values
                continue

            # What is finite leads nowhere, nor does what is not written yet.
            if op.bare_name in UNWRITTEN or finite(result):
                if _is_whole(result):
                    self._written.pop(key, None)
                continue

            # What is not finite leads to what was, of its inputs and of what it changes in place.
            before = self._written.get(key, [])
            node = self._node(op, index, result)
            if op.is_mutable:
                node.sources += before
            if node.computes:
                self.computed.append(node)
            self._written[key] = [*([] if _is_whole(result) else before), node]

    def _node(self, op: Op, index: int, result: Tensor) -> Node:
        # Its inputs that are not finite: of another operator, or from outside.
        sources: list[Node] = []
        outside: list[Outside] = []
        wrong_outside = False
        for tensor in op.inputs:
            key = storage(tensor)
            if tensor is result or finite(tensor):
                continue
            if key in self._written:
                sources += self._written[key]
            else:
                outside.append(Outside(self._names.get(key, "the data"), tensor, key in self._data))
                wrong_outside |= key in self._weights or not outside[-1].is_mask

        # A mask is one that the code asks for, or one that was given and is only passed on.
        asked = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in tree_leaves((op.args, op.kwargs)))
        masked = bool(sources or outside) and all(source.given for source in sources) and not wrong_outside
        passed_on = masked and op.bare_name not in _MIXING
        given = (asked or passed_on) and not bool(result.isnan().any())
        return Node(op.number, index, op.site(result), given, sources, outside)

    def behind(self, outputs: Iterable[Tensor]) -> list[Node]:
        """Return the operators that wrote what is not finite in these tensors, and all that those were made from."""
        slice_: set[Node] = set()
        left = [node for tensor in outputs for node in self._written.get(storage(tensor), [])]
        while left:
            node = left.pop()
            if node not in slice_:
                slice_.add(node)
                left += node.sources
        return sorted(slice_, key=lambda node: (node.number, node.index))


def _is_whole(tensor: Tensor) -> bool:
    strided = tensor.layout == torch.strided
    return not strided or tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
