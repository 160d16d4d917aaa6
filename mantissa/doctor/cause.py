"""The cause of a step that is not finite, or that raises: which operator, at which line, and what kind of fault it is.

``find_origin`` locates the operator on the tape of all that is not finite; rules then say what it means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, zip_longest
from operator import itemgetter
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from mantissa.display import dtype_name
from mantissa.doctor.finding import DOMAIN, EXCEPTION, INPUT, OVERFLOW, UNDERFLOW, Cure, Finding
from mantissa.doctor.outliers import Outlier, find_outlier, samples, without_outliers
from mantissa.doctor.tape import UNWRITTEN, Node, Outside, Tape
from mantissa.errors import described
from mantissa.formats import FP16, FP32
from mantissa.step.step import Batch, Replay, ReplayResult, Step, batch_key, map_tensors
from mantissa.step.trace import BACKWARD, CAST, FORWARD, Op, Site, Trace, line_of_exception
from mantissa.tensors import numbers_in, storage

_MASKED = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "log_softmax", "softmax")
"""Operators that masks of -inf are meant for; they are NaN where all is masked."""
_CANDIDATES = 12
"""Operators that are tried out, one pass each."""
_SAMPLES = 4
"""Samples that are named as the cause, at most: more are the model's matter."""
_ROOTS = ("sqrt", "norm", "linalg_vector_norm", "std")
"""Operators whose gradient divides by their result, which is kept from the forward pass."""
_EPS = 1e-12
"""Number that is tried under a root."""
_MASK = -1e4
"""Number that is tried in the place of -inf: for a softmax it is as good, and fp16 holds it."""
_IGNORED = -100
"""Target that torch's losses leave out by default."""
_DEPTH = 96
"""Operators before one that divides by 0, among which one is looked for whose result became 0."""


@dataclass(frozen=True)
class Origin:
    """The operator that makes a step not finite, and what is known of it."""

    replay: Replay
    """Replay of the step, at the loss scale that is not finite."""
    format: str
    """Format of the finding."""
    node: Node
    path: tuple[str, ...]
    """Modules and operators from it to the output that it spoils."""
    others: int
    """Operators that are the first of their chains, as this one is; 0: it is the only one."""
    opened: str
    """Fused attention that it is inside of, as torch's MATH kernel shows; empty: none."""

    @property
    def masks(self) -> list[Outside]:
        """Masks from outside that reach it."""
        return [root for root in self.node.roots() if root.is_mask]

    @property
    def from_outside(self) -> bool:
        """Whether what it is given is not finite, and is no mask that it can take."""
        roots = self.node.roots()
        meant = len(self.masks) == len(roots) and self.node.site.op.removeprefix("aten.") in _MASKED
        return bool(roots) and not meant

    @property
    def in_fp32(self) -> bool:
        """Whether it computes in fp32."""
        return self.replay.format.number is FP32

    @cached_property
    def recomputed(self) -> Recomputed:
        """What it is in fp64; taken once, by the first rule that asks."""
        return recompute(self.replay, self.node.number)

    @property
    def kind(self) -> str:
        """Kind of fault of the operator itself."""
        return self.recomputed.kind

    @property
    def is_forward_overflow(self) -> bool:
        """Whether a number of the forward pass is too large."""
        return self.kind == OVERFLOW and self.node.site.direction == FORWARD

    @cached_property
    def outlier(self) -> Outlier | None:
        """Sample that is far larger than others, from which the overflow may come."""
        return find_outlier(self.replay.step.microbatches) if self.is_forward_overflow else None

    @property
    def numbers(self) -> Iterator[str]:
        """What was measured, in words."""
        yield self.recomputed.numbers
        if self.masks:
            rows = ", ".join(map(str, self.masks[0].rows[:4]))
            yield f"{self.masks[0].name} masks all of it in rows {rows}"
        if self.outlier is not None:
            yield str(self.outlier)

    def finding(self, kind: str, details: Iterable[str], site: Site | None = None, **fields: Any) -> Finding:
        """Return the fault.

        Args:
            kind: of the fault.
            details: in words.
            site: where it is; None: at the operator.
            fields: more fields of a finding.
        """
        detail = "; ".join(details)
        if self.opened:
            detail += f"; inside {self.opened}, opened (fused kernels keep the scores in fp32)"
        return Finding.at(site or self.node.site, kind, self.format, detail=detail, path=self.path, **fields)


def find_origin(replay: Replay, format: str) -> Finding | None:
    """Return the fault that makes this step not finite; None: the step is finite, or not by an operator.

    Args:
        replay: of the step, at the loss scale that is not finite.
        format: of the finding.
    """
    origin = locate(replay, format)
    if origin is None:
        return None

    # The first rule that knows something is right.
    rules = (
        # What comes from outside: no operator is at fault.
        _input,
        # What an operator before it lost: this one only shows it.
        _underflow,
        # A mean over nothing.
        _without_targets,
        # Data that is too large for this format, in one sample or in all of them.
        _sample,
        _cast_data,
    )
    with sdpa_kernel(SDPBackend.MATH) if origin.opened else nullcontext():
        findings = (rule(origin) for rule in rules)
        known = next((finding for finding in findings if finding is not None), None)

        # Else the operator is at fault, or the model around it.
        return known or _operator(origin)


def locate(replay: Replay, format: str, opened: str = "") -> Origin | None:
    """Return the operator that makes a step not finite; None: none does.

    The tape is sliced from the step's outputs that are not finite. Where the slice has several first operators, each is
    repaired alone (its results that are not finite become ±1), and the one without which the outputs are finite is the
    cause.
    """
    # Everything that is not finite, and of it what reaches an output.
    data = [(batch_key(name), tensor) for batch in replay.step.microbatches for name, tensor in batch.items()]
    tape = Tape([*replay.model.named_parameters(), *replay.model.named_buffers()], data)
    with Trace(replay.model, tape.visit, lines=True):
        result = replay.run()
    slice_ = tape.behind(result.outputs[name] for name in result.nonfinite)
    if not slice_:
        return None

    # The first operator; of several, the one without which all is finite.
    starts = [node for node in slice_ if node.computes] or slice_[:1]
    firsts = [next(nodes) for _, nodes in groupby(starts, key=lambda node: node.number)]
    alone = firsts if len(firsts) == 1 else [node for node in firsts[:_CANDIDATES] if _is_cured_by(replay, node)][:1]
    node = alone[0] if alone else firsts[0]
    path = _path(node, slice_, result)
    origin = Origin(replay, format, node, path, 0 if alone else len(starts), opened)

    # Fused attention hides its operators: torch's MATH kernel shows them.
    if "scaled_dot_product" in node.site.op and not opened and not origin.from_outside:
        with sdpa_kernel(SDPBackend.MATH):
            return locate(replay, format, node.site.op) or origin
    return origin


def _is_cured_by(replay: Replay, node: Node) -> bool:
    """Return whether the outputs are finite where the results of an operator are."""

    def repair(op: Op) -> None:
        for result in numbers_in(op.result) if op.number == node.number else ():
            result.copy_(torch.nan_to_num(result, nan=1.0, posinf=1.0, neginf=-1.0))

    with Trace(None, repair):
        return not replay.run().nonfinite


def _path(cause: Node, slice_: Sequence[Node], result: ReplayResult) -> tuple[str, ...]:
    """Return what the fault passes through: the modules, or operators outside of them, and at last an output."""
    spoiled = result.nonfinite[0]  # the loss, else a gradient, else a buffer
    if cause.site.direction == FORWARD and spoiled == "loss":
        slice_ = [node for node in slice_ if node.site.direction == FORWARD]
    ways = {cause: [cause]}  # from the cause to each operator that it reaches, in order
    for node in slice_:
        sources = [source for source in node.sources if source in ways]
        if sources and node not in ways:
            ways[node] = [*ways[sources[-1]], node]
    _, *passed = [node.site for node in list(ways.values())[-1]]
    names = [name for name, _ in groupby(site.module or site.op.removeprefix("aten.") for site in passed)]
    if len(names) > 4:
        names = [*names[:2], "…", names[-1]]
    return (*names, f"gradient of {spoiled}" if spoiled in result.gradients else spoiled)


# --- what the operator does: the same one in fp64 ---


class Recomputed(NamedTuple):
    """What an operator does in fp64."""

    kind: str
    """``OVERFLOW``: its result is finite there; ``DOMAIN``: it is not."""
    numbers: str


def recompute(replay: Replay, number: int) -> Recomputed:
    """Compute the operator with a number again in fp64, from its own inputs."""
    # Its results, beside those in fp64.
    pairs: list[tuple[Tensor, Tensor]] = []

    def compare(op: Op) -> Any:
        if op.number != number:
            return op.run()
        wide = _in_fp64(op)  # before the operator, which may change its inputs
        result = op.run()
        pairs.extend(zip([tensor.detach().clone() for tensor in numbers_in(result)], wide, strict=False))
        return result

    with Trace(None, run=compare):
        replay.run()

    # What the first of them says that is not finite.
    for low, wide in pairs:
        bad = ~torch.isfinite(low)
        if low.shape != wide.shape or not bool(bad.any()):
            continue
        reference = wide[bad]
        count = f"{int(bad.sum()):,} of {low.numel():,} elements"
        if bool(torch.isfinite(reference).all()):
            amax, largest = reference.abs().max().item(), torch.finfo(low.dtype).max
            if amax <= largest:
                detail = f"an intermediate result overflows; the reference has at most {amax:.6g}, {count}"
                return Recomputed(OVERFLOW, detail)
            return Recomputed(OVERFLOW, f"reference amax {amax:.6g} > {largest:.6g}, {count}")
        shown = sorted({f"{value:g}" for value in reference[~reference.isfinite()].tolist()})
        return Recomputed(DOMAIN, f"the reference is {', '.join(shown)} too, {count}")
    return Recomputed(DOMAIN, "the operator could not be computed again in fp64")


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


# --- what it means: the rules of ``find_origin`` ---


def _input(origin: Origin) -> Finding | None:
    """Name the tensor and the sample that is not finite before the step, with a cure that was tried."""
    if not origin.from_outside:
        return None
    step = origin.replay.step
    outside = min(origin.node.roots(), key=lambda root: not root.in_batch)
    name, tensor, rows, in_batch = outside.name, outside.tensor, outside.rows, outside.in_batch
    size = len(tensor) if tensor.ndim else 0
    bad = int((~tensor.detach().isfinite()).sum())
    stored = f"{dtype_name(tensor.dtype)}, " if tensor.dtype.itemsize == 2 else ""
    detail = f"{name} ({stored}{bad:,} of {tensor.numel():,} elements) is not finite before the step"

    # Some samples of a batch can be left out; of anything else the values have to change.
    data: Callable[[Batch], Batch]
    if in_batch and 0 < len(rows) < size:
        named = samples(rows)
        place, cure, data = f"{name}, {named}", f"leave out {named} of {name}", _without_bad_samples
    else:
        place, cure, data = name, f"finite values in {name}", partial(map_tensors, change=_without_infinities)
    other = step.with_microbatches(map(data, step.microbatches))
    if not in_batch:
        other = other.with_values(_without_infinities)
    module = "" if in_batch else name.rpartition(".")[0]
    return origin.finding(INPUT, [detail], candidates=(Cure(cure, other, data=data),), module=module, tensor=place)


def _underflow(origin: Origin) -> Finding | None:
    """Name the operator before, whose result became 0 by rounding: a division by it only shows that."""
    if origin.kind != DOMAIN or origin.in_fp32 or not (flushed := _flushed(origin.replay, origin.node.number)):
        return None
    site, lost = flushed
    return origin.finding(
        UNDERFLOW, [lost, f"{origin.node.site.op} then divides by 0 or takes a logarithm of it"], site=site
    )


def _without_targets(origin: Origin) -> Finding | None:
    """Name targets that are all left out, where the step is finite with some."""
    if origin.kind != DOMAIN or not origin.in_fp32:
        return None
    step = origin.replay.step
    names = [name for batch in step.microbatches for name, tensor in batch.items() if all_ignored(tensor)]
    other = step.with_microbatches(map_tensors(batch, _with_targets) for batch in step.microbatches)
    if not names or not _is_finite(origin.replay, other):
        return None
    place = batch_key(names[0])
    text = f"targets in {place}: all of them are {_IGNORED}, which is left out"
    cure = Cure(text, other, data=partial(map_tensors, change=_with_targets))
    return origin.finding(DOMAIN, ["a mean over nothing is 0/0"], candidates=(cure,), module="", tensor=place)


def all_ignored(tensor: Tensor) -> bool:
    """Return whether a tensor of a batch has targets that torch's losses all leave out."""
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole and tensor.numel() > 0 and bool((tensor == _IGNORED).all())


def _with_targets(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if all_ignored(tensor) else tensor


def _sample(origin: Origin) -> Finding | None:
    """Name a sample that is far larger than others, where fp32 cannot hold what comes of it, but of others can."""
    if not origin.in_fp32 or origin.outlier is None:
        return None
    step = origin.replay.step
    usual = step.with_microbatches(map(without_outliers, step.microbatches))
    if not _is_finite(origin.replay, usual):
        return None
    place = origin.outlier.place
    cure = Cure(f"leave out {place}, and others like it", usual, data=without_outliers)
    return origin.finding(INPUT, origin.numbers, candidates=(cure,), module="", tensor=place)


def _cast_data(origin: Origin) -> Finding | None:
    """Name data that the format cannot hold, where an operator only casts it."""
    site, replay = origin.node.site, origin.replay
    if not origin.is_forward_overflow or origin.outlier is not None or site.op != CAST:
        return None
    for name, tensor in ((name, tensor) for batch in replay.step.microbatches for name, tensor in batch.items()):
        if tensor.numel() == math.prod(site.shape) and tensor.float().abs().max() > FP16.largest:
            data, name = partial(_standardized, name=name), batch_key(name)
            cure = Cure(
                f"standardize {name}", replay.step.with_microbatches(map(data, replay.step.microbatches)), data=data
            )
            return origin.finding(OVERFLOW, origin.numbers, candidates=(cure,), tensor=name)
    return None


def _operator(origin: Origin) -> Finding:
    """Say what is known of the operator itself."""
    kind, site, details = origin.kind, origin.node.site, list(origin.numbers)
    if site.op == "aten.exp":
        details.append("subtract the maximum before exp, as torch.logsumexp does")
    if kind == DOMAIN and site.direction == BACKWARD:
        details.append("torch.where and masks leave such a derivative as it is: change what it is computed from")
    rows = _spoiling(origin.replay) if origin.in_fp32 else []
    if rows:
        details.append(f"{samples(rows)} of the batch alone")
    if origin.others:
        details.append(f"{origin.others} operators are not finite independently of each other, this is the first")
    cures = [*_sample_cures(origin.replay, rows)]
    if kind == DOMAIN and site.direction == BACKWARD:
        cures += _derivative_cures(origin.replay, site)
    return origin.finding(kind, details, candidates=tuple(cures))


def _sample_cures(replay: Replay, rows: list[int]) -> Iterator[Cure]:
    """Yield batches without the samples that spoil them as a cure, where some rows do in this one."""
    if not rows:
        return

    def data(batch: Batch) -> Batch:
        one = replay.of(replay.step.with_microbatches([batch]))
        size = max(len(tensor) for tensor in batch.values() if tensor.ndim)
        bad = _spoiling(one) if one.run().nonfinite else []
        return _with_rows(batch, [row for row in range(size) if row not in bad], size) if bad else batch

    usual = replay.step.with_microbatches(map(data, replay.step.microbatches))
    yield Cure(f"leave out {samples(rows)}, and others like it", usual, data=data)


def _derivative_cures(replay: Replay, site: Site) -> Iterator[Cure]:
    """Yield what makes a derivative finite: a root that is not 0 in the line, and masks that are no infinities."""

    def root(op: Op) -> None:
        if op.bare_name in _ROOTS and not op.in_backward and str(op.line or "") == site.line:
            for result in numbers_in(op.result):
                result.masked_fill_(result == 0, math.sqrt(max(_EPS, torch.finfo(result.dtype).smallest_normal)))

    def mask(op: Op) -> None:
        for result in [] if op.in_backward or op.is_view or op.is_mutable else numbers_in(op.result):
            result.masked_fill_(result == -math.inf, _MASK)

    yield Cure(f"an eps under the root, such as {_EPS:g}", replay.step, results=root)
    yield Cure(f"a finite number in the place of -inf, such as {_MASK:g}", replay.step, results=mask)


class Flushed(NamedTuple):
    """Where numbers became 0, and which."""

    site: Site
    lost: str


def _flushed(replay: Replay, number: int) -> Flushed | None:
    """Return the last operator before this one, and behind it, in whose result something became 0."""
    behind: dict[int, tuple[int, Flushed] | None] = {}
    """Such an operator behind what a storage holds, after its number."""
    flushed: Flushed | None = None

    def visit(op: Op) -> None:
        nonlocal flushed
        if not number - _DEPTH <= op.number <= number:
            return
        unwritten = op.bare_name in UNWRITTEN
        read = {storage(tensor) for tensor in op.inputs if not unwritten}
        last = max((known for key in read if (known := behind.get(key))), key=itemgetter(0), default=None)
        if op.number == number:
            flushed = last and last[1]
            return
        wide = [] if op.is_mutable or unwritten else _in_fp64(op)
        for result, exact in zip_longest(numbers_in(op.result), wide):
            if result is not None and (op.is_mutable or storage(result) not in read):  # a view has no new values
                lost = _zeros(result, exact)
                behind[storage(result)] = (op.number, Flushed(op.site(result), lost)) if lost else last

    with Trace(replay.model, visit, lines=True):
        replay.run()
    return flushed


def _zeros(result: Tensor, exact: Tensor | None) -> str:
    """Return what is 0 and in fp64 not, in words; empty: nothing is."""
    if exact is None or exact.shape != result.shape:
        return ""
    zero = (result == 0) & (exact != 0)
    if not bool(zero.any()):
        return ""
    return f"{int(zero.sum()):,} of {zero.numel():,} up to {exact[zero].abs().max().item():.3g} became 0"


# --- the step from other data: what is finite without some of it names the cause ---


def _is_finite(replay: Replay, step: Step) -> bool:
    """Return whether a step from other tensors is finite in a replay's model."""
    try:
        return not replay.of(step).run().nonfinite
    except Exception:  # of any kind: a loss may not take batches of another size
        return False


def _with_rows(batch: Batch, rows: list[int], size: int) -> Batch:
    """Return a batch of the same size with some of its samples alone, again and again."""
    taken = [rows[place % len(rows)] for place in range(size)]
    return map_tensors(batch, lambda tensor: tensor[taken] if tensor.shape[:1] == (size,) else tensor)


def _spoiling(replay: Replay) -> list[int]:
    """Return the few samples without which the step is finite; none: they are not few, or the batch is not one."""
    batch = replay.step.microbatches[0]
    size = max((len(tensor) for tensor in batch.values() if tensor.ndim), default=0)

    def is_finite(rows: list[int]) -> bool:
        return _is_finite(replay, replay.step.with_microbatches([_with_rows(batch, rows, size)]))

    # Halves that are not finite are halved again.
    spoil: list[int] = []
    left = [list(range(size))] if size and len(replay.step.microbatches) == 1 else []
    while left and len(spoil) <= min(size // 4, _SAMPLES):
        rows = left.pop()
        if is_finite(rows):
            continue
        if len(rows) == 1:
            spoil += rows
        else:
            left += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
    others = [row for row in range(size) if row not in spoil]
    return spoil if spoil and not left and others and is_finite(others) else []


def _without_bad_samples(batch: Batch) -> Batch:
    """Return a batch of the same size with finite samples in the place of those that are not."""
    size = max((len(tensor) for tensor in batch.values() if tensor.ndim), default=0)
    left = set(range(size))
    for tensor in batch.values():
        if tensor.shape[:1] == (size,) and tensor.is_floating_point():
            left -= set((~tensor.isfinite()).reshape(size, -1).any(1).nonzero().flatten().tolist())
    return _with_rows(batch, sorted(left), size) if 0 < len(left) < size else batch


def _standardized(batch: Batch, name: str) -> Batch:
    """Return a batch of whose tensor the mean is 0 and the deviation 1."""

    def change(tensor: Tensor) -> Tensor:
        wide = tensor.double()
        return ((wide - wide.mean()) / wide.std().clamp(min=1e-12)).to(tensor.dtype)

    return map_tensors(batch, lambda tensor: change(tensor) if tensor is batch[name] else tensor)


def _without_infinities(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor


# --- what else has a cause: a wrong module of a finite step, and a step that raises ---


def name_overflows(replay: Replay, errors: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return errors of modules, those that are overflows named so: their infinities harm nothing, 1/inf is 0.

    Args:
        replay: in the run's own format, in which the step is finite.
        errors: of the kind ``ERROR``.
    """
    if not errors:
        return ()
    tape = Tape()
    with Trace(replay.model, tape.visit, lines=True):
        replay.run()
    return tuple(_named(replay, error, tape) for error in errors)


def _named(replay: Replay, error: Finding, tape: Tape) -> Finding:
    place = error.module, error.direction
    node = next((node for node in tape.computed if (node.site.module, node.site.direction) == place), None)
    if node is None or (wide := recompute(replay, node.number)).kind != OVERFLOW:
        return error
    detail = f"{wide.numbers}; infinities here become finite again, and wrong"
    return Finding.at(node.site, OVERFLOW, error.format, detail=detail)


def find_exception(replay: Replay, format: str) -> Finding | None:
    """Take the passes of a step, and return what they raise: the module, the operator and the line; None: nothing."""
    place, line, name, dtypes = ("", FORWARD), None, "", ""  # of the operator that ran last

    def note(op: Op) -> Any:
        nonlocal place, line, name, dtypes
        place, line, name = op.place, op.line, op.name
        dtypes = ", ".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in numbers_in(op.inputs)))
        return op.run()

    try:
        with Trace(replay.model, run=note):
            replay.run()
    except Exception as error:  # whatever a model and a format can raise
        raised_at = line_of_exception(error)
        module, direction = place
        if raised_at not in (None, line):  # raised before an operator ran
            module, direction, name, dtypes = _running(replay.model, error), FORWARD, "", ""
        where = str(raised_at or line or "")
        return Finding(EXCEPTION, direction, module, format, name, dtypes, detail=described(error), line=where)
    return None


def _running(model: nn.Module, error: BaseException) -> str:
    """Return the innermost module in whose code an error was raised."""
    names, innermost = {id(module): name for name, module in model.named_modules()}, ""
    for frame, _ in walk_tb(error.__traceback__):
        innermost = names.get(id(frame.f_locals.get("self")), innermost)
    return innermost
