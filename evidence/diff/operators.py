"""The first operator whose results part, in two takes of a step.

A take notes a digest of what each operator computes, so neither step is in memory twice. Two takes are then aligned:

1. by the call of a module (in the backward pass by the module, as autograd knows no calls),
2. in it by the longest common sequence of the operators' kinds. Views, copies and casts are left out, since autocast
   makes them in one setting only, and values are compared as numbers: what was only cast exactly is equal.

What parts in the order of the first take is the first pair with other results. If one of its inputs has other values
already, an operator without a counterpart computed it (another kernel, a line that one recipe lacks), or a cast that
one setting alone has: the way back goes by the storage that an operator wrote, and names that one. Only the tensors of
this pair are kept, in a second take of both.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mantissa.display import counted, dimensions, dtype_name, shortened
from mantissa.doctor.tape import UNWRITTEN
from mantissa.formats import scaled_number
from mantissa.step.trace import BACKWARD, CAST, FORWARD, LOSS, Op, Trace, functional_name
from mantissa.tensors import numbers_in, relative_error, storage

_ATTENTION = "aten._scaled_dot_product_"
"""Operators whose further results are for the backward pass, some of them memory that nothing wrote."""
_COPIES = ("_to_copy", "clone", "contiguous", "copy_", "detach", "lift_fresh", "_unsafe_view")
"""Operators whose result has the values of an input, perhaps rounded."""


class Difference(NamedTuple):
    """The size of a difference between two tensors."""

    relative: float
    """L2 norm of the difference over that of run b's tensor, in fp64; NaN: that is 0, or the shapes differ."""
    largest: float
    """Largest absolute difference of two elements; NaN: the shapes differ, or one is NaN."""
    elements: int
    """Number of elements that differ."""
    of: int
    """Number of elements of run a's tensor."""
    formats: str = ""
    """``bfloat16 against float32``, or both shapes; empty: they are the same."""

    def __str__(self) -> str:
        size = f"relative difference {self.relative:.2g}, largest {self.largest:.2g}, "
        size = f"{size if math.isfinite(self.relative) else ''}{self.elements:,} of {counted(self.of, 'element')}"
        return f"{size} ({self.formats})" if self.formats else size


class Place(NamedTuple):
    """Where two takes of a step part."""

    direction: str
    module: str
    """Name of the module, empty: the model itself; of a gradient that of the weight."""
    op: str
    difference: Difference | None
    why: str
    """What is known of its inputs, or of the operators around it."""


def difference(a: Tensor, b: Tensor, formats: str = "") -> Difference:
    """Return the size of a difference, in fp64."""
    if a.shape != b.shape:
        shapes = f"{dimensions(a.shape)} against {dimensions(b.shape)}"
        return Difference(math.nan, math.nan, a.numel(), a.numel(), shapes)
    x, y = wide(a), wide(b)
    if not formats and a.dtype != b.dtype:
        formats = f"{dtype_name(a.dtype)} against {dtype_name(b.dtype)}"
    differ = (x != y) & ~(x.isnan() & y.isnan())
    largest = (x - y).abs().max().item() if x.numel() else 0.0
    return Difference(relative_error(x, y), largest, int(differ.sum()), x.numel(), formats)


def wide(tensor: Tensor) -> Tensor:
    """Return the elements on the host in fp64, complex numbers as pairs."""
    tensor = tensor.detach().cpu()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether all elements have the same values, of which NaN is one, whatever their dtypes are."""
    if a.shape != b.shape:
        return False
    if a.dtype == b.dtype and a.device == b.device and torch.equal(a, b):
        return True
    x, y = wide(a), wide(b)
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


# --- the takes ---


class Entry(NamedTuple):
    """An operator that computed, or a loss or a gradient that it left."""

    number: int
    """Number among all operators and values of the take."""
    direction: str
    module: str
    call: int
    """Number of the module's call, from 0; in the backward pass 0."""
    op: str
    results: tuple[tuple[tuple[int, ...], bytes], ...]
    """Shapes of the results, with digests of their values."""

    @property
    def scope(self) -> tuple[str, str, int]:
        """What it is aligned in."""
        return self.direction, self.module, self.call


class Take(Trace):
    """Sees a step, and tells the calls of a module apart."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, self._visit_op, run=self._run_op, returned=self._returned_from)
        self._calls: Counter[str] = Counter()
        """Calls of a module that have ended."""

    def scope(self, op: Op) -> tuple[str, str, int]:
        """Return direction, module and call of the operator that runs now."""
        module, direction = op.place
        if direction == BACKWARD:
            return direction, module, 0
        module = module if self._stack else LOSS
        return direction, module, self._calls[module]

    def value(self, direction: str, name: str, what: str, tensor: Tensor) -> None:
        """See a value that operators have left: a loss, a gradient."""
        with _disable_current_modes():
            self._visit_value(self.count, direction, name, what, tensor)
        self.count += 1

    def _visit_value(self, number: int, direction: str, name: str, what: str, tensor: Tensor) -> None:
        """See a value."""

    def _run_op(self, op: Op) -> Any:
        return op.run()

    def _visit_op(self, op: Op) -> None:
        """See an operator after it ran."""

    def _returned_from(self, name: str, module: nn.Module, result: Any) -> None:
        self._calls[name] += 1


class Recorder(Take):
    """Notes all entries of a step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.entries: list[Entry] = []

    def _visit_value(self, number: int, direction: str, name: str, what: str, tensor: Tensor) -> None:
        self.entries.append(Entry(number, direction, name, 0, what, _digests([tensor])))

    def _visit_op(self, op: Op) -> None:
        if op.computes and op.bare_name not in UNWRITTEN:
            self.entries.append(Entry(op.number, *self.scope(op), op.name, _digests(_results(op))))


def _results(op: Op) -> list[Tensor]:
    """Return what is compared of an operator's results."""
    results = numbers_in(op.result) or op.results
    return results[:1] if op.name.startswith(_ATTENTION) and not op.name.endswith("backward") else results


def _digests(tensors: Iterable[Tensor]) -> tuple[tuple[tuple[int, ...], bytes], ...]:
    return tuple((tuple(tensor.shape), _digest(tensor)) for tensor in tensors)


def _digest(tensor: Tensor) -> bytes:
    """Return a hash of the values, the same in any dtype that holds them and for both signs of 0."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not tensor.is_floating_point():
        tensor = tensor.long()
    elif tensor.dtype != torch.float64 or torch.equal((narrow := tensor.float()).double(), tensor):
        tensor = tensor.float() if tensor.dtype != torch.float64 else narrow
    if tensor.is_floating_point():
        tensor = tensor + 0.0
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().data, digest_size=16).digest()


# --- the alignment ---


def matched(a: list[Entry], b: list[Entry]) -> list[tuple[Entry, Entry]]:
    """Return the pairs of entries that are each other's counterparts, in the order of the first take."""
    scopes: defaultdict[tuple[str, str, int], tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for side, entries in enumerate((a, b)):
        for entry in entries:
            scopes[entry.scope][side].append(entry)
    pairs: list[tuple[Entry, Entry]] = []
    for of_a, of_b in scopes.values():
        kinds_a, kinds_b = ([functional_name(entry.op) for entry in entries] for entries in (of_a, of_b))
        if kinds_a == kinds_b:
            pairs += zip(of_a, of_b, strict=True)
            continue
        for block in SequenceMatcher(None, kinds_a, kinds_b, autojunk=False).get_matching_blocks():
            pairs += zip(of_a[block.a :][: block.size], of_b[block.b :][: block.size], strict=True)
    return sorted(pairs)


# --- the place ---


class _Origin(NamedTuple):
    """How a tensor came to be."""

    number: int | None = None
    """Number of the operator that computed it; None: it comes from outside of the step."""
    cast: tuple[str, str] | None = None
    """Direction and module of the last cast since; None: there was none."""
    unwritten: bool = False
    """Whether it is memory that nothing wrote."""


class _Kept(NamedTuple):
    """The tensors of an entry, on the host."""

    given: list[Tensor]
    origins: list[_Origin]
    results: list[Tensor]
    is_random: bool


class _Probe(Take):
    """Keeps the tensors of one entry, and the results of one call of a module."""

    def __init__(self, model: nn.Module, number: int, call: tuple[str, int] | None = None) -> None:
        super().__init__(model)
        self.kept: _Kept | None = None
        """Tensors of the entry; None: it did not come."""
        self.returned: list[Tensor] = []
        """Floating-point tensors that the call returned."""
        self._number, self._call = number, call
        self._origins: dict[int, _Origin] = {}
        """By storage. Whatever is computed replaces the entry, so the address of freed memory misleads nobody."""

    def _visit_value(self, number: int, direction: str, name: str, what: str, tensor: Tensor) -> None:
        if number == self._number:
            self.kept = _Kept([_copy(tensor)], [self._origin(tensor)], [_copy(tensor)], False)

    def _run_op(self, op: Op) -> Any:
        if op.number != self._number:
            return op.run()
        given, origins = [_copy(tensor) for tensor in op.inputs], [self._origin(tensor) for tensor in op.inputs]
        op.result = op.run()
        is_random = torch.Tag.nondeterministic_seeded in op.func.tags
        self.kept = _Kept(given, origins, [_copy(tensor) for tensor in _results(op)], is_random)
        return op.result

    def _visit_op(self, op: Op) -> None:
        if op.is_view:
            return
        origin = _Origin(op.number, unwritten=op.bare_name in UNWRITTEN)
        if op.bare_name in _COPIES and op.inputs:  # it has the origin of what it copies
            copied = op.inputs[-1]
            origin = self._origin(copied)
            if any(result.dtype != copied.dtype for result in op.results):
                origin = origin._replace(cast=self.scope(op)[:2])
        for result in op.results:
            self._origins[storage(result)] = origin

    def _returned_from(self, name: str, module: nn.Module, result: Any) -> None:
        if (name, self._calls[name]) == self._call:
            with _disable_current_modes():
                self.returned = [_copy(tensor) for tensor in numbers_in(result)]
        super()._returned_from(name, module, result)

    def _origin(self, tensor: Tensor) -> _Origin:
        return self._origins.get(storage(tensor), _Origin())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


Taking = Callable[[Take], None]
"""Takes a step under a trace, each time from the same state."""


def first_place(take_a: Taking, take_b: Taking, model_a: nn.Module, model_b: nn.Module) -> Place | None:
    """Return where two takes of a step part; None: nowhere.

    Args:
        take_a: the step of the first run.
        take_b: the step of the second run.
        model_a: of the first run.
        model_b: of the second run.
    """
    recorders = Recorder(model_a), Recorder(model_b)
    take_a(recorders[0])
    take_b(recorders[1])
    entries = recorders[0].entries, recorders[1].entries
    pairs = matched(*entries)
    parted = next(((a, b) for a, b in pairs if a.results != b.results), None)
    if parted is None:
        return None

    def probed(call: tuple[str, int] | None = None) -> tuple[_Probe, _Probe]:
        probes = _Probe(model_a, parted[0].number, call), _Probe(model_b, parted[1].number, call)
        take_a(probes[0])
        take_b(probes[1])
        return probes

    kept = [probe.kept for probe in probed()]
    if kept[0] is None or kept[1] is None:  # the takes do not repeat themselves
        return None

    # Is an input another one already? Then by an operator that one take alone has, or by a cast.
    known = [{entry.number for entry in side} for side in zip(*pairs, strict=True)]
    inputs = list(zip(kept[0].given, kept[1].given, kept[0].origins, kept[1].origins, strict=False))
    differing = [
        (x, y, origins) for x, y, *origins in inputs if not (same(x, y) or any(each.unwritten for each in origins))
    ]
    for x, y, origins in differing:
        for side, origin in enumerate(origins):
            alone = [entry for entry in entries[side] if entry.number not in known[side]]
            by = next((entry for entry in alone if entry.number == origin.number), None)
            if by is None:
                continue
            there = [entry.op for entry in alone if entry.scope == by.scope]
            others = shortened([name for name in dict.fromkeys(there) if name != by.op], 3)
            why = f"{'ab'[side]} alone runs it" + (f", and {others}" if others else "")
            found = difference(x, y)
            if by.direction == FORWARD and by.module != LOSS:
                probes = probed((by.module, by.call))
                returned = zip(probes[0].returned, probes[1].returned, strict=False)
                formats = _formats(model_a, model_b, by.module)
                found = next((difference(x, y, formats) for x, y in returned if not same(x, y)), found)
            return Place(by.direction, by.module, by.op, found, why)

    a = parted[0]
    results = next((both for both in zip(kept[0].results, kept[1].results, strict=False) if not same(*both)), None)
    why = "its inputs are equal"
    if differing:
        x, y, origins = differing[0]
        casts = {side: origin.cast for side, origin in zip("ab", origins, strict=True) if origin.cast is not None}
        if casts and (results is None or results[0].dtype == results[1].dtype):
            who = " and ".join(casts)
            return Place(
                *next(iter(casts.values())),
                CAST,
                difference(x, y),
                f"{who} {'casts' if len(casts) < 2 else 'cast'} there",
            )
        outside = all(origin.number is None for origin in origins) and not casts
        why = (
            "an input differs that no operator of the step computed" if outside else "its inputs differ by casts alone"
        )
    elif kept[0].is_random:
        why += "; it draws random numbers, and the generators stand elsewhere"
    formats = _formats(model_a, model_b, a.module) if a.direction == FORWARD else ""
    return Place(a.direction, a.module, a.op, difference(*results, formats) if results else None, why)


def _formats(model_a: nn.Module, model_b: nn.Module, module: str) -> str:
    """Return the scaled format of a layer in one run against that in the other; empty: both are the same."""
    if module == LOSS:
        return ""
    numbers = [scaled_number(model.get_submodule(module)) for model in (model_a, model_b)]
    names = [number.name if number else "not scaled" for number in numbers]
    return "" if names[0] == names[1] else " against ".join(names)
