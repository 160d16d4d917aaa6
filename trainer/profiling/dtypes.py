"""In which dtypes each module of a model computes, seen in a forward pass that really runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.display import dtype_name
from trainer.profiling.ledger import tensors

LOSS = "(loss)"
"""Stands for what a recipe's loss computes outside of the model."""

_MOVES = {"_to_copy", "clone", "contiguous", "copy_", "detach", "lift_fresh", "_unsafe_view"}
_FILLS = {"fill_", "zero_", "empty_like", "full_like", "ones_like", "zeros_like"}
_EXCHANGES = {"c10d", "_c10d_functional", "fsdp"}


class ModuleDtypes(TorchDispatchMode):
    """Sees which operators each module runs itself (not through its children), and what it returns.

    An operator computes in the dtype of its result, or in fp8 where its first input is. Views, copies, casts, fills and
    exchanges between ranks compute nothing; nor do operators without a floating-point input and result.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._running = [LOSS]
        self._compute: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
        self._output: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._begin, name), prepend=True))
            self._hooks.append(module.register_forward_hook(partial(self._end, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count its dtype for the module that runs."""
        result = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if getattr(func, "is_view", False) or space in _EXCHANGES or name in _MOVES | _FILLS or name.startswith("new_"):
            return result
        given = next((tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point()), None)
        made = next(tensors(result), None)
        if given is not None and made is not None and made.is_floating_point():
            self._compute[self._running[-1]][given.dtype if given.itemsize == 1 else made.dtype] += 1
        return result

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        self._running.append(name)

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        self._output[name].update(tensor.dtype for tensor in tensors(output) if tensor.is_floating_point())

    def rows(self) -> list[dict[str, str]]:
        """Return the modules that have weights or operators of their own.

        Each with its name, its type, and the dtypes of its own weights, of its own operators (most of them first; none
        if it was not called), and of what it returns.
        """
        rows = []
        modules = [(name, type(module).__name__, module) for name, module in self._model.named_modules()]
        for name, kind, module in [*modules, (LOSS, "", nn.Module())]:
            weights = Counter(weight.dtype for weight in module.parameters(recurse=False))
            if weights or self._compute[name]:
                dtypes = {"weights": weights, "compute": self._compute[name], "output": self._output[name]}
                rows.append({"module": name, "type": kind} | {key: _names(value) for key, value in dtypes.items()})
        return rows


def _names(dtypes: Counter[torch.dtype]) -> str:
    return ", ".join(dtype_name(dtype) for dtype, _ in dtypes.most_common())
