"""The fewest modules that have to compute in fp32 for a step to be finite again, and what they cost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.display import size
from mantissa.doctor.exceptions import raised
from mantissa.doctor.provenance import find
from mantissa.doctor.tape import UNWRITTEN
from mantissa.errors import FormatError
from mantissa.finding import FORWARD, OVERFLOW, Finding
from mantissa.formats import FP16
from mantissa.modules import ModuleTracer
from mantissa.step import Batch, Remedies, Replay, Step
from mantissa.tensors import numbers_in

CALLS = 40
"""Trials, at most."""
_OTHERS = 3
"""Following steps, on whose first microbatch a cure must hold, too."""
_TRAINED = 8
"""Following steps that a cure must train."""
_HEADROOM = 2.0
"""Factor by which results in fp16 must stay below the largest number, where an overflow is cured."""
_LEAST_SECONDS = 0.005
"""Of a step whose time is compared: that of a shorter one is noise."""
_PAIRS = 7
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
    time_range: tuple[float, float] = (math.nan, math.nan)
    """The smallest and the largest of the measured ratios."""
    memory_bytes: int | None = None
    """What they add to the peak of a step."""

    @property
    def fp32_modules(self) -> list[str]:
        """All of them."""
        return [*self.own, *self.modules]

    @property
    def cost(self) -> str:
        """What they add to a step, as far as it was measured, and whether they may be more than needed."""
        price = []
        if self.time_ratio is not None:
            low, high = self.time_range
            price.append(f"{self.time_ratio - 1:+.0%} time [{low - 1:+.0%}, {high - 1:+.0%}]")
        if self.memory_bytes is not None:
            price.append(f"{'-' if self.memory_bytes < 0 else '+'}{size(abs(self.memory_bytes))}")
        return ", ".join(price + ([] if self.minimal else ["not minimal: out of time"]))

    def text(self, remedies: Remedies) -> str:
        """Return what to set, and what it costs."""
        return remedies.modules(self.fp32_modules) + (f"  ({self.cost})" if self.cost else "")


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
        return _next_fault(step, modules, tried_on, healthy, finding.kind == OVERFLOW)

    module: str | None = finding.module
    while module and may_go_on():
        result.modules = [*(name for name in result.modules if not name.startswith(f"{module}.")), module]
        module = next_fault(result.modules)
        # In an island already: the module that contains the island.
        inside = [name for name in result.modules if module and f"{module}.".startswith(f"{name}.")]
        module = inside[0].rpartition(".")[0] if inside else module
    if module is not None or not holds(step, lambda: step.as_run(result.fp32_modules)):
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
    step: Step, modules: list[str], tried_on: list[list[Batch]], healthy: Callable[[list[str]], bool], headroom: bool
) -> str | None:
    """Return the module of the next fault with these islands (empty: it is in none); None: there is no fault.

    ``headroom``: a fault is also a result in fp16 that is within a factor of the largest number, and may be beyond it
    in the next step.
    """
    fp32_modules = [*step.fp32_modules, *modules]
    try:
        passes = step.as_run(fp32_modules)
    except FormatError:  # a module that is never called, such as the output projection of torch's attention
        return modules[-1]
    for microbatches in tried_on:
        passes.microbatches = microbatches
        modules_near = ModuleTracer(passes.model)
        try:
            with modules_near, _Nearest(modules_near) as nearest:
                harmed = passes.run_with_backoff().nonfinite
        except RuntimeError:
            harmed, found = ["raises"], raised(passes, "")
        else:
            found = find(passes, "") if harmed else None
        if harmed:
            return found.module if found is not None else ""
        if headroom and nearest.module and nearest.module not in modules:
            return nearest.module
    return None if healthy(fp32_modules) else modules[-1]


class _Nearest(TorchDispatchMode):
    """Notes the first module with a forward result in fp16 that is too near to the largest number."""

    def __init__(self, modules: ModuleTracer) -> None:
        super().__init__()
        self._modules = modules
        self.module = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        module, direction = self._modules.place()
        seen = direction == FORWARD and not self.module and func.__name__.partition(".")[0] not in UNWRITTEN
        for tensor in numbers_in(result) if seen else ():
            if tensor.dtype == torch.float16 and tensor.numel():
                size = tensor.detach().abs()
                size = size[size < FP16.largest]  # a mask of the lowest number is meant
                if size.numel() and size.max().item() > FP16.largest / _HEADROOM:
                    self.module = module
        return result


def holds(step: Step, build: Callable[[], Replay]) -> bool:
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


def price(step: Step, result: Islands) -> None:
    """Measure what the islands cost: steps with and without them in turns, and the peak of a step's memory."""
    sides = [step.as_run(), step.as_run(result.fp32_modules)]
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
        if min(seconds) < _LEAST_SECONDS:
            return
        ratios.append(seconds[1] / seconds[0])
    result.time_ratio, result.time_range = statistics.median(ratios), (min(ratios), max(ratios))
