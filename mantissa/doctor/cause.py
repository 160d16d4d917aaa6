"""The cause of a step that is not finite, or that raises: what kind of fault it is, and what may cure it.

``find_origin`` asks one rule after another what the operator means that ``locate`` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mantissa.display import dtype_name
from mantissa.doctor.finding import DOMAIN, EXCEPTION, INPUT, OVERFLOW, UNDERFLOW, Cure, Finding
from mantissa.doctor.origin import Origin, in_fp64, locate, recompute
from mantissa.doctor.outliers import samples, without_outliers
from mantissa.doctor.tape import UNWRITTEN, Tape
from mantissa.errors import described
from mantissa.formats import FP16
from mantissa.step.batch import Batch, batch_key, map_tensors, with_rows
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, CAST, FORWARD, Op, Site, Trace, line_of_exception
from mantissa.tensors import numbers_in, storage

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


# --- the rules of ``find_origin`` ---


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
            cure = standardize(replay.step, name)
            return origin.finding(OVERFLOW, origin.numbers, candidates=(cure,), tensor=batch_key(name))
    return None


def _operator(origin: Origin) -> Finding:
    """Say what is known of the operator itself."""
    kind, site, details = origin.kind, origin.node.site, list(origin.numbers)
    cures: list[Cure] = []
    if kind == DOMAIN and site.direction == BACKWARD:
        details.append("torch.where and masks leave such a derivative as it is: change what it is computed from")
        cures += _derivative_cures(origin.replay, site)
    rows = _spoiling(origin.replay) if origin.in_fp32 else []
    if rows:
        details.append(f"{samples(rows)} of the batch alone")
        cures = [_without_samples(origin.replay, rows), *cures]
    if origin.others:
        details.append(f"{origin.others} operators are not finite independently of each other, this is the first")
    return origin.finding(kind, details, candidates=tuple(cures))


def _without_samples(replay: Replay, rows: list[int]) -> Cure:
    """Return batches without the samples that spoil them as a cure; ``rows`` are those of this one."""

    def data(batch: Batch) -> Batch:
        one = replay.of(replay.step.with_microbatches([batch]))
        size = max(len(tensor) for tensor in batch.values() if tensor.ndim)
        bad = _spoiling(one) if one.run().nonfinite else []
        return _repeated(batch, [row for row in range(size) if row not in bad], size) if bad else batch

    usual = replay.step.with_microbatches(map(data, replay.step.microbatches))
    return Cure(f"leave out {samples(rows)}, and others like it", usual, data=data)


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
        wide = [] if op.is_mutable or unwritten else in_fp64(op)
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


def _repeated(batch: Batch, rows: list[int], size: int) -> Batch:
    """Return a batch of the same size with some of its samples alone, again and again."""
    return with_rows(batch, [rows[place % len(rows)] for place in range(size)])


def _spoiling(replay: Replay) -> list[int]:
    """Return the few samples without which the step is finite; none: they are not few, or the batch is not one."""
    batch = replay.step.microbatches[0]
    size = max((len(tensor) for tensor in batch.values() if tensor.ndim), default=0)

    def is_finite(rows: list[int]) -> bool:
        return _is_finite(replay, replay.step.with_microbatches([_repeated(batch, rows, size)]))

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
    return _repeated(batch, sorted(left), size) if 0 < len(left) < size else batch


def standardize(step: Step, name: str) -> Cure:
    """Return a tensor of the batches, by its name there, with a mean of 0 and a deviation of 1 as a cure."""
    data = partial(_standardized, name=name)
    return Cure(f"standardize {batch_key(name)}", step.with_microbatches(map(data, step.microbatches)), data=data)


def _standardized(batch: Batch, name: str) -> Batch:
    def change(tensor: Tensor) -> Tensor:
        wide, dim = tensor.double(), 0 if tensor.ndim == 2 else None  # each column of a table alone
        deviation, mean = torch.std_mean(wide, dim, correction=0, keepdim=True)
        return ((wide - mean) / deviation.clamp(min=1e-12)).to(tensor.dtype)

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
