"""What a step raises: the module, the operator and the line."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa import places
from mantissa.display import dtype_name
from mantissa.finding import EXCEPTION, FORWARD, Finding
from mantissa.modules import ModuleTracer
from mantissa.step import Replay
from mantissa.tensors import numbers_in


class _Last(TorchDispatchMode):
    """Keeps which operator ran last."""

    def __init__(self, modules: ModuleTracer) -> None:
        super().__init__()
        self._modules = modules
        self.place, self.op, self.dtypes = ("", FORWARD), "", ""
        self.line: places.Line | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.place, self.line, self.op = self._modules.place(), self._modules.line(), str(func).rpartition(".")[0]
        self.dtypes = ", ".join(dict.fromkeys(dtype_name(each.dtype) for each in numbers_in((args, kwargs))))
        return func(*args, **(kwargs or {}))


def raised(passes: Replay, format: str) -> Finding | None:
    """Take the passes of a step, and return what they raise; None: nothing."""
    modules = ModuleTracer(passes.model)
    try:
        with modules, _Last(modules) as last:
            passes.run()
    except Exception as error:  # whatever a model and a format can raise
        line = places.of_error(error)
        module, direction = last.place
        if line is not None and line != last.line:  # raised before an operator ran
            module, direction = _running(passes.model, error), FORWARD
        at = {"op": last.op, "dtype": last.dtypes} if line in (None, last.line) else {}
        text = str(error).strip().partition("\n")[0][:300]
        detail = f"{type(error).__name__}: {text}"
        return Finding(EXCEPTION, direction, module, format, detail=detail, line=str(line or last.line or ""), **at)
    return None


def _running(model: nn.Module, error: BaseException) -> str:
    """Return the innermost module in whose code an error was raised."""
    names, found, trace = {id(module): name for name, module in model.named_modules()}, "", error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
