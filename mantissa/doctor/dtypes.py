"""The format in which every operator of a step really ran, and where that is not what was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from mantissa.display import counted, dtype_name
from mantissa.doctor.budget import Budget
from mantissa.doctor.finding import DTYPE, Cure, Examined, Finding
from mantissa.formats import FP32, plain
from mantissa.step.batch import Batch
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import CAST, FORWARD, PRODUCTS, DtypeRecorder, Op, Row, Site, Trace

NO_CAST = "no cast to 16 bits in this line"


def manifest(step: Step, budget: Budget) -> Examined:
    """Take the step once and return the formats of its operators, a ``Row`` each, with the faults among them.

    A fault is a module or an operator that was to be fp32 and ran in 16 bits, weights stored in fewer bits than
    requested, and a sum of the loss that is not fp32.
    """
    replay = Replay.as_run(step)
    few = step.first_samples()
    with DtypeRecorder(replay.model, _weights_in_fp32(replay)) as recorder:
        replay.run(few)

    # Whatever was to be fp32: modules, operators, weights, the sum of the loss.
    rows = sorted(recorder.rows())
    findings = [*_modules_in_half(replay, rows), *_bypassed(replay, recorder.casts), *_operators_in_half(replay, rows)]
    findings += [*stored_in_half(step), *_loss(replay, few[0]), *_casts_in_fp32(replay)]
    return Examined(findings=tuple(findings), rows=tuple(rows))


def _within(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _finding(step: Step, module: str, op: str, dtype: str, detail: str, *cures: Cure) -> Finding:
    return Finding(DTYPE, FORWARD, module, step.format.name, op, dtype, detail=detail, candidates=cures)


def _weights_in_fp32(replay: Replay) -> dict[int, str]:
    """Return the weights of fp32 modules that no other module shares, by address."""
    inside, outside = {}, set()
    for name, parameter in replay.model.named_parameters(remove_duplicate=False):
        if _within(name.rpartition(".")[0], replay.fp32_modules):
            inside[parameter.data_ptr()] = name
        else:
            outside.add(parameter.data_ptr())
    return {address: name for address, name in inside.items() if address not in outside}


def _bypassed(replay: Replay, casts: dict[tuple[str, str], str]) -> Iterator[Finding]:
    """Yield the fp32 modules whose weights another module uses in 16 bits, without a call of the module."""
    step, remedies = replay.step, replay.step.remedies
    users = {(weight.rpartition(".")[0], user): dtype for (weight, user), dtype in casts.items()}
    for (owner, user), dtype in users.items():
        if not _within(user, replay.fp32_modules):
            detail = (
                f"{remedies.modules(step.fp32_modules)} has it, and {user or 'the model'} uses its weights without "
                "calling it"
            )
            other = step.in_fp32([user])
            cure = Cure(f"call {owner} there, or {remedies.modules(other.fp32_modules)}", other)
            yield _finding(step, owner, CAST, dtype, detail, *[cure] if user else [])


def _modules_in_half(replay: Replay, rows: list[Row]) -> Iterator[Finding]:
    """Yield the fp32 modules whose own operators ran in 16 bits in the forward pass.

    With 16-bit weights the result of such a module is cast back, so there casts are not counted.
    """
    step, casts_back = replay.step, replay.format.half_weights is not None
    modules: dict[str, list[Row]] = {}
    for row in rows:
        if row.in_half and _within(row.module, replay.fp32_modules) and not (casts_back and row.op == CAST):
            modules.setdefault(row.module, []).append(row)
    casts = explicit_casts(Replay.as_run(step)) if modules else []
    for module, ran in modules.items():
        count = sum(row.calls for row in ran)
        detail = f"{step.remedies.modules(step.fp32_modules)} has it, and {counted(count, 'operator')} ran in 16 bits"
        other = step
        for cast in casts:
            other = other.without_casts(cast.line) if cast.module == module else other
        cure = Cure("remove the cast to 16 bits from this module's code", other)
        yield _finding(step, module, ran[-1].op, ran[-1].output, detail, cure)


def _operators_in_half(replay: Replay, rows: list[Row]) -> Iterator[Finding]:
    """Yield the operators that were to be fp32 and ran in 16 bits in the forward pass, each at its first row."""
    first = {row.name: row for row in reversed(rows) if row.in_half}
    for name in replay.step.fp32_ops:
        if row := first.get(name):
            detail = f"{replay.step.remedies.operators([name])} asks for {name} in fp32"
            yield _finding(replay.step, row.module, row.op, row.output, detail)


def stored_in_half(step: Step) -> list[Finding]:
    """Return the modules with parameters that are stored in fewer bits than the format asks for."""
    replay, asked = Replay.as_run(step), step.format.weights
    low: dict[tuple[str, str], list[str]] = {}
    for name, parameter in replay.model.named_parameters():
        module = name.rpartition(".")[0]
        wanted = torch.float32 if _within(module, replay.fp32_modules) else asked
        frozen = not parameter.requires_grad  # whose precision training does not lose
        if parameter.is_floating_point() and parameter.dtype.itemsize < wanted.itemsize and not frozen:
            low.setdefault((module, dtype_name(parameter.dtype)), []).append(name)

    # In a loop of another format, weights are cast to what this one asks for.
    cast = replace(step, stored=step.weights, written_in=plain(FP32))
    cure = Cure(step.remedies.format(step.format), cast)
    findings = []
    for (module, dtype), names in low.items():
        detail = f"{', '.join(names)} stored in {dtype}, precision={step.format.name} asks for {dtype_name(asked)}"
        findings.append(_finding(step, module, "", dtype, detail, cure))
    return findings


def _loss(replay: Replay, batch: Batch) -> list[Finding]:
    """Return a finding where the summed loss is in 16 bits."""
    replay.start()
    dtype = replay.loss(batch).dtype
    if dtype.itemsize > 2 or not replay.step.sums_loss:
        return []
    detail = f"the summed loss is {dtype_name(dtype)}: sum it in fp32"
    return [_finding(replay.step, "", "the loss", dtype_name(dtype), detail)]


def _casts_in_fp32(replay: Replay) -> list[Finding]:
    """Return a finding where the code casts to 16 bits though the format has none."""
    if replay.format.half is not None:
        return []
    detail = f"the code casts to 16 bits, which precision={replay.format.name} does not ask for"
    return [Finding.at(cast, DTYPE, replay.format.name, detail=detail) for cast in explicit_casts(replay)[:1]]


def explicit_casts(replay: Replay, backward: bool = False) -> list[Site]:
    """Return where the code asks for 16 bits, once for each line.

    Args:
        replay: in fp32, or in 16 bits, where lines with products are left out, whose casts may be autocast's.
        backward: in the backward pass, by hooks and functions of the code's own, and not in the forward pass.
    """
    lines: dict[str, Site] = {}
    products: set[str] = set()
    half = replay.format.half is not None

    def note(op: Op) -> None:
        line = str(op.line or "")
        if (op.asks_for_half if half else op.casts_to_half) and op.in_backward == backward:
            lines.setdefault(line, op.site(op.result))
        if half and op.bare_name in PRODUCTS:
            products.add(line)

    # What comes after a cast may need it: a layer whose weights are in 16 bits.
    with suppress(RuntimeError), Trace(replay.model, note, lines=True):
        replay.run(replay.step.first_samples())
    return [cast for line, cast in lines.items() if line not in products]


def casts_in_update(step: Step) -> list[str]:
    """Return the lines of the optimizer's step that ask for 16 bits."""
    lines: dict[str, None] = {}

    def note(op: Op) -> None:
        if op.asks_for_half and op.line is not None:
            lines.setdefault(str(op.line))

    replay = Replay.as_run(step)
    result = replay.run()
    replay.built.stand_before(step)
    with Trace(None, note):
        replay.update(result.correction)
    return list(lines)
