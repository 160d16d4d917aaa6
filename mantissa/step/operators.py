"""Operators that compute in fp32, whatever autocast does: ``mantissa.fp32_ops`` and ``precision.fp32_ops``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.overrides import TorchFunctionMode

from mantissa.errors import UsageError, names_in, nearest
from mantissa.step import islands
from mantissa.tensors import tensors

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GROUPS = ("special", "linalg", "fft")
"""Modules of torch whose name torch puts before those of their functions."""
HOLDERS = (F, torch, Tensor, *(getattr(torch, group) for group in GROUPS))
"""Where torch has the operators that can be named."""


class OperatorPolicy(TorchFunctionMode):
    """Casts the tensors that some operators get to fp32, replaces the dtypes they are told, and turns autocast off.

    fp64 and ``out=`` are left alone. What an operator calls inside follows that operator.

    Args:
        device_type: of the autocast that is turned off. Empty: that of the operator's tensors, and without autocast
            results have the dtype of the inputs.
        names: ``softmax`` is F.softmax, torch.softmax and Tensor.softmax; ``matmul`` is ``@``, too.
        result: the dtype of the results (not scalars) of operators whose inputs all have it; None: they stay fp32.
    """

    def __init__(self, device_type: str, names: Iterable[str], result: torch.dtype | None) -> None:
        super().__init__()
        self.device_type = device_type
        self.names = {spelling for name in names for spelling in spellings(name)}
        self.result = result

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Every function of torch comes by here: the others are called as they are.
        if name_of(function) not in self.names:
            return function(*args, **kwargs)
        # Inputs in fp32.
        given: list[torch.dtype] = []
        args = _cast(args, given)
        kwargs = {name: value if name == "out" else _cast(value, given) for name, value in kwargs.items()}
        # The result in the dtype that the code around expects.
        kind, result = self.device_type, self.result
        if not kind:
            kind = next((tensor.device.type for tensor in tensors((args, kwargs))), "cpu")
            result = given[0] if given and not torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            output = function(*args, **kwargs)
        if result is None or set(given) != {result}:
            return output
        return islands.cast(output, result, scalars=False)

    @contextmanager
    def beside(self, autocast: AbstractContextManager[Any]) -> Iterator[None]:
        """Return the context of both for one forward pass."""
        with autocast, self:
            yield


def fp32_ops(names: str | Iterable[str], device_type: str = "") -> OperatorPolicy:
    """Return a context for forward and loss in which operators, such as ``softmax``, compute in fp32.

    They go by the functions that the code calls: an ``nn.Linear`` calls ``linear``, not ``addmm``.

    Raises:
        UsageError: torch has no such operator.
    """
    bare = [name.rpartition(".")[2].removeprefix("_") for name in names_in("names", names)]  # of aten._X, torch.X, F.X
    check_operators(bare)
    return OperatorPolicy(device_type, bare, None)


def check_operators(names: Iterable[str]) -> None:
    """Raise UsageError where one is no operator."""
    for name in names:
        if not is_operator(name):
            near = nearest(name, filter(is_operator, (each for holder in HOLDERS for each in dir(holder))))
            raise UsageError(f"fp32_ops: torch has no operator {name!r} that returns a new tensor{near}")


def is_operator(name: str) -> bool:
    """Return whether torch has a function, or a method of tensors, of this name that does not work in place."""
    found = [getattr(holder, name, None) for holder in HOLDERS]
    public = not name.startswith("_") and not name.endswith("_")
    return public and any(callable(each) and not isinstance(each, type) for each in found)


def name_of(function: Any) -> str:
    """Return the name of a function as a TorchFunctionMode gets it, also while torch.compile traces."""
    # Methods such as Tensor.__rsub__ are wrapped, and torch.compile knows them by their wrapper's name.
    name: str = getattr(getattr(function, "__wrapped__", function), "__name__", "")
    return name


def spellings(operator: str) -> tuple[str, ...]:
    """Return all that ``name_of`` returns for one operator: ``sub`` is also ``__rsub__``."""
    return operator, f"__{operator}__", f"__r{operator}__", *(f"{group}_{operator}" for group in GROUPS)


def _cast(value: Any, given: list[torch.dtype]) -> Any:
    """Cast the tensors in an argument, and replace dtypes; ``given`` gets those that decide the result's dtype."""
    if type(value) in (list, tuple):
        return type(value)([_cast(item, given) for item in value])
    tensor = isinstance(value, Tensor)
    before = value.dtype if tensor else value
    if not isinstance(before, torch.dtype) or not before.is_floating_point:
        return value
    if not tensor or value.ndim:  # a scalar does not promote
        given.append(before)
    if before not in _FLOATS:
        return value
    return value.float() if tensor else torch.float32


# What torch.compile leaves out of its graphs runs eagerly, and this code with it: alone it would be compiled for every
# function that is called, and torch (2.11 to 2.15) confuses those that read attributes.
for _code in (OperatorPolicy.__torch_function__.__code__, _cast.__code__):
    set_code_exec_strategy(_code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
