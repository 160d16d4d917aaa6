"""The operators of a model as they run: each with its module, its direction and its line of code.

``Trace`` is the one dispatch mode that observes; whoever wants to know something of operators visits them through it.
"""

from __future__ import annotations

import bisect
import linecache
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.display import dtype_name
from mantissa.tensors import numbers_in, tensors

CAST = "aten._to_copy"
LOSS = "(loss)"
"""Stands for what is computed outside of the model."""
HALF = (torch.float16, torch.bfloat16)
_HALF_NAMES = {dtype_name(dtype) for dtype in HALF}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "convolution", "convolution_backward")
"""Operators that multiply matrices, by their bare names; fused attention is none of them."""
_MOVES = {"_to_copy", "clone", "contiguous", "copy_", "detach", "lift_fresh", "_unsafe_view"}
_FILLS = {"fill_", "zero_", "empty_like", "full_like", "ones_like", "zeros_like"}
_EXCHANGES = {"c10d", "_c10d_functional", "fsdp"}
FORWARD, BACKWARD = "forward", "backward"
"""Directions in which an operator runs."""
_TORCH, _HERE = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"
_ENGINE = f"{_TORCH}autograd/graph.py"
"""Which starts a backward pass: the frames outside of it belong to the loop, and not to the operator."""
_OUTSIDE = (_ENGINE, f"{_HERE}step/loop.py")
"""So do those outside of a replay of a loop's step: they are where it is examined, or where it is watched."""


class Line(NamedTuple):
    """A line of code."""

    file: str
    number: int

    def __str__(self) -> str:
        path = Path(self.file)
        ours = path.is_relative_to(Path.cwd()) and "site-packages" not in path.parts
        shown = path.relative_to(Path.cwd()) if ours else Path(*path.parts[-2:])
        return f"{shown}:{self.number}: {linecache.getline(self.file, self.number).strip()}"


def user_line() -> Line | None:
    """Return the innermost line that is neither torch's nor this library's, in this pass; None: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_code.co_filename) not in _OUTSIDE:
        if _is_user_code(name):
            return Line(name, frame.f_lineno)
        frame = frame.f_back
    return None


def line_of_exception(error: BaseException) -> Line | None:
    """Return the innermost line of the user's code at which an error was raised."""
    lines = [Line(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if _is_user_code(line.file)), None)


def is_raised_here(error: BaseException) -> bool:
    """Return whether this library's own code raised an error."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return bool(files) and files[-1].startswith(_HERE)


def is_raised_in_model(error: BaseException) -> bool:
    """Return whether the user's code, as torch or a loop calls it, raised an error, whatever it had called."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    theirs = (file for by, file in pairwise(files) if _is_user_code(file) and not by.startswith(f"{_HERE}doctor/"))
    return any(theirs) and not is_raised_here(error)


@cache
def _is_user_code(file: str) -> bool:
    return not file.startswith((_TORCH, _HERE, "<frozen"))


class Site(NamedTuple):
    """Where an operator ran, and what its result was."""

    module: str
    """Name of the module; empty: the model itself, or the loss."""
    direction: str
    op: str
    """Name of the operator, such as ``aten.mm``."""
    dtype: str
    shape: tuple[int, ...]
    line: str


class Op:
    """An operator of a trace. Its module, direction and line are known only while it runs, and in its visitors.

    Args:
        trace: that sees it.
        func: torch's overload.
        args: of the call.
        kwargs: of the call.
    """

    def __init__(self, trace: Trace, func: Any, args: Any, kwargs: Any) -> None:
        self.number = trace.count
        """Number among all operators of the trace, from 0."""
        self.func, self.args, self.kwargs = func, args, kwargs
        self.result: Any = None
        """Result of the call; None: it has not run yet."""
        self._trace = trace

    def run(self) -> Any:
        """Compute the result, as torch does."""
        return self.func(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """Name with its namespace, such as ``aten.mm``."""
        return _name_of(self.func)

    @property
    def bare_name(self) -> str:
        """Name alone, such as ``mm``."""
        return self.name.rpartition(".")[2]

    @property
    def is_view(self) -> bool:
        """Whether the result has no values of its own."""
        return getattr(self.func, "is_view", False)

    @property
    def computes(self) -> bool:
        """Whether it makes new values: it is no view, copy, cast or fill, and no exchange between ranks."""
        space, _, name = self.name.partition(".")
        moves = space in _EXCHANGES or name in _MOVES | _FILLS or name.startswith("new_")
        return not self.is_view and not moves

    @property
    def is_mutable(self) -> bool:
        """Whether it changes an input in place."""
        return bool(self.func._schema.is_mutable)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """Tensors that it is given."""
        return tensors((self.args, self.kwargs))

    @property
    def results(self) -> list[Tensor]:
        """Tensors that it returned."""
        return tensors(self.result)

    @property
    def asks_for_half(self) -> bool:
        """Whether the call names a 16-bit dtype for the result."""
        return self.kwargs.get("dtype") in HALF

    @property
    def casts_to_half(self) -> bool:
        """Whether it is a cast to 16 bits."""
        return self.name == CAST and self.asks_for_half

    @property
    def in_backward(self) -> bool:
        """Whether the backward pass runs it, also to recompute the forward pass."""
        return torch._C._current_autograd_node() is not None

    @property
    def place(self) -> tuple[str, str]:
        """Module that runs it, and the direction; an empty name: the model itself, or the loss."""
        return self._trace.place()

    @property
    def line(self) -> Line | None:
        """Line of the forward code that it belongs to; of a backward operator only where the trace keeps lines."""
        return self._trace.line()

    def site(self, result: Tensor) -> Site:
        """Return where it runs, and what one of its results is."""
        module, direction = self.place
        return Site(module, direction, self.name, dtype_name(result.dtype), tuple(result.shape), str(self.line or ""))


@cache
def _name_of(func: Any) -> str:
    return str(func).rpartition(".")[0]


class Trace(TorchDispatchMode):
    """Sees every operator that runs, and knows its module, its direction and its line of code.

    Autograd numbers the nodes of a thread in the order of the forward pass. So the number at each begin and end of a
    module says which nodes are its own, in any backward pass of those forward passes, whatever is recomputed.

    Args:
        model: whose modules are told apart; None: none are.
        visit: is called with each operator after it ran.
        run: runs an operator, in the place of ``Op.run``.
        returned: is called with the name, the module and the result of each call of a module.
        lines: whether the lines of all operators are kept, in which those of the backward pass are found.
    """

    def __init__(
        self,
        model: nn.Module | None,
        visit: Callable[[Op], None] | None = None,
        *,
        run: Callable[[Op], Any] = Op.run,
        returned: Callable[[str, nn.Module, Any], None] | None = None,
        lines: bool = False,
    ) -> None:
        super().__init__()
        self.count = 0
        """Number of operators so far."""
        self._named = list(model.named_modules()) if model is not None else []
        self._parameters = {id(weight): name for name, weight in model.named_parameters()} if model is not None else {}
        self._visit, self._run, self._returned, self._keeps_lines = visit, run, returned, lines
        self._stack: list[str] = []
        """Names of the modules whose forward runs now."""
        self._numbers: list[int] = []
        """Numbers of autograd nodes at which another module begins to own them."""
        self._owners: list[str] = []
        """Names of those modules."""
        self._lines: dict[int, Line] = {}
        """Line of the forward code that made an autograd node, by the node's number."""
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._named:
            before = module.register_forward_pre_hook(partial(self._begin, name), prepend=True)
            self._hooks.callback(before.remove)
            after = module.register_forward_hook(partial(self._end, name), always_call=True)
            self._hooks.callback(after.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # torchao's tensors, which call plain operators
            return NotImplemented
        op = Op(self, func, args, kwargs or {})
        self.count += 1
        if self._keeps_lines:
            self.line()
        op.result = self._run(op)
        if self._visit is not None:
            self._visit(op)
        return op.result

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)
        self._note_owner()

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:  # an error in a pre-hook ends modules that never began
            self._stack.pop()
        self._note_owner()
        if self._returned is not None:
            self._returned(name, module, output)

    def _note_owner(self) -> None:
        if torch._C._current_autograd_node() is None:  # what is recomputed in the backward pass makes no new nodes
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._owners.append(self.module())

    def module(self) -> str:
        """Return the name of the module whose forward runs now; an empty string: none, or the model itself."""
        return self._stack[-1] if self._stack else ""

    def place(self) -> tuple[str, str]:
        """Return the module and the direction of the operator that runs now."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return self.module(), FORWARD
        variable = getattr(node, "variable", None)
        if variable is not None and user_line() is not None:  # a hook of a weight
            return "", BACKWARD
        if variable is not None:  # AccumulateGrad
            return self._parameters.get(id(variable), "").rpartition(".")[0], BACKWARD
        return self.owner_of(node), BACKWARD

    def line(self) -> Line | None:
        """Return the line of the forward code to which the operator belongs that runs now."""
        node, line = torch._C._current_autograd_node(), user_line()
        if node is not None:
            return line or self.line_of(node)
        if line is not None:
            self._lines.setdefault(torch.autograd._get_sequence_nr() - 1, line)
        return line

    def owner_of(self, node: Any) -> str:
        """Return the module whose forward pass made an autograd node."""
        position = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._owners[position] if position >= 0 else ""

    def line_of(self, node: Any) -> Line | None:
        """Return the line of the forward code that made an autograd node."""
        return self._lines.get(node._sequence_nr())


class Row(NamedTuple):
    """How often an operator ran in one module, one direction and these formats."""

    module: str
    direction: str
    op: str
    inputs: str
    """Floating-point dtypes of its inputs, without repetition."""
    output: str
    calls: int

    @property
    def in_half(self) -> bool:
        """Whether it is of the forward pass, with a result in 16 bits."""
        return self.direction == FORWARD and _is_half(self.output)

    @property
    def name(self) -> str:
        """Operator's name as in ``torch.nn.functional``."""
        return functional_name(self.op)


class DtypeRecorder(Trace):
    """Records in which dtypes operators compute and modules return.

    Args:
        model: whose modules are told apart.
        weights: names of those whose casts are followed, by address.
    """

    def __init__(self, model: nn.Module, weights: dict[int, str] | None = None) -> None:
        super().__init__(model, self._note, returned=self._note_outputs)
        self._weights = weights or {}
        self._calls: Counter[tuple[str, str, str, str, str]] = Counter()
        self._computed: defaultdict[str, Counter[torch.dtype]] = defaultdict(Counter)
        self.outputs: defaultdict[str, Counter[torch.dtype]] = defaultdict(Counter)
        """Dtypes of the floating-point tensors that modules return, by module."""
        self.casts: dict[tuple[str, str], str] = {}
        """Casts of weights to 16 bits in the forward pass: the weight's name, the module that casts, and the dtype."""

    def _note(self, op: Op) -> None:
        results = [] if op.is_view else numbers_in(op.result)
        if not results:
            return
        name, given, dtypes = op.name, numbers_in(op.inputs), _names(results)
        module, direction = op.place
        self._calls[module, direction, name, _names(given), dtypes] += 1
        if given and direction == FORWARD and op.computes:
            # An operator in fp8 has a result in another dtype.
            dtype = given[0].dtype if given[0].itemsize == 1 else results[0].dtype
            self._computed[module if self._stack else LOSS][dtype] += 1
        if self._weights and name == CAST and direction == FORWARD and _is_half(dtypes):
            weight = self._weights.get(op.args[0].data_ptr())
            if weight is not None:
                self.casts[weight, module] = dtypes

    def _note_outputs(self, name: str, module: nn.Module, output: Any) -> None:
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
        modules = [(name, type(module).__name__, module) for name, module in self._named]
        for name, kind, module in [*modules, (LOSS, "", nn.Module())]:
            weights = Counter(weight.dtype for weight in module.parameters(recurse=False))
            if weights or self._computed[name]:
                row = {"module": name, "type": kind}
                computed, returned = self._computed[name], self.outputs[name]
                for key, dtypes in (("weights", weights), ("compute", computed), ("output", returned)):
                    row[key] = ", ".join(dtype_name(dtype) for dtype, _ in dtypes.most_common())
                rows.append(row)
        return rows


def functional_name(operator: str) -> str:
    """Return the name of an operator as in ``torch.nn.functional``."""
    return operator.removeprefix("aten.").removeprefix("_safe").removeprefix("native").strip("_")


def _names(given: list[Tensor]) -> str:
    return ", ".join(dict.fromkeys(dtype_name(tensor.dtype) for tensor in given))


def _is_half(dtypes: str) -> bool:
    return not _HALF_NAMES.isdisjoint(dtypes.split(", "))
