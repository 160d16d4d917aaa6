"""Where a format that trains worse does so: the fewest modules, or operators, that have to compute in fp32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.doctor.islands import holds
from mantissa.doctor.manifest import explicit_cast
from mantissa.dtypes import DtypeRecorder
from mantissa.errors import FormatError
from mantissa.finding import UPDATE, Finding
from mantissa.modules import ModuleTracer
from mantissa.places import Line, of_stack
from mantissa.step import Replay, Step, Widened, map_tensors
from mantissa.tensors import numbers_in, relative_error

_TRIALS = 40


class _Search:
    """Tries fp32 modules and operators, as long as there is time."""

    def __init__(self, step: Step, mends: Callable[[Replay], bool], time_left: Callable[[], float]) -> None:
        self.step, self._mends, self._time_left = step, mends, time_left
        self._trials = 0

    def with_modules(self, names: list[str], casts: bool = True) -> Replay:
        """Return passes with these modules in fp32; without ``casts``, their explicit ones have no effect."""
        return _without_casts(self.step.as_run([*self.step.fp32_modules, *names]), names, casts)

    def with_operators(self, names: list[str]) -> Replay:
        return self.step.as_run(fp32_ops=[*self.step.fp32_ops, *names])

    def mended(self, build: Callable[..., Replay], *arguments: Any) -> bool:
        """Return whether such passes mend it."""
        self._trials += 1
        if self._trials > _TRIALS or self._time_left() <= 0:
            return False
        try:
            return self._mends(build(*arguments))
        except (FormatError, RuntimeError):  # a module that cannot compute in fp32 alone
            return False

    def cure(self, text: str, build: Callable[..., Replay], *arguments: Any) -> list[str]:
        """Return what mends the step as a cure, if the steps that follow can be trained so, too."""
        return [text] if holds(self.step, functools.partial(build, *arguments)) else []


def locate(
    step: Step,
    finding: Finding,
    mends: Callable[[Replay], bool],
    time_left: Callable[[], float],
) -> None:
    """Name the place in a finding, and what mends it.

    Args:
        step: the step.
        finding: whose place is not known.
        mends: whether other passes of the step do not have the fault.
        time_left: seconds.
    """
    search = _Search(step, mends, time_left)
    model = step.as_run().model
    outside = _in_half(step, outside=True)
    by_operators = functools.partial(search.mended, search.with_operators)
    if outside and by_operators(outside):
        names = next(([name] for name in outside if len(outside) > 1 and by_operators([name])), outside)
        finding.line = str(_line_of(step, names[0]) or "")
        finding.cure += search.cure(step.remedies.operators(names), search.with_operators, names)
        return
    for casts in (True, False):
        build = functools.partial(search.with_modules, casts=casts)
        found = _fewest(model, functools.partial(search.mended, build))
        if found:
            finding.module = ", ".join(found)
            finding.line = str(line_of_error(step, found[-1]) or "")
            cure = step.remedies.modules(found)
            if not casts and (cast := explicit_cast(step.replay("fp32"), found)):
                finding.line, cure = str(cast.line), "no cast to 16 bits in this line"
            finding.cure += search.cure(cure, build, found)
            return
    name = next((name for name in _in_half(step) if by_operators([name])), "")
    if name:
        finding.cure += search.cure(step.remedies.operators([name]), search.with_operators, [name])
    cast = explicit_cast(step.replay("fp32"), [""])
    finding.line = str((cast.line if cast else line_of_error(step, "")) or "")


def in_update(step: Step, finding: Finding, mends: Callable[[Replay], bool]) -> bool:
    """Name the line of the optimizer's step that casts to 16 bits, if the fault is gone without; return whether so."""
    passes = step.as_run()
    passes.updates = casts = _Noted(torch.float32)
    if not mends(passes) or casts.line is None:
        return False
    finding.direction, finding.tensor, finding.line = UPDATE, "the optimizer's step", str(casts.line)
    finding.cure = ["no cast to 16 bits in this line"]
    return True


class _Noted(Widened):
    """Keeps the first line whose cast it has widened."""

    line: Line | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.line is None and (kwargs or {}).get("dtype") in (torch.float16, torch.bfloat16):
            self.line = of_stack()
        return super().__torch_dispatch__(func, types, args, kwargs)


def _fewest(model: nn.Module, mended: Callable[[list[str]], bool]) -> list[str]:
    """Return the fewest and innermost submodules that mend it together; empty: all of them do not."""
    found = [name for name, _ in model.named_children()]
    if not found or not mended(found):
        return []
    while True:
        alone = next((name for name in found if len(found) > 1 and mended([name])), None)
        if alone is not None:
            found = [alone]
        elif len(found) > 1:
            for name in list(found):
                rest = [other for other in found if other != name]
                if len(rest) and mended(rest):
                    found = rest
        if len(found) != 1:
            return found
        inner = [f"{found[0]}.{name}" for name, _ in model.get_submodule(found[0]).named_children()]
        if not inner or not mended(inner):
            return found
        found = inner


def _without_casts(passes: Replay, names: Iterable[str], casts: bool) -> Replay:
    for module in () if casts else map(passes.model.get_submodule, names):
        module.forward = functools.partial(_widened, module.forward)
    return passes


def _widened(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Widened(torch.float32):
        return forward(*args, **kwargs)


def _in_half(step: Step, outside: bool = False) -> list[str]:
    """Return the names of the operators that compute in 16 bits in the forward pass; ``outside``: in no submodule."""
    passes = step.as_run()
    with DtypeRecorder(passes.model) as recorder:
        passes.loss(step.first_samples()[0])
    rows = [(SPELLED.get(row.name, row.name).strip("_"), row.module) for row in recorder.rows() if row.in_half]
    inside = {name for name, module in rows if module}
    names = dict.fromkeys(name for name, _ in rows if not (outside and name in inside))
    return [name for name in names if name not in _MOVES]


_MOVES = ("to_copy", "copy", "clone", "detach", "view", "unsafe_view", "t", "transpose", "expand", "slice", "select")


def _line_of(step: Step, operator: str) -> Line | None:
    """Return the first line outside of all submodules that calls an operator."""
    found = _results(step.as_run(), "", outside=True)
    return next((line for name, line, _ in found if SPELLED.get(name, name).strip("_") == operator), None)


SPELLED = {"mm": "matmul", "bmm": "matmul", "addmm": "linear", "_softmax": "softmax", "_log_softmax": "log_softmax"}


class _Results(TorchDispatchMode):
    """Keeps what the operators of a module compute in the forward pass, but for views and casts."""

    def __init__(self, modules: ModuleTracer, module: str, outside: bool) -> None:
        super().__init__()
        self._modules, self._module, self._outside = modules, module, outside
        self.found: list[tuple[str, Line | None, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = self._modules.module()
        inside = place == self._module or (not self._outside and f"{place}.".startswith(f"{self._module}.".lstrip(".")))
        name = str(func).rpartition(".")[0].removeprefix("aten.")
        if inside and not func.is_view and name.strip("_") not in _MOVES:
            for tensor in numbers_in(result)[:1]:
                self.found.append((name, self._modules.line(), tensor.detach().clone()))
        return result


def _results(passes: Replay, module: str, outside: bool) -> list[tuple[str, Line | None, Tensor]]:
    modules = ModuleTracer(passes.model)
    passes.start()
    with modules, passes.around(), _Results(modules, module, outside) as results:
        passes.loss(map_tensors(passes.step.first_samples()[0], passes.widened))
    return results.found


def line_of_error(step: Step, module: str, outside: bool = False) -> Line | None:
    """Return the line of a module's forward pass at which the error against the reference jumps.

    Args:
        step: the step.
        module: its name; an empty string: the whole model.
        outside: whether its submodules are left out.
    """
    exact = step.reference(torch.float32 if step.format.half is not None else torch.float64)
    sides = [_results(passes, module, outside) for passes in (step.as_run(), exact)]
    worst, jump, before = None, 0.0, step.format.number.unit_roundoff
    for (name, line, low), (other, _, exact) in zip(*sides, strict=False):
        if name != other or low.shape != exact.shape:
            break
        error = relative_error(low, exact)
        if error / before > jump and line is not None:
            worst, jump = line, error / before
        before = max(before, 0.0 if math.isnan(error) else error)
    return worst
