"""The fewest modules that have to compute in fp32 for a step to be finite again, and what they cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mantissa.display import size
from mantissa.doctor.provenance import find
from mantissa.errors import FormatError
from mantissa.finding import Finding
from mantissa.step import Batch, Step

CALLS = 40
"""Trials, at most."""
_OTHERS = 3
"""Following steps, on whose first microbatch a cure must hold, too."""
_PAIRS = 3
"""Timed steps with and without the islands, after one of each that is not timed."""


@dataclass
class Islands:
    """Modules whose computation in fp32 cures the step; 1-minimal: without any one of them it is not cured."""

    modules: list[str] = field(default_factory=list)
    cured: bool = False
    minimal: bool = False
    """Whether every module was tried to be left out."""
    own: list[str] = field(default_factory=list)
    """Of the run, which stay."""
    calls: int = 0
    time_ratio: float | None = None
    """Of a step with the islands to one without; None: not measured."""
    memory_bytes: int | None = None
    """What they add to the peak of a step."""

    @property
    def fp32_modules(self) -> list[str]:
        """All of them."""
        return [*self.own, *self.modules]

    @property
    def override(self) -> str:
        """What to set. A name such as 0.10 is quoted, or it would be read as a number."""
        names = [name if any(map(str.isalpha, name)) else f"'{name}'" for name in self.fp32_modules]
        return f"precision.fp32_modules=[{','.join(names)}]"

    @property
    def cost(self) -> str:
        """What they add to a step, as far as it was measured, and whether they may be more than needed."""
        price = []
        if self.time_ratio is not None:
            price.append(f"{self.time_ratio - 1:+.0%} time")
        if self.memory_bytes is not None:
            price.append(f"{'-' if self.memory_bytes < 0 else '+'}{size(abs(self.memory_bytes))}")
        return ", ".join(price + ([] if self.minimal else ["not minimal: out of time"]))

    def text(self) -> str:
        """Return a line for the terminal."""
        if not self.cured:
            return "islands: no fp32 modules that cure this step were found"
        return f'islands: "{self.override}"' + (f"  ({self.cost})" if self.cost else "")


def search(
    step: Step, finding: Finding, healthy: Callable[[list[str]], bool], time_left: Callable[[], float]
) -> Islands:
    """Return the islands that cure a finding.

    They grow by diagnosis: the module of the finding, then that of what is found next; where a module in fp32 does
    not help, the one that contains it. Then each is tried to be left out.

    Args:
        step: the step.
        finding: in a module of it.
        healthy: returns whether the step has no other fault with these ``fp32_modules``. (That it is finite is
            checked here.)
        time_left: seconds.
    """
    result = Islands(own=list(step.fp32_modules))
    tried_on = [step.microbatches, *(batches[:1] for batches in step.following(1 + _OTHERS)[1:])]

    def may_go_on() -> bool:
        return result.calls < CALLS and time_left() > 0

    def next_fault(modules: list[str]) -> str | None:
        result.calls += 1
        return _next_fault(step, modules, tried_on, healthy)

    module: str | None = finding.module
    while module and may_go_on():
        result.modules = [*(name for name in result.modules if not name.startswith(f"{module}.")), module]
        module = next_fault(result.modules)
        # In an island already: the module that contains the island.
        inside = [name for name in result.modules if module and f"{module}.".startswith(f"{name}.")]
        module = inside[0].rpartition(".")[0] if inside else module
    if module is not None:
        return result
    result.cured = result.minimal = True
    for name in list(result.modules):
        others = [other for other in result.modules if other != name]
        if not others:
            break
        if not may_go_on():
            result.minimal = False
            break
        if next_fault(others) is None:
            result.modules = others
    return result


def _next_fault(
    step: Step, modules: list[str], tried_on: list[list[Batch]], healthy: Callable[[list[str]], bool]
) -> str | None:
    """Return the module of the next fault with these islands (empty: it is in none); None: there is no fault."""
    fp32_modules = [*step.fp32_modules, *modules]
    try:
        passes = step.own(fp32_modules)
    except FormatError:  # a module that is never called, such as the output projection of torch's attention
        return modules[-1]
    for microbatches in tried_on:
        passes.microbatches = microbatches
        if passes.until_finite().harmed:
            found = find(passes, "")
            return found.module if found is not None else ""
    return None if healthy(fp32_modules) else modules[-1]


def price(step: Step, result: Islands) -> None:
    """Measure what the islands cost: steps with and without them in turns, and the peak of a step's memory."""
    sides = [step.own(), step.own(result.fp32_modules)]
    without, with_them = [side.peak_bytes() for side in sides]
    result.memory_bytes = with_them - without
    ratios = []
    for _ in range(_PAIRS):
        seconds = []
        for side in sides:
            side.start()
            began = time.perf_counter()
            side.gradients(side.microbatches)
            if step.device.type != "cpu":
                torch.accelerator.synchronize(step.device)
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[1] / seconds[0])
    result.time_ratio = statistics.median(ratios)
