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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mantissa.display import counted, dimensions, dtype_name, shortened
from mantissa.doctor.tape import UNWRITTEN
from mantissa.formats import NUMBERS, scaled_number
from mantissa.step.trace import BACKWARD, CAST, FORWARD, LOSS, Op, Trace, functional_name
from mantissa.tensors import numbers_in, relative_error, storage

_ATTENTION = "aten._scaled_dot_product_"
"""Operators whose further results are for the backward pass, some of them memory that nothing wrote."""
_NAMES = {number.dtype: number.name for number in reversed(NUMBERS.values()) if not number.scaled}  # fp32, not tf32
_COPIES = ("_to_copy", "clone", "contiguous", "copy_", "detach", "lift_fresh", "_unsafe_view")
"""Operators whose result has the values of an input, perhaps rounded."""


class Difference(NamedTuple):
    """The size of a difference between two tensors."""

    relative: float
    """L2 norm of the difference over that of run b's tensor, in fp64; NaN: that is 0, or there is no such number."""
    largest: float
    """Largest absolute difference of two elements; NaN: one is NaN, or there is no such number."""
    elements: int
    """Number of elements that differ."""
    of: int
    """Number of elements of run a's tensor."""
    formats: str = ""
    """``bf16 against fp32``, or both shapes; empty: they are the same."""

    def __str__(self) -> str:
        sizes = {"relative difference": self.relative, "largest": self.largest}
        parts = [f"{name} {size:.2g}" for name, size in sizes.items() if not math.isnan(size)]
        if not parts or 2 * self.elements < self.of:
            parts.append(f"{self.elements:,} of {counted(self.of, 'element')}")
        return ", ".join(parts) + (f" ({self.formats})" if self.formats else "")


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
    """Return the size of a difference, in fp64; whole numbers, such as ids, are only counted.

    Args:
        a: of the first run.
        b: of the second run.
        formats: the formats of both in words; empty: those of the tensors.
    """
    if a.shape != b.shape:
        shapes = f"{dimensions(a.shape)} against {dimensions(b.shape)}"
        return Difference(math.nan, math.nan, a.numel(), a.numel(), shapes)
    x, y = wide(a), wide(b)
    differ = int(((x != y) & ~(x.isnan() & y.isnan())).sum())
    formats = formats or _against(*(_NAMES.get(each.dtype, dtype_name(each.dtype)) for each in (a, b)))
    if not (a.is_floating_point() or a.is_complex()):
        return Difference(math.nan, math.nan, differ, x.numel(), formats)
    largest = (x - y).abs().max().item() if x.numel() else 0.0
    return Difference(relative_error(x, y), largest, differ, x.numel(), formats)


def _against(a: str, b: str) -> str:
    return "" if a == b else f"{a} against {b}"


def wide(tensor: Tensor) -> Tensor:
    """Return the elements on the host in fp64, complex numbers as pairs."""
    tensor = tensor.detach().cpu()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether all elements are equal, in whatever dtypes; NaN equals NaN."""
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
    if tensor.is_floating_point():
        narrow = tensor.float()
        tensor = (narrow if tensor.dtype != torch.float64 or torch.equal(narrow.double(), tensor) else tensor) + 0.0
    else:
        tensor = tensor.long()
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


def first_place(takings: tuple[Taking, Taking], models: tuple[nn.Module, nn.Module]) -> Place | None:
    """Return where two takes of a step part; None: nowhere.

    Args:
        takings: the step of both runs.
        models: of both runs.
    """
    # What both compute, beside each other; and the tensors of the first pair with other results.
    entries: list[list[Entry]] = []
    for taking, model in zip(takings, models, strict=True):
        taking(recorder := Recorder(model))
        entries.append(recorder.entries)
    pairs = matched(*entries)
    parted = next(((a, b) for a, b in pairs if a.results != b.results), None)
    if parted is None:
        return None
    probe = partial(_probed, takings, models)
    a, b = (each.kept for each in probe(parted))
    if a is None or b is None:  # a take does not repeat itself
        return None
    results = next((both for both in zip(a.results, b.results, strict=False) if not same(*both)), None)
    inputs = [_Input(*both) for both in zip(a.given, b.given, a.origins, b.origins, strict=False)]
    differing = [each for each in inputs if each.differs]

    # An input is another one already: an operator without a counterpart computed it, or a cast that one has.
    if (lone := _lone(entries, pairs, differing)) is not None:
        found, why = _left_by(lone, parted, pairs, models, probe)
        return Place(lone.by.direction, lone.by.module, lone.by.op, found, lone.why + why)
    why = "its inputs are equal"
    if differing:
        x, y, *origins = differing[0]
        casts = {side: origin.cast for side, origin in zip("ab", origins, strict=True) if origin.cast is not None}
        # Those to other formats, which autocast makes for this operator, are its own.
        if casts and (results is None or results[0].dtype == results[1].dtype):
            who = "both cast there" if len(casts) == 2 else f"{next(iter(casts))} alone casts there"
            return Place(*next(iter(casts.values())), CAST, difference(x, y), who)
        why = "its inputs differ by casts alone" if casts else "an input differs that no operator of the step computed"

    # Else it is this operator.
    if a.is_random and not differing:
        why += "; it draws random numbers, and the generators stand elsewhere"
    place = parted[0]
    formats = _formats(models, place.module, *results) if results and place.direction == FORWARD else ""
    return Place(place.direction, place.module, place.op, difference(*results, formats) if results else None, why)


def _probed(
    takings: tuple[Taking, Taking],
    models: tuple[nn.Module, nn.Module],
    both: tuple[Entry, Entry],
    call: tuple[str, int] | None = None,
) -> list[_Probe]:
    """Take both steps again, and keep the tensors of two entries, and of a module's call."""
    probes = [_Probe(model, entry.number, call) for model, entry in zip(models, both, strict=True)]
    for taking, probe in zip(takings, probes, strict=True):
        taking(probe)
    return probes


class _Input(NamedTuple):
    """An input of an operator in both takes, and how it came to be."""

    x: Tensor
    y: Tensor
    of_x: _Origin
    of_y: _Origin

    @property
    def differs(self) -> bool:
        return not (self.of_x.unwritten or self.of_y.unwritten or same(self.x, self.y))


class _Lone(NamedTuple):
    """An operator that one take alone runs, and that computed an input of what parts."""

    by: Entry
    given: _Input
    why: str


def _lone(entries: list[list[Entry]], pairs: list[tuple[Entry, Entry]], differing: list[_Input]) -> _Lone | None:
    """Return the operator without a counterpart that computed the first input that differs; None: there is none."""
    with_counterpart = [{entry.number for entry in side} for side in zip(*pairs, strict=True)]
    alone = [
        {entry.number: entry for entry in side if entry.number not in known}
        for side, known in zip(entries, with_counterpart, strict=True)
    ]
    for given in differing:
        for side, origin in enumerate((given.of_x, given.of_y)):
            if origin.number in alone[side]:
                by = alone[side][origin.number]
                beside = dict.fromkeys(entry.op for entry in alone[side].values() if entry.scope == by.scope)
                others = shortened([name for name in beside if name != by.op], 3)
                return _Lone(by, given, f"{'ab'[side]} alone runs it" + (f", and {others}" if others else ""))
    return None


def _left_by(
    lone: _Lone,
    parted: tuple[Entry, Entry],
    pairs: list[tuple[Entry, Entry]],
    models: tuple[nn.Module, nn.Module],
    probe: Callable[..., list[_Probe]],
) -> tuple[Difference | None, str]:
    """Return how far apart what counts of a lone operator is, and what that is, if it needs a word.

    That is what its module returns, or backward its weight's gradient: the inputs themselves may lack their scales.
    """
    by, (x, y, *_) = lone.by, lone.given
    if by.module == LOSS:
        return difference(x, y), ""
    if by.direction == FORWARD:
        probes = probe(parted, (by.module, by.call))
        returned = zip(probes[0].returned, probes[1].returned, strict=False)
        apart = next((both for both in returned if not same(*both)), None)
        return (difference(*apart, _formats(models, by.module, *apart)) if apart else difference(x, y)), ""
    weights = models[0].get_submodule(by.module).named_parameters("", False)
    owned = {f"{by.module}.{name}" for name, _ in weights}
    left = next((both for both in pairs if both[0].module in owned and both[0].results != both[1].results), None)
    if left is None:
        return None, ""
    gradients = [each.kept.results[0] for each in probe(left) if each.kept is not None]
    return difference(gradients[0], gradients[1]), f"; the difference is of the gradient of {left[0].module}"


def _formats(models: tuple[nn.Module, nn.Module], module: str, a: Tensor, b: Tensor) -> str:
    """Return the formats of a layer in both runs where one is scaled, which the dtypes of its results do not tell."""
    numbers = [scaled_number(model.get_submodule(module)) if module != LOSS else None for model in models]
    dtypes = [_NAMES.get(each.dtype, "") for each in (a, b)]
    names = [number.name if number else dtype for number, dtype in zip(numbers, dtypes, strict=True)]
    return _against(*names) if any(numbers) else ""
