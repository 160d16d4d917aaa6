"""What cures a fault: a change with which the check that found it no longer reports it, and with which training learns.

Where fp32 in some modules or operators may be a cure, the candidates are searched for here; a fault that shows nowhere
is where the cure changes something.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mantissa.display import size
from mantissa.doctor.budget import Budget, cannot_compute
from mantissa.doctor.cause import find_exception, find_origin
from mantissa.doctor.course import Course
from mantissa.doctor.dtypes import NO_CAST, explicit_casts
from mantissa.doctor.finding import DOMAIN, EXCEPTION, OVERFLOW, UNDERFLOW, Again, Cure, Finding
from mantissa.doctor.tape import UNWRITTEN
from mantissa.errors import FormatError
from mantissa.formats import FP16, Format
from mantissa.step.batch import Batch
from mantissa.step.ledger import MemoryLedger
from mantissa.step.operators import GROUPS, is_operator
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, FORWARD, HALF, Line, Op, Trace, functional_name
from mantissa.tensors import numbers_in, relative_error

_OTHERS = 3
"""Following steps, on whose first microbatch islands must be finite, too."""
ORDERS = ("topk", "sort", "argsort", "argmax", "argmin", "nms")
"""Operators, by their bare names, that choose or order by size, and return the indices last."""
_HEADROOM = 2.0
"""Factor by which results in fp16 must stay below the largest number, where an overflow is cured."""
_SPELLED = {"mm": "matmul", "bmm": "matmul", "addmm": "linear"}
CURES = "cures"
"""Name of the part of an examination."""


# --- whether a cure holds ---


@dataclass(frozen=True)
class Trial:
    """Tries the cures of one finding."""

    finding: Finding
    others: frozenset[tuple[str, str]]
    """Keys of what else the check reports of the step as it is."""
    again: Again
    """The check."""
    base: Step
    """The step that it examined, which cures change."""
    course: Course
    """What follows, in which cures train."""
    budget: Budget

    def is_gone(self, cure: Cure) -> bool:
        """Return whether the check no longer reports the finding with a cure, nor what it did not report before."""
        if not self.budget.goes_on(CURES):
            return False
        try:
            with cure.applied():
                keys = {finding.key for finding in self.again(cure.step).findings}
        except Exception as error:  # of any kind: a module that cannot compute in fp32 alone
            if cannot_compute(error):
                return False
            raise
        return keys <= self.others

    def first(self, cures: Iterable[Cure]) -> list[Cure]:
        """Return the first cure that holds; empty: none does."""
        return next(([held] for cure in cures if (held := self._held(cure))), [])

    def best(self, cures: Iterable[Cure]) -> list[Cure]:
        """Return the cure that holds with which fp32 ends at the lowest loss; empty: none holds."""
        held = [held for cure in cures if (held := self._held(cure))]
        return sorted(held, key=lambda cure: self.course.end(cure, self.base))[:1]

    def _held(self, cure: Cure) -> Cure | None:
        """Return a cure that holds; one with which the model cannot be computed does not, and others are tried."""
        return self.budget.run(CURES, lambda: self.learned(cure) if self.is_gone(cure) else None)

    def learned(self, cure: Cure) -> Cure | None:
        """Return a cure with which training learns; see ``Course``."""
        return self.course.learned(cure, self.base)

    def place(self, cures: Iterable[Cure]) -> tuple[list[Cure], dict[str, Any]]:
        """Return the first cure that holds, and where it says the finding is; else the first place without it."""
        at: dict[str, Any] = {}
        for cure in cures:
            if self.is_gone(cure):
                at = at or cure.at
                if held := self.learned(cure):
                    return [held], cure.at
        return [], at


# --- candidates ---


def scale_cures(step: Step, scale: float | None) -> tuple[Cure, ...]:
    """Return another loss scale as a cure; none where there is none."""
    return (Cure(step.remedies.scale(scale), step.at_scale(scale)),) if scale is not None else ()


def module_cure(step: Step, modules: list[str], at: dict[str, Any] | None = None) -> Cure:
    """Return modules in fp32 as a cure."""
    other = step.in_fp32(modules)
    return Cure(step.remedies.modules(other.fp32_modules), other, at or {})


def operator_cure(step: Step, operators: list[str], at: dict[str, Any] | None = None) -> Cure:
    """Return operators in fp32 as a cure."""
    return Cure(step.remedies.operators(operators), step.in_fp32(operators=operators), at or {})


def cast_cures(step: Step) -> Iterator[Cure]:
    """Yield each line of the forward code that asks for 16 bits, with fp32 instead."""
    for cast in explicit_casts(Replay.as_run(step)):
        at = {"module": cast.module, "line": cast.line}
        yield Cure(f"{NO_CAST}: {cast.line}", step.without_casts(cast.line), at)


def operators_of(step: Step, finding: Finding) -> Iterator[Cure]:
    """Yield the operator of a finding in fp32, and where that has no result what made its input, the last first."""
    names = []
    if finding.op and finding.kind != UNDERFLOW and not finding.op.endswith(("_", "to_copy")):
        names.append(spelled(finding.op))
    if finding.kind == DOMAIN:
        names += [name for name, module in reversed(in_half(step)) if module == finding.module]
    for name in filter(is_operator, names):
        yield operator_cure(step, [name])


def operators_of_line(step: Step, finding: Finding) -> Iterator[Cure]:
    """Yield the functions of a finding's line in fp32: torch may call several operators for one, such as einsum."""
    for name in re.findall(r"\w+(?=\()", finding.line):
        if hasattr(torch, name) and is_operator(name):
            yield operator_cure(step, [name])


def search(step: Step, trial: Trial, scale: float | None, other: Format | None) -> list[Cure]:
    """Return the cures that hold of a fault of 16 bits, the cheapest first.

    Args:
        step: with the fault.
        trial: of the fault.
        scale: the loss scale that is proposed; None: none fits.
        other: another format that may cure it.
    """
    finding, run = trial.finding, trial.budget.run
    # A loss scale costs nothing.
    of_scale = finding.direction == BACKWARD and finding.kind == OVERFLOW
    held = trial.first(scale_cures(step, scale)) if of_scale else []
    if held:
        return held
    # Fp32 for the fewest modules, or for what a line casts.
    casts = (cure for cure in cast_cures(step) if cure.at["module"] == finding.module)
    islands = run("search for islands", partial(find_islands, step, trial))
    held = [islands] if islands else trial.first(casts)
    # Fp32 for an operator.
    held += trial.first(operators_of(step, finding))
    held = held or trial.first(operators_of_line(step, finding))
    # Another format with 16 bits.
    return held + trial.first([Cure(step.remedies.format(other), step.in_format(other))] if other else [])


# --- islands: the fewest modules in fp32 ---


@dataclass(frozen=True, kw_only=True)
class Islands(Cure):
    """Modules whose computation in fp32 cures the step; 1-minimal: without any one of them it is not cured."""

    modules: list[str]
    minimal: bool
    """Whether every module was tried to be left out."""
    cost: str
    """Memory that they add to a step; empty: it was not measured."""


def find_islands(step: Step, trial: Trial) -> Islands | None:
    """Return the islands that cure a finding, and with which the step trains on; None: there are none.

    They grow by diagnosis: the module of the finding, then those of what is found next, such as the same fault in
    every layer; where a module in fp32 does not help, the one that contains it. Then each is tried to be left out.
    """
    finding, goes_on = trial.finding, partial(trial.budget.goes_on, "search for islands")
    tried_on = [step.microbatches, *(batches[:1] for batches in step.following(1 + _OTHERS)[1:])]

    def faults(modules: list[str]) -> list[str]:
        """Return the modules of what is at fault with these islands (empty: in no module); none: nothing is."""
        other = step.in_fp32(modules)
        broken = _broken_module(other, modules, tried_on, finding.kind == OVERFLOW)
        return [fault.module for fault in trial.again(other).findings] if broken is None else [broken]

    # Grow.
    modules: list[str] = []
    next_ones = [finding.module]
    while next_ones and all(next_ones) and goes_on():
        for module in next_ones:
            # In the place of those that are inside of it.
            modules = [*(name for name in modules if not f"{name}.".startswith(f"{module}.")), module]
        next_ones = [_outside_of(modules, module) for module in faults(modules)]
    if next_ones:
        return None

    # Leave out.
    modules = _needed(modules, lambda rest: goes_on() and not faults(rest))
    other, minimal = step.in_fp32(modules), goes_on()
    held = trial.learned(Cure(step.remedies.modules(other.fp32_modules), other))
    if held is None:  # that it is cured is known, also where there is no more time
        return None
    cost = ""
    if finding.kind != EXCEPTION:  # without them there is no step to compare with
        cost = trial.budget.run("cost of the islands", partial(_cost, step, other)) or ""
    about = ", ".join(filter(None, [cost, "" if minimal else "not minimal: out of time", held.about]))
    return Islands(held.text, other, about=about, modules=modules, minimal=minimal, cost=cost)


def _outside_of(modules: list[str], module: str) -> str:
    """Return a module; where it is in one of those modules, the module that contains that one."""
    around = next((name for name in modules if f"{module}.".startswith(f"{name}.")), None)
    return module if around is None else around.rpartition(".")[0]


def _needed(names: list[str], cured: Callable[[list[str]], bool]) -> list[str]:
    """Return those that the others do not cure without; each is tried to be left out once."""
    for name in list(names):
        rest = [other for other in names if other != name]
        if rest and cured(rest):
            names = rest
    return names


def _broken_module(step: Step, modules: list[str], tried_on: list[list[Batch]], headroom: bool) -> str | None:
    """Return the module in which a step with these islands is not finite (empty: in no module); None: it is finite.

    ``headroom``: a fault is also a result in fp16 that is within a factor of the largest number, and may be beyond it
    in the next step.
    """
    try:
        replay = Replay.as_run(step)
    except FormatError:  # a module that is never called, such as the output projection of torch's attention
        return modules[-1]

    # The first module with a result that is too near to the largest number.
    near = ""

    def note(op: Op) -> None:
        nonlocal near
        if not near and op.place[1] == FORWARD and _is_near_largest(op):
            near = op.place[0]

    # This step, and some that follow.
    for microbatches in tried_on:
        replay, near = replay.of(step.with_microbatches(microbatches)), ""
        try:
            with Trace(replay.model, note):
                nonfinite = bool(replay.run_with_backoff().nonfinite)
        except Exception as error:
            if not cannot_compute(error):
                raise
            nonfinite, fault = True, find_exception(replay, step.format.name)
        else:
            fault = find_origin(replay, step.format.name) if nonfinite else None
        if nonfinite:
            return fault.module if fault is not None else ""
        if headroom and near and near not in modules:
            return near
    return None


def _is_near_largest(op: Op) -> bool:
    """Return whether a result in fp16 is too near to the largest number; a mask of that number is meant."""
    for tensor in numbers_in(op.result) if op.bare_name not in UNWRITTEN else ():
        if tensor.dtype == torch.float16:
            sizes = tensor.detach().abs()
            sizes = sizes[sizes < FP16.largest]
            if sizes.numel() and sizes.max().item() > FP16.largest / _HEADROOM:
                return True
    return False


def _cost(step: Step, other: Step) -> str:
    """Return how much more memory another step takes at its peak."""
    peaks = []
    for replay in (Replay.as_run(step), Replay.as_run(other)):
        with MemoryLedger(replay.model, replay.optimizer) as ledger:
            replay.run()
        peaks.append(ledger.report().peak_bytes)
    more = peaks[1] - peaks[0]
    return f"{'-' if more < 0 else '+'}{size(abs(more))}"


# --- where a fault is that shows in no module ---


def places(step: Step, trial: Trial) -> Iterator[Cure]:
    """Yield what may cure a fault that shows nowhere, with the place, from the smallest change to the largest."""
    # Operators outside of all submodules: together, then one alone.
    operators = in_half(step)
    inside = {name for name, module in operators if module}
    outside = {name: str(line or "") for (name, _), line in operators.items() if name not in inside}
    together = operator_cure(step, list(outside), {"line": next(iter(outside.values()), "")})
    if outside and trial.is_gone(together):
        for name, line in outside.items() if len(outside) > 1 else ():
            yield operator_cure(step, [name], {"line": line})
        yield together

    # Casts of a line, which may be another one than the line that they make wrong.
    for cure in cast_cures(step):
        yield replace(cure, at={}) if trial.finding.line else cure

    # Submodules.
    names = _innermost(step, trial)
    if names:
        line = str(line_of_error(step, names[-1]) or "")
        yield module_cure(step, names, {"module": ", ".join(names), "line": line})

    # Operators, wherever they are.
    for name in dict.fromkeys(name for name, _ in operators):
        yield operator_cure(step, [name], {"line": str(line_of_error(step, "") or "")})


def _innermost(step: Step, trial: Trial) -> list[str]:
    """Return the fewest and innermost submodules that cure a step together; empty: all of them do not.

    Of several that each cure it alone, that is the one that returns last: the others hand on fp32 numbers, in which it
    then computes.
    """
    # In which order modules return.
    replay = Replay.as_run(step)
    order: list[str] = []
    replay.forward(Trace(replay.model, returned=lambda name, *_: order.append(name)))
    innermost: list[str] = []
    left = [""]

    def suffice(names: list[str]) -> bool:
        return trial.is_gone(module_cure(step, [*left, *innermost, *names]))

    # From the whole model inwards.
    while left:
        name = left.pop()
        inner = [f"{name}.{child}".lstrip(".") for child, _ in replay.model.get_submodule(name).named_children()]
        inner.sort(key=partial(_returned_last, order))
        if not inner or not suffice(inner):
            innermost.append(name)
            continue
        alone = next((child for child in reversed(inner) if len(inner) > 1 and suffice([child])), "")
        left += [alone] if alone else _needed(inner, suffice)
    return [name for name in innermost if name]


def _returned_last(order: list[str], module: str) -> int:
    """Return the last place of a module, or of one in it, in the order in which modules return."""
    return max((place for place, name in enumerate(order) if f"{name}.".startswith(f"{module}.")), default=-1)


def in_half(step: Step) -> dict[tuple[str, str], Line | None]:
    """Return the first line of each operator that computes in 16 bits in the forward pass, by its name and module.

    Those that cannot be named, as torch calls them only inside of others, are left out.
    """
    replay = Replay.as_run(step)
    lines: dict[tuple[str, str], Line | None] = {}

    def note(op: Op) -> None:
        if op.computes and any(tensor.dtype in HALF for tensor in numbers_in(op.result)):
            lines.setdefault((spelled(op.name), op.place[0]), op.line)

    replay.forward(Trace(replay.model, note))
    return {key: line for key, line in lines.items() if is_operator(key[0])}


def spelled(operator: str) -> str:
    """Return the name of an operator among ``fp32_ops``, if it has one there."""
    name = functional_name(operator)
    name = next((name.removeprefix(f"{group}_") for group in GROUPS if name.startswith(f"{group}_")), name)
    attention = "scaled_dot_product"
    return attention + "_attention" if name.startswith(attention) else _SPELLED.get(name, name)


def line_of_error(step: Step, module: str) -> Line | None:
    """Return the line of a module's forward pass at which the error against the reference jumps.

    Args:
        step: the step.
        module: its name; an empty string: the whole model.
    """
    sides = [_results(replay, module) for replay in (Replay.as_run(step), Replay.exact(step))]
    worst, jump, before = None, 0.0, step.format.number.unit_roundoff
    for (name, line, low), (other, _, exact) in zip(*sides, strict=False):
        if name != other or low.shape != exact.shape:
            break
        error = relative_error(low, exact) if low.is_floating_point() else (low != exact).double().mean().item()
        if error / before > jump and line is not None:
            worst, jump = line, error / before
        before = max(before, 0.0 if math.isnan(error) else error)
    return worst


def _results(replay: Replay, module: str) -> list[tuple[str, Line | None, Tensor]]:
    """Return what the operators of a module compute in the forward pass, but for views and casts."""
    results: list[tuple[str, Line | None, Tensor]] = []

    def note(op: Op) -> None:
        inside = not module or f"{op.place[0]}.".startswith(f"{module}.")
        if inside and op.computes:
            # What is nearly equal comes in another order: the indices say so.
            of = op.results[-1:] if op.bare_name in ORDERS else numbers_in(op.result)[:1]
            results.extend((op.name, op.line, tensor.detach().clone()) for tensor in of)

    replay.forward(Trace(replay.model, note))
    return results
