"""The dtypes in which operators really compute and modules really return."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.display import dtype_name
from mantissa.finding import FORWARD
from mantissa.modules import ModuleTracer
from mantissa.tensors import numbers_in

_HALF = {dtype_name(dtype) for dtype in (torch.float16, torch.bfloat16)}
CAST = "aten._to_copy"
LOSS = "(loss)"
"""Stands for what is computed outside of the model."""
_MOVES = {"_to_copy", "clone", "contiguous", "copy_", "detach", "lift_fresh", "_unsafe_view"}
_FILLS = {"fill_", "zero_", "empty_like", "full_like", "ones_like", "zeros_like"}
_EXCHANGES = {"c10d", "_c10d_functional", "fsdp"}


class Row(NamedTuple):
    """How often an operator ran in one module, one direction and these formats."""

    module: str
    direction: str
    op: str
    inputs: str
    """The floating-point dtypes of its inputs, without repetition."""
    output: str
    calls: int

    @property
    def in_half(self) -> bool:
        """Whether it is of the forward pass, with a result in 16 bits."""
        return self.direction == FORWARD and _is_half(self.output)

    @property
    def name(self) -> str:
        """The operator's name as in ``torch.nn.functional``."""
        return self.op.removeprefix("aten.").removeprefix("_safe").removeprefix("native").strip("_")


class DtypeRecorder(TorchDispatchMode):
    """Records in which dtypes operators compute and modules return.

    Args:
        model: whose modules are told apart.
        weights: names of those whose casts are followed, by address.
    """

    def __init__(self, model: nn.Module, weights: dict[int, str] | None = None) -> None:
        super().__init__()
        self._model = model
        self._modules = ModuleTracer(model)
        self._weights = weights or {}
        self._hooks = ExitStack()
        self._calls: Counter[tuple[str, str, str, str, str]] = Counter()
        self._computed: defaultdict[str, Counter[torch.dtype]] = defaultdict(Counter)
        self.outputs: defaultdict[str, Counter[torch.dtype]] = defaultdict(Counter)
        """By module: of the floating-point tensors that it returns."""
        self.casts: dict[tuple[str, str], str] = {}
        """Of weights to 16 bits in the forward pass: the weight's name, the module that casts, and the dtype."""

    def __enter__(self) -> Self:
        self._modules.__enter__()
        for name, module in self._model.named_modules():
            self._hooks.callback(module.register_forward_hook(partial(self._returned, name)).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__()
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        results = "" if getattr(func, "is_view", False) else _names(numbers_in(output))
        if not results:
            return output
        name = str(func).rpartition(".")[0]
        given = numbers_in((args, kwargs))
        module, direction = self._modules.place()
        self._calls[module, direction, name, _names(given), results] += 1
        if given and direction == FORWARD and _computes(name):
            # An operator in fp8 has a result in another dtype.
            dtype = given[0].dtype if given[0].itemsize == 1 else numbers_in(output)[0].dtype
            self._computed[module if self._modules.inside else LOSS][dtype] += 1
        if self._weights and name == CAST and direction == FORWARD and _is_half(results):
            weight = self._weights.get(args[0].data_ptr())
            if weight is not None:
                self.casts[weight, module] = results
        return output

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs[name].update(tensor.dtype for tensor in numbers_in(output))

    def rows(self) -> list[Row]:
        """Return what ran, in order of the first calls."""
        return [Row(*key, calls) for key, calls in self._calls.items()]

    def modules(self) -> list[dict[str, str]]:
        """Return the modules that have weights or operators of their own (not through their children).

        Each with its name, its type, and the dtypes of its own weights, of its own operators (most of them first; none
        if it was not called), and of what it returns. An operator computes in the dtype of its result, or in fp8 where
        its first input is. Views, copies, casts, fills and exchanges between ranks compute nothing; nor do operators
        without a floating-point input and result.
        """
        rows = []
        modules = [(name, type(module).__name__, module) for name, module in self._model.named_modules()]
        for name, kind, module in [*modules, (LOSS, "", nn.Module())]:
            weights = Counter(weight.dtype for weight in module.parameters(recurse=False))
            if weights or self._computed[name]:
                dtypes = {"weights": weights, "compute": self._computed[name], "output": self.outputs[name]}
                named = {key: [dtype_name(dtype) for dtype, _ in found.most_common()] for key, found in dtypes.items()}
                rows.append({"module": name, "type": kind} | {key: ", ".join(found) for key, found in named.items()})
        return rows


def _computes(operator: str) -> bool:
    space, _, name = operator.partition(".")
    return space not in _EXCHANGES and name not in _MOVES | _FILLS and not name.startswith("new_")


def _names(found: list[Tensor]) -> str:
    return ", ".join(dict.fromkeys(dtype_name(each.dtype) for each in found))


def _is_half(dtypes: str) -> bool:
    return not _HALF.isdisjoint(dtypes.split(", "))
