"""The format in which every operator of a step really ran, and where that is not what was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from mantissa.display import counted, dtype_name
from mantissa.finding import DTYPE, FORWARD, LOST, Examined, Finding
from mantissa.step.step import Replay, Step
from mantissa.step.trace import CAST, PRODUCTS, DtypeRecorder, Op, Row, Site, Trace
from mantissa.tensors import relative_error


def manifest(passes: Replay) -> Examined:
    """Take the step once and return the formats of its operators, a ``Row`` each, with the faults among them.

    A fault is a module or an operator that was to be fp32 and ran in 16 bits, weights stored in fewer bits than
    requested, and a sum of the loss that is not fp32.
    """
    with DtypeRecorder(passes.model, _weights_in_fp32(passes)) as recorder:
        passes.run()
    rows = sorted(recorder.rows())
    findings = [*_modules_in_half(passes, rows), *_bypassed(passes, recorder.casts), *_operators_in_half(passes, rows)]
    findings += [*_weights(passes), *_loss(passes), *_casts_in_fp32(passes)]
    return Examined(findings=findings, rows=rows)


def _within(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _finding(passes: Replay, module: str, op: str, dtype: str, detail: str, *cure: str) -> Finding:
    return Finding(DTYPE, FORWARD, module, passes.format.name, op, dtype, detail=detail, cure=list(cure))


def _weights_in_fp32(passes: Replay) -> dict[int, str]:
    """Return the weights of fp32 modules that no other module shares, by address."""
    inside, outside = {}, set()
    for name, parameter in passes.model.named_parameters(remove_duplicate=False):
        if _within(name.rpartition(".")[0], passes.fp32_modules):
            inside[parameter.data_ptr()] = name
        else:
            outside.add(parameter.data_ptr())
    return {address: name for address, name in inside.items() if address not in outside}


def _bypassed(passes: Replay, casts: dict[tuple[str, str], str]) -> Iterator[Finding]:
    """Yield the fp32 modules whose weights another module uses in 16 bits, without a call of the module."""
    users = {(weight.rpartition(".")[0], user): dtype for (weight, user), dtype in casts.items()}
    for (owner, user), dtype in users.items():
        if not _within(user, passes.fp32_modules):
            detail = f"precision.fp32_modules has it, and {user or 'the model'} uses its weights without calling it"
            cure = f"call {owner} there" + (f", or add {user} to precision.fp32_modules" if user else "")
            yield _finding(passes, owner, CAST, dtype, detail, cure)


def _modules_in_half(passes: Replay, rows: list[Row]) -> Iterator[Finding]:
    """Yield the fp32 modules whose own operators ran in 16 bits in the forward pass.

    With 16-bit weights the result of such a module is cast back, so there casts are not counted.
    """
    casts_back = passes.format.half_weights is not None
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.in_half and _within(row.module, passes.fp32_modules) and not (casts_back and row.op == CAST):
            found.setdefault(row.module, []).append(row)
    for module, own in found.items():
        count = sum(row.calls for row in own)
        detail = f"precision.fp32_modules has it, and {counted(count, 'operator')} ran in 16 bits"
        cure = "remove the cast to 16 bits from this module's code"
        yield _finding(passes, module, own[-1].op, own[-1].output, detail, cure)


def _operators_in_half(passes: Replay, rows: list[Row]) -> Iterator[Finding]:
    """Yield the operators of ``precision.fp32_ops`` that ran in 16 bits in the forward pass, each at its first row."""
    first = {row.name: row for row in reversed(rows) if row.in_half}
    for name in passes.step.fp32_ops:
        if row := first.get(name):
            detail = f"precision.fp32_ops asks for {name} in fp32"
            yield _finding(passes, row.module, row.op, row.output, detail)


def _weights(passes: Replay) -> Iterator[Finding]:
    """Yield the modules with parameters that are stored in fewer bits than the format asks for."""
    low: dict[tuple[str, str], list[str]] = {}
    asked = passes.format.weights
    for name, parameter in passes.model.named_parameters():
        module = name.rpartition(".")[0]
        wanted = torch.float32 if _within(module, passes.fp32_modules) else asked
        frozen = not parameter.requires_grad  # whose precision training does not lose
        if parameter.is_floating_point() and parameter.dtype.itemsize < wanted.itemsize and not frozen:
            low.setdefault((module, dtype_name(parameter.dtype)), []).append(name)
    for (module, dtype), names in low.items():
        detail = f"{', '.join(names)} stored in {dtype}, precision={passes.format.name} asks for {dtype_name(asked)}"
        yield _finding(passes, module, "", dtype, detail)


def explicit_casts(passes: Replay, backward: bool = False) -> list[Site]:
    """Return where the code asks for 16 bits, once for each line.

    Args:
        passes: in fp32, or in 16 bits, where lines with products are left out, whose casts may be autocast's.
        backward: in the backward pass, by hooks and functions of the code's own, and not in the forward pass.
    """
    found: dict[str, Site] = {}
    products: set[str] = set()
    half = passes.format.half is not None

    def note(op: Op) -> None:
        line = str(op.line or "")
        if (op.asks_for_half if half else op.casts_to_half) and op.in_backward == backward:
            found.setdefault(line, op.site(op.result))
        if half and op.bare_name in PRODUCTS:
            products.add(line)

    # What comes after a cast may need it: a layer whose weights are in 16 bits.
    with suppress(RuntimeError), Trace(passes.model, note, lines=True):
        passes.run(passes.step.first_samples())
    return [cast for line, cast in found.items() if line not in products]


def _casts_in_fp32(passes: Replay) -> list[Finding]:
    """Return a finding where the code casts to 16 bits though the format has none."""
    if passes.format.half is not None:
        return []
    detail = f"the code casts to 16 bits, which precision={passes.format.name} does not ask for"
    return [cast.finding(DTYPE, passes.format.name, detail=detail) for cast in explicit_casts(passes)[:1]]


def _loss(passes: Replay) -> list[Finding]:
    """Return a finding where the summed loss is in 16 bits."""
    passes.start()
    dtype = passes.loss(passes.microbatches[0]).dtype
    if dtype.itemsize > 2 or not passes.step.sums_loss:
        return []
    detail = f"the summed loss is {dtype_name(dtype)}: sum it in fp32 in Recipe.loss"
    return [_finding(passes, "", "the loss", dtype_name(dtype), detail)]


_STEPS = 8
"""After so many steps the updates are measured: at first a momentum encoder equals its model."""
_LOST = 0.5
"""Relative error from which on an update has lost most of what it should be."""


def state_updates(step: Step) -> Examined:
    """Return the 16-bit buffers and frozen weights whose updates in the forward pass are lost by rounding."""
    own = step.as_run()
    if not any(tensor.dtype.itemsize == 2 for tensor in _state(own).values()):
        return Examined()
    own.train(step.following(_STEPS))
    later = step.after(own, _STEPS)
    low, reference = later.as_run(), later.reference()
    before = {name: tensor.clone() for name, tensor in _state(low).items()}
    changes = []
    for passes in (low, reference):
        passes.run()
        changes.append({name: tensor.double() - before[name].double() for name, tensor in _state(passes).items()})
    findings: dict[str, Finding] = {}
    for name, start in before.items():
        exact, real = changes[1][name], changes[0][name]
        if start.dtype.itemsize != 2 or not exact.any() or not relative_error(real, exact) > _LOST:
            continue
        share = ((real == 0) & (exact != 0)).sum().item() / (exact != 0).sum().item()
        detail = (
            f"{name} is {dtype_name(start.dtype)}, and the forward pass updates it: {share:.0%} of the elements "
            f"do not move, the error of the update is {relative_error(real, exact):.0%}; keep it in fp32"
        )
        owner = name.rpartition(".")[0]
        if owner in findings:
            name, detail = f"{findings[owner].tensor}, {name}", f"{findings[owner].detail}; {detail}"
        findings[owner] = Finding(LOST, FORWARD, owner, step.format.name, detail=detail, tensor=name)
    return Examined(findings=list(findings.values()))


def _state(passes: Replay) -> dict[str, Tensor]:
    """Return the buffers and the weights that no optimizer changes, by name."""
    frozen = {name: each.detach() for name, each in passes.model.named_parameters() if not each.requires_grad}
    found = frozen | dict(passes.model.named_buffers())
    return {name: each for name, each in found.items() if torch.is_floating_point(each)}
