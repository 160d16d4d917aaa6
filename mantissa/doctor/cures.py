"""What cures a step: the fewest modules, or operators, that have to compute in fp32, and the memory that they take."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.display import size
from mantissa.doctor.cause import find_exception, find_origin
from mantissa.doctor.dtypes import explicit_casts
from mantissa.doctor.tape import UNWRITTEN
from mantissa.errors import FormatError
from mantissa.finding import FORWARD, OVERFLOW, UPDATE, Finding
from mantissa.formats import FP16
from mantissa.step.ledger import MemoryLedger
from mantissa.step.step import Batch, Remedies, Replay, Step, Widened
from mantissa.step.trace import HALF, Line, Op, Trace, functional_name, user_line
from mantissa.tensors import numbers_in, relative_error

NO_CAST = "no cast to 16 bits in this line"
_OTHERS = 3
"""Following steps, on whose first microbatch a cure must hold, too."""
_TRAINED = 8
"""Following steps that a cure must train."""
_HEADROOM = 2.0
"""Factor by which results in fp16 must stay below the largest number, where an overflow is cured."""


@dataclass
class Islands:
    """Modules whose computation in fp32 cures the step; 1-minimal: without any one of them it is not cured."""

    modules: list[str]
    minimal: bool = True
    """Whether every module was tried to be left out."""
    own: list[str] = field(default_factory=list)
    """Modules of the run, which stay."""
    cost: str = ""
    """Memory that they add to a step; empty: it was not measured."""

    @property
    def fp32_modules(self) -> list[str]:
        """All of them."""
        return [*self.own, *self.modules]

    def text(self, remedies: Remedies) -> str:
        """Return what to set, and what it costs."""
        about = ", ".join(filter(None, [self.cost, "" if self.minimal else "not minimal: out of time"]))
        return remedies.modules(self.fp32_modules) + (f"  ({about})" if about else "")


def _needed(names: list[str], cured: Callable[[list[str]], bool]) -> list[str]:
    """Return those that the others do not cure without; each is tried to be left out once."""
    for name in list(names):
        rest = [other for other in names if other != name]
        if rest and cured(rest):
            names = rest
    return names


def find_islands(
    step: Step, finding: Finding, faulty: Callable[[Step], list[str]], goes_on: Callable[[], bool]
) -> Islands | None:
    """Return the islands that cure a finding; None: none were found.

    They grow by diagnosis: the module of the finding, then those of what is found next, such as the same fault in
    every layer; where a module in fp32 does not help, the one that contains it. Then each is tried to be left out.

    Args:
        step: the step.
        finding: in a module of it.
        faulty: returns the modules of a finite step that have faults.
        goes_on: returns whether there is time.
    """
    tried_on = [step.microbatches, *(batches[:1] for batches in step.following(1 + _OTHERS)[1:])]

    def next_faults(modules: list[str]) -> list[str]:
        return _next_faults(step.in_fp32(modules), modules, tried_on, faulty, finding.kind == OVERFLOW)

    modules: list[str] = []
    found = [finding.module]
    while found and all(found) and goes_on():
        for module in found:
            modules = [*(name for name in modules if not f"{name}.".startswith(f"{module}.")), module]
        found = [_outside_of(modules, module) for module in next_faults(modules)]
    if found or not trains_with(step, step.in_fp32(modules).as_run):
        return None
    modules = _needed(modules, lambda rest: goes_on() and not next_faults(rest))
    return Islands(modules, goes_on(), list(step.fp32_modules))


def _outside_of(modules: list[str], module: str) -> str:
    """Return a module; where it is in one of those modules, the module that contains that one."""
    around = next((name for name in modules if f"{module}.".startswith(f"{name}.")), None)
    return module if around is None else around.rpartition(".")[0]


def _next_faults(
    step: Step, modules: list[str], tried_on: list[list[Batch]], faulty: Callable[[Step], list[str]], headroom: bool
) -> list[str]:
    """Return the modules of what is at fault in a step with these islands (empty: in no module); none: nothing is.

    ``headroom``: a fault is also a result in fp16 that is within a factor of the largest number, and may be beyond it
    in the next step.
    """
    try:
        passes = step.as_run()
    except FormatError:  # a module that is never called, such as the output projection of torch's attention
        return modules[-1:]
    nearest = ""

    def note(op: Op) -> None:
        nonlocal nearest
        if not nearest and op.place[1] == FORWARD and _is_near_largest(op):
            nearest = op.place[0]

    for microbatches in tried_on:
        passes.microbatches = microbatches
        nearest = ""
        try:
            with Trace(passes.model, note):
                nonfinite = passes.run_with_backoff().nonfinite
        except RuntimeError:
            nonfinite, found = ["raises"], find_exception(passes, "")
        else:
            found = find_origin(passes, "") if nonfinite else None
        if nonfinite:
            return [found.module if found is not None else ""]
        if headroom and nearest and nearest not in modules:
            return [nearest]
    return faulty(step)


def _is_near_largest(op: Op) -> bool:
    """Return whether a result in fp16 is too near to the largest number; a mask of that number is meant."""
    for tensor in numbers_in(op.result) if op.bare_name not in UNWRITTEN else ():
        if tensor.dtype == torch.float16 and tensor.numel():
            size = tensor.detach().abs()
            size = size[size < FP16.largest]
            if size.numel() and size.max().item() > FP16.largest / _HEADROOM:
                return True
    return False


def trains_with(step: Step, build: Callable[[], Replay]) -> bool:
    """Return whether a step is finite in other passes, and trains on: what follows is finite, too."""
    try:
        passes = build()
        if passes.run_with_backoff([passes.scale, *step.scales[1:]]).nonfinite:
            return False
        scale = passes.scale
        passes = build()
        passes.scale = scale
        return all(map(math.isfinite, passes.train(step.following(_TRAINED))))
    except (FormatError, RuntimeError):
        return False


def measure_cost(step: Step, islands: Islands) -> str:
    """Return what islands cost: how much more memory a step takes with them at its peak."""
    peaks = []
    for side in (step.as_run(), step.in_fp32(islands.modules).as_run()):
        with MemoryLedger(side.model, side.optimizer) as ledger:
            side.run()
        peaks.append(ledger.report().peak_bytes)
    more = peaks[1] - peaks[0]
    return f"{'-' if more < 0 else '+'}{size(abs(more))}"


def locate(step: Step, finding: Finding, fixes: Callable[[Replay], bool], goes_on: Callable[[], bool]) -> None:
    """Name the place in a finding, and what cures it: operators outside of all submodules, submodules, or operators.

    Args:
        step: the step.
        finding: whose place is not known.
        fixes: returns whether another replay of the step does not have the fault.
        goes_on: returns whether there is time.
    """

    def with_modules(names: list[str]) -> Replay:
        return step.in_fp32(names).as_run()

    def with_operators(names: list[str]) -> Replay:
        return step.in_fp32(operators=names).as_run()

    def fixed(build: Callable[[list[str]], Replay], names: list[str]) -> bool:
        try:
            return goes_on() and fixes(build(names))
        except (FormatError, RuntimeError):  # a module that cannot compute in fp32 alone
            return False

    def add_cure(text: str, build: Callable[[list[str]], Replay], names: list[str]) -> None:
        if trains_with(step, lambda: build(names)):
            finding.cure.append(text)

    operators = in_half(step)
    inside = {name for name, module in operators if module}
    outside = {name: line for (name, _), line in operators.items() if name not in inside}
    if outside and fixed(with_operators, list(outside)):
        alone = (name for name in outside if len(outside) > 1 and fixed(with_operators, [name]))
        names = [name] if (name := next(alone, "")) else list(outside)
        finding.line = str(outside[names[0]] or "")
        add_cure(step.remedies.operators(names), with_operators, names)
        return
    for cast in explicit_casts(step.as_run()):
        if fixed(lambda lines: step.without_casts(lines[0]).as_run(), [cast.line]):
            finding.module, finding.line = cast.module, cast.line
            add_cure(NO_CAST, lambda lines: step.without_casts(lines[0]).as_run(), [cast.line])
            return
    passes = step.as_run()
    order: list[str] = []
    passes.forward(Trace(passes.model, returned=lambda name, *_: order.append(name)))
    names = _innermost(passes.model, functools.partial(fixed, with_modules), order)
    if names:
        finding.module = ", ".join(names)
        finding.line = str(line_of_error(step, names[-1]) or "")
        add_cure(step.remedies.modules(names), with_modules, names)
        return
    name = next((name for name in dict.fromkeys(name for name, _ in operators) if fixed(with_operators, [name])), "")
    if name:
        add_cure(step.remedies.operators([name]), with_operators, [name])
    finding.line = str(line_of_error(step, "") or "")


def in_update(step: Step, finding: Finding, fixes: Callable[[Replay], bool]) -> bool:
    """Name the line of the optimizer's step that casts to 16 bits, if the fault is gone without; return whether so."""
    passes = step.as_run()
    line: Line | None = None

    def run(op: Op) -> Any:
        nonlocal line
        if line is None and op.asks_for_half:
            line = user_line()
        with Widened(torch.float32):
            return op.run()

    passes.updates = Trace(None, run=run)
    if not fixes(passes) or line is None:
        return False
    finding.direction, finding.tensor, finding.line = UPDATE, "the optimizer's step", str(line)
    finding.cure = [NO_CAST]
    return True


def _innermost(model: nn.Module, cured: Callable[[list[str]], bool], order: list[str]) -> list[str]:
    """Return the fewest and innermost submodules that cure it together; empty: all of them do not.

    Of several that each cure it alone, that is the one that returns last, as ``order`` says: the others hand on fp32
    numbers, in which it then computes.
    """
    found: list[str] = []
    left = [""]

    def suffice(names: list[str]) -> bool:
        return cured([*left, *found, *names])

    while left:
        name = left.pop()
        inner = [f"{name}.{child}".lstrip(".") for child, _ in model.get_submodule(name).named_children()]
        inner.sort(key=functools.partial(_returned_last, order))
        if not inner or not suffice(inner):
            found.append(name)
            continue
        alone = next((child for child in reversed(inner) if len(inner) > 1 and suffice([child])), "")
        left += [alone] if alone else _needed(inner, suffice)
    return [name for name in found if name]


def _returned_last(order: list[str], module: str) -> int:
    """Return the last place of a module, or of one in it, in the order in which modules return."""
    return max((place for place, name in enumerate(order) if f"{name}.".startswith(f"{module}.")), default=-1)


def in_half(step: Step) -> dict[tuple[str, str], Line | None]:
    """Return the first line of each operator that computes in 16 bits in the forward pass, by its name and module."""
    passes = step.as_run()
    found: dict[tuple[str, str], Line | None] = {}

    def note(op: Op) -> None:
        if op.computes and any(each.dtype in HALF for each in numbers_in(op.result)):
            found.setdefault((spelled(op.name), op.place[0]), op.line)

    passes.forward(Trace(passes.model, note))
    return found


def spelled(operator: str) -> str:
    """Return the name of an operator among ``fp32_ops``."""
    name = functional_name(operator)
    return {"mm": "matmul", "bmm": "matmul", "addmm": "linear"}.get(name, name)


def _results(passes: Replay, module: str) -> list[tuple[str, Line | None, Tensor]]:
    """Return what the operators of a module compute in the forward pass, but for views and casts."""
    found: list[tuple[str, Line | None, Tensor]] = []

    def note(op: Op) -> None:
        inside = not module or f"{op.place[0]}.".startswith(f"{module}.")
        if inside and op.computes:
            found.extend((op.name, op.line, tensor.detach().clone()) for tensor in numbers_in(op.result)[:1])

    passes.forward(Trace(passes.model, note))
    return found


def line_of_error(step: Step, module: str) -> Line | None:
    """Return the line of a module's forward pass at which the error against the reference jumps.

    Args:
        step: the step.
        module: its name; an empty string: the whole model.
    """
    exact = step.exact()
    sides = [_results(passes, module) for passes in (step.as_run(), exact)]
    worst, jump, before = None, 0.0, step.format.number.unit_roundoff
    for (name, line, low), (other, _, exact) in zip(*sides, strict=False):
        if name != other or low.shape != exact.shape:
            break
        error = relative_error(low, exact)
        if error / before > jump and line is not None:
            worst, jump = line, error / before
        before = max(before, 0.0 if math.isnan(error) else error)
    return worst
