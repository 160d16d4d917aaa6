"""Which module an operator belongs to, in the forward pass and in the backward pass."""

from __future__ import annotations

import bisect
import functools
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa import places
from mantissa.finding import BACKWARD, FORWARD
from mantissa.places import Line


class ModuleTracer:
    """Follows the calls of a model's modules, and finds the module of an autograd node by the node's sequence number.

    Autograd numbers the nodes of a thread in the order of the forward pass. So the number at each begin and end of a
    module says which nodes are its own, in any backward pass of those forward passes, whatever is recomputed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._owners: list[str] = []
        self._lines: dict[int, Line] = {}
        """By sequence number: of the forward code that made the autograd node."""
        self._hooks = ExitStack()
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            before = module.register_forward_pre_hook(functools.partial(self._begin, name), prepend=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(module.register_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)
        self._note()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:  # an error in a pre-hook ends modules that never began
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        if torch._C._current_autograd_node() is None:  # what is recomputed in the backward pass makes no new nodes
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._owners.append(self.module())

    @property
    def inside(self) -> bool:
        """Whether a module's forward runs now."""
        return bool(self._stack)

    def line(self) -> Line | None:
        """Return the line of the forward code to which the operator belongs that runs now.

        Backward operators are found if this was called at every operator of the forward pass.
        """
        node, line = torch._C._current_autograd_node(), places.of_stack()
        if node is not None:
            return line or self._lines.get(node._sequence_nr())
        if line is not None:
            self._lines.setdefault(torch.autograd._get_sequence_nr() - 1, line)
        return line

    def module(self) -> str:
        """Return the name of the module whose forward runs now; an empty string: none, or the model itself."""
        return self._stack[-1] if self._stack else ""

    def place(self) -> tuple[str, str]:
        """Return the module and the direction of the operator that runs now."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return self.module(), FORWARD
        variable = getattr(node, "variable", None)
        if variable is not None and places.of_stack() is not None:  # a hook of a weight
            return "", BACKWARD
        if variable is not None:  # AccumulateGrad
            return self._parameters.get(id(variable), "").rpartition(".")[0], BACKWARD
        return self.owner_of(node), BACKWARD

    def owner_of(self, node: Any) -> str:
        """Return the module whose forward pass made an autograd node."""
        position = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._owners[position] if position >= 0 else ""

    def line_of(self, node: Any) -> Line | None:
        """Return the line of the forward code that made an autograd node."""
        return self._lines.get(node._sequence_nr())


class Lines(TorchDispatchMode):
    """Lets a tracer see the lines of all operators."""

    def __init__(self, modules: ModuleTracer) -> None:
        super().__init__()
        self.modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.modules.line()
        return func(*args, **(kwargs or {}))
