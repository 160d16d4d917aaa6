"""The cause of a step that is not finite, or that raises: which operator, at which line, and what kind of fault it is.

The first operator whose result is not finite is often harmless: healthy T5 computes log(0) in its relative positions,
healthy BERT casts masks to -inf, and both allocate memory that holds anything. So a tape is kept of all of them, and
the slice of it that matters begins at what a step must not harm (the loss, the gradients, the buffers) and goes back
from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from operator import itemgetter
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from mantissa.display import dtype_name
from mantissa.doctor.outliers import find_outlier, samples, without_outliers
from mantissa.errors import described
from mantissa.finding import BACKWARD, DOMAIN, EXCEPTION, FORWARD, INPUT, OVERFLOW, UNDERFLOW, Finding
from mantissa.formats import FP16
from mantissa.step.step import Batch, Replay, Step, batch_key, map_tensors
from mantissa.step.trace import CAST, PRODUCTS, Op, Trace, line_of_exception
from mantissa.tensors import finite, numbers_in, storage

UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that return memory as it is: it may hold anything, and does not matter before it is written."""
_MIXING = (*PRODUCTS, "native_layer_norm", "native_batch_norm")
"""Operators that spread an infinity over all that they return: no mask is meant for them."""
_MASKED = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "log_softmax", "softmax")
"""Operators that masks of -inf are meant for; they are NaN where all is masked."""
_CANDIDATES = 12
"""Operators that are tried out, one pass each."""
_SAMPLES = 4
"""Samples that are named as the cause, at most: more are the model's matter."""
_DEPTH = 96
"""Operators before one that divides by 0, among which one is looked for whose result became 0."""


class Outside(NamedTuple):
    """A tensor that comes from outside of the step and is not finite: a weight, a buffer, data."""

    name: str
    tensor: Tensor

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
    at: Finding
    """Where it ran, and its result."""
    given: bool
    """Whether the infinities were asked for (a mask of -inf), and not computed."""
    sources: list[Node] = field(default_factory=list)
    """Operators that made its inputs that are not finite."""
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


class Tape:
    """Records operators with results that are not finite, and what they were made from; it visits a trace with lines.

    Results are found again by their storage: a view of one that is not finite leads to the operator that wrote it.

    Args:
        outside: tensors from outside by name (weights, buffers, data), to name those that are not finite.
    """

    def __init__(self, outside: Iterable[tuple[str, Tensor]] = ()) -> None:
        outside = list(outside)
        self._names = {storage(tensor): name for name, tensor in outside}
        self._weights = {storage(tensor) for _, tensor in outside if isinstance(tensor, nn.Parameter)}
        self.computed: list[Node] = []
        """Operators that computed something not finite from finite inputs, harmful or not."""
        self._written: dict[int, list[Node]] = {}
        """Operators by the storage that they wrote. Whatever is written whole replaces the entry, so the address of
        freed memory misleads nobody."""

    def visit(self, op: Op) -> None:
        """Record an operator."""
        read = {storage(tensor) for tensor in op.inputs}
        for result in op.results:
            key = storage(result)
            if not op.is_mutable and key in read:  # a view has no new values
                continue
            if op.bare_name in UNWRITTEN or finite(result):
                if _is_whole(result):
                    self._written.pop(key, None)
                continue
            node = self._node(op, result)
            before = self._written.get(key, [])
            if op.is_mutable:  # what was not finite before it was changed in place
                node.sources += before
            if node.computes:
                self.computed.append(node)
            self._written[key] = [*([] if _is_whole(result) else before), node]

    def _node(self, op: Op, result: Tensor) -> Node:
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
                outside.append(Outside(self._names.get(key, "the data"), tensor))
                wrong_outside |= key in self._weights or not outside[-1].is_mask
        asked = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in tree_leaves((op.args, op.kwargs)))
        passed = bool(sources or outside) and all(source.given for source in sources) and not wrong_outside
        passed = passed and op.bare_name not in _MIXING
        given = (asked or passed) and not bool(result.isnan().any())
        return Node(op.number, op.finding(result), given, sources, outside)

    def behind(self, outputs: Iterable[Tensor]) -> list[Node]:
        """Return the operators that wrote what is not finite in these tensors, and all that those were made from."""
        found: set[Node] = set()
        left = [node for tensor in outputs for node in self._written.get(storage(tensor), [])]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += node.sources
        return sorted(found, key=lambda node: node.number)


def _is_whole(tensor: Tensor) -> bool:
    strided = tensor.layout == torch.strided
    return not strided or tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()


def find_origin(passes: Replay, format: str, opened: bool = False) -> Finding | None:
    draft = _find_origin(passes, format, opened)
    return draft if draft is None or isinstance(draft, Finding) else Finding(**vars(draft))


def _find_origin(passes: Replay, format: str, opened: bool = False) -> Any:
    """Return the fault that makes this step not finite; None: the step is finite, or not by an operator.

    The tape is sliced from the step's outputs that are not finite. Where the slice has several first operators, each is
    repaired alone (its results that are not finite become ±1), and the one without which the outputs are finite is the
    cause. Fused attention is looked into with torch's MATH kernel.

    Args:
        passes: of the step, at the loss scale that is not finite.
        format: of the finding.
        opened: whether the MATH kernel is in use.
    """
    data = [(batch_key(name), tensor) for batch in passes.microbatches for name, tensor in batch.items()]
    tape = Tape([*passes.model.named_parameters(), *passes.model.named_buffers(), *data])
    with Trace(passes.model, tape.visit, lines=True):
        found = passes.run()
    slice_ = tape.behind(found.outputs[name] for name in found.nonfinite)
    if not slice_:
        return None
    starts = [node for node in slice_ if node.computes] or slice_[:1]
    cause, alone = _cause(passes, starts)
    path = tuple(_path(cause, slice_, found.nonfinite))
    finding: Any = SimpleNamespace(**vars(replace(cause.at, format=format, path=path)))
    masks = [each for each in cause.roots() if each.is_mask]
    if cause.roots() and (len(masks) < len(cause.roots()) or finding.op.removeprefix("aten.") not in _MASKED):
        return _of_input(passes, cause, finding)
    if "scaled_dot_product" in finding.op and not opened:
        with sdpa_kernel(SDPBackend.MATH):
            inside = find_origin(passes, format, opened=True)
        if inside is not None:
            opening = f"; inside {finding.op}, opened (fused kernels keep the scores in fp32)"
            return replace(inside, detail=inside.detail + opening)
    finding.kind, finding.detail = _kind(passes, cause.number)
    if finding.kind == DOMAIN and format != "fp32" and (flushed := _flushed(passes, cause.number)):
        detail = f"{flushed.detail}; {finding.op} then divides by 0 or takes a logarithm of it"
        return replace(flushed, kind=UNDERFLOW, format=format, detail=detail, path=finding.path)
    if masks:
        finding.detail += f"; {masks[0].name} masks all of it in rows {', '.join(map(str, masks[0].rows[:4]))}"
    if finding.kind == OVERFLOW and finding.direction == FORWARD:
        sample = find_outlier(passes.microbatches)
        if sample is not None:
            finding.detail += f"; {sample}"
        if (
            format == "fp32"
            and sample is not None
            and _is_finite_on(passes, map(without_outliers, passes.microbatches))
        ):
            finding.kind, finding.module, finding.tensor = INPUT, "", sample.place
            finding.cure = (f"leave out {sample.place}: with usual samples in the place of such, the step is finite",)
            return finding
        for name, tensor in data if sample is None and finding.op == CAST else ():
            if tensor.numel() == math.prod(finding.shape) and tensor.float().abs().max() > FP16.largest:
                small = (map_tensors(one, lambda own: own.float().tanh().to(own.dtype)) for one in passes.microbatches)
                finding.tensor, finding.cure = (
                    name,
                    (f"standardize {name}",) if _is_finite_on(passes, small) else (),
                )
                return finding
    if finding.op == "aten.exp":
        finding.detail += "; subtract the maximum before exp, as torch.logsumexp does"
    if finding.kind == DOMAIN and finding.direction == BACKWARD:
        finding.detail += "; torch.where and masks leave such a derivative as it is: change what it is computed from"
    if format == "fp32" and (rows := _spoiling(passes)):
        finding.detail += f"; {samples(rows)} of the batch alone"
        finding.cure = (f"leave out {samples(rows)}: without, the step is finite",)
    if not alone:
        finding.detail += f"; {len(starts)} operators are not finite independently of each other, this is the first"
    return finding


def _is_finite(replay: Replay, step: Step) -> bool:
    """Return whether another step, from other tensors, is finite in a replay's model."""
    try:
        return not replay.of(step).run().nonfinite
    except Exception:  # of any kind: a loss may not take batches of another size
        return False


def _is_finite_on(replay: Replay, microbatches: Iterable[Batch]) -> bool:
    return _is_finite(replay, replay.step.with_microbatches(microbatches))


def _of_input(passes: Replay, cause: Node, finding: Any) -> Any:
    """Name the tensor and the sample that is not finite before the step, with a cure that was tried."""
    outside = min(cause.roots(), key=lambda each: not each.name.startswith("batch"))
    name, rows, finding.kind = outside.name, outside.rows, INPUT
    bad = int((~outside.tensor.detach().isfinite()).sum())
    stored = f"{dtype_name(outside.tensor.dtype)}, " if outside.tensor.dtype.itemsize == 2 else ""
    finding.detail = f"{name} ({stored}{bad:,} of {outside.tensor.numel():,} elements) is not finite before the step"
    finding.module, finding.tensor = ("", name) if name.startswith("batch") else (name.rpartition(".")[0], name)
    size = len(outside.tensor) if outside.tensor.ndim else 0
    if name.startswith("batch") and 0 < len(rows) < size:
        named = samples(rows)
        finding.tensor += f", {named}"
        left = [row for row in range(size) if row not in rows]
        batches = [_with_rows(batch, left, size) for batch in passes.microbatches]
        cure, cured = (
            f"leave out {named} of {name}: without, the step is finite",
            _is_finite_on(passes, batches),
        )
    else:
        cure = f"finite values in {name}: with zeros in their place, the step is finite"
        batches = [map_tensors(batch, _without_infinities) for batch in passes.microbatches]
        cured = _is_finite(passes, passes.step.with_microbatches(batches).with_values(_without_infinities))
    finding.cure = (cure,) if cured else ()
    return finding


def _with_rows(batch: Batch, rows: list[int], size: int) -> Batch:
    """Return a batch of the same size with some of its samples alone, again and again."""
    taken = [rows[place % len(rows)] for place in range(size)]
    return map_tensors(batch, lambda tensor: tensor[taken] if tensor.shape[:1] == (size,) else tensor)


def _spoiling(passes: Replay) -> list[int]:
    """Return the few samples without which the step is finite; none: they are not few, or the batch is not one."""
    batch = passes.microbatches[0]
    size = max((len(tensor) for tensor in batch.values() if tensor.ndim), default=0)

    def is_finite(rows: list[int]) -> bool:
        return _is_finite_on(passes, [_with_rows(batch, rows, size)])

    found: list[int] = []
    left = [list(range(size))] if size and len(passes.microbatches) == 1 else []
    while left and len(found) <= min(size // 4, _SAMPLES):
        rows = left.pop()
        if is_finite(rows):
            continue
        if len(rows) == 1:
            found += rows
        else:
            left += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
    others = [row for row in range(size) if row not in found]
    return found if found and not left and others and is_finite(others) else []


def _without_infinities(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor


def name_overflows(passes: Replay, errors: Sequence[Finding]) -> list[Finding]:
    """Return errors of modules, those that are overflows named so: their infinities harm nothing, 1/inf is 0.

    Args:
        passes: in the run's own format, in which the step is finite.
        errors: of the kind ``ERROR``.
    """
    if not errors:
        return []
    tape = Tape()
    with Trace(passes.model, tape.visit, lines=True):
        passes.run()
    result = []
    for error in errors:
        place = error.module, error.direction
        node = next((node for node in tape.computed if (node.at.module, node.at.direction) == place), None)
        if node is not None:
            kind, detail = _kind(passes, node.number)
            if kind == OVERFLOW:
                detail += "; infinities here become finite again, and wrong"
                error = replace(node.at, kind=kind, format=error.format, detail=detail)
        result.append(error)
    return result


def _cause(passes: Replay, starts: list[Node]) -> tuple[Node, bool]:
    """Return the operator whose repair alone makes the outputs finite; else the first, and False."""
    distinct = list({node.number: node for node in starts}.values())
    if len(distinct) == 1:
        return distinct[0], True
    for node in distinct[:_CANDIDATES]:

        def repair(op: Op, number: int = node.number) -> None:
            for result in numbers_in(op.result) if op.number == number else ():
                result.copy_(torch.nan_to_num(result, nan=1.0, posinf=1.0, neginf=-1.0))

        with Trace(None, repair):
            found = passes.run()
        if not found.nonfinite:
            return node, True
    return distinct[0], False


def _path(cause: Node, slice_: Sequence[Node], nonfinite: list[str]) -> list[str]:
    """Return what the fault passes through: the modules, or operators outside of them, and at last an output."""
    if cause.at.direction == FORWARD and "loss" in nonfinite:
        slice_ = [node for node in slice_ if node.at.direction == FORWARD]
    ways = {cause: [cause]}  # from the cause to each operator that it reaches, in order
    for node in slice_:
        sources = [source for source in node.sources if source in ways]
        if sources and node not in ways:
            ways[node] = [*ways[sources[-1]], node]
    _, *passed = [node.at for node in list(ways.values())[-1]]
    names = [name for name, _ in groupby(at.module or at.op.removeprefix("aten.") for at in passed)]
    if len(names) > 4:
        names = [*names[:2], "…", names[-1]]
    gradients = [name for name in nonfinite if name != "loss"]
    output = "loss" if "loss" in nonfinite else f"gradient of {gradients[0]}" if gradients else nonfinite[0]
    return [*names, output]


def _in_fp64(op: Op) -> list[Tensor]:
    """Return the floating-point results of an operator, computed in fp64 from its inputs; none if it cannot be."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().double() if value.is_floating_point() else value.detach().clone()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    try:
        return numbers_in(op.func(*tree_map(wide, op.args), **tree_map(wide, op.kwargs)))
    except (RuntimeError, NotImplementedError):
        return []


def _kind(passes: Replay, number: int) -> tuple[str, str]:
    """Return the kind of fault of the operator with a number, computed again in fp64, and the numbers that say so."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def compare(op: Op) -> Any:
        if op.number != number:
            return op.run()
        wide = _in_fp64(op)  # before the operator, which may change its inputs
        result = op.run()
        pairs.extend(zip([tensor.detach().clone() for tensor in numbers_in(result)], wide, strict=False))
        return result

    with Trace(None, run=compare):
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


def _flushed(passes: Replay, number: int) -> Finding | None:
    """Return the last operator before this one, and behind it, in whose result something became 0, and what."""
    behind: dict[int, tuple[int, Finding] | None] = {}
    """Such an operator behind what a storage holds, after its number."""
    found: Finding | None = None

    def visit(op: Op) -> None:
        nonlocal found
        if not number - _DEPTH <= op.number <= number:
            return
        unwritten = op.bare_name in UNWRITTEN
        read = {storage(tensor) for tensor in op.inputs if not unwritten}
        last = max((each for key in read if (each := behind.get(key))), key=itemgetter(0), default=None)
        if op.number == number:
            found = last and last[1]
            return
        wide = [] if op.is_mutable or unwritten else _in_fp64(op)
        for result, exact in zip_longest(numbers_in(op.result), wide):
            if result is not None and (op.is_mutable or storage(result) not in read):  # a view has no new values
                lost = _zeros(result, exact)
                behind[storage(result)] = (op.number, replace(op.finding(result), detail=lost)) if lost else last

    with Trace(passes.model, visit, lines=True):
        passes.run()
    return found


def _zeros(result: Tensor, exact: Tensor | None) -> str:
    """Return what is 0 and in fp64 not, in words; empty: nothing is."""
    if exact is None or exact.shape != result.shape:
        return ""
    zero = (result == 0) & (exact != 0)
    if not bool(zero.any()):
        return ""
    return f"{int(zero.sum()):,} of {zero.numel():,} up to {exact[zero].abs().max().item():.3g} became 0"


def find_exception(passes: Replay, format: str) -> Finding | None:
    """Take the passes of a step, and return what they raise: the module, the operator and the line; None: nothing."""
    place, line, name, dtypes = ("", FORWARD), None, "", ""  # of the operator that ran last

    def note(op: Op) -> Any:
        nonlocal place, line, name, dtypes
        place, line, name = op.place, op.line, op.name
        dtypes = ", ".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in numbers_in(op.inputs)))
        return op.run()

    try:
        with Trace(passes.model, run=note):
            passes.run()
    except Exception as error:  # whatever a model and a format can raise
        raised_at = line_of_exception(error)
        module, direction = place
        if raised_at not in (None, line):  # raised before an operator ran
            module, direction, name, dtypes = _running(passes.model, error), FORWARD, "", ""
        where = str(raised_at or line or "")
        return Finding(EXCEPTION, direction, module, format, name, dtypes, detail=described(error), line=where)
    return None


def _running(model: nn.Module, error: BaseException) -> str:
    """Return the innermost module in whose code an error was raised."""
    names, found = {id(module): name for name, module in model.named_modules()}, ""
    for frame, _ in walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found
