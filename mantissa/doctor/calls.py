"""The module calls of a step: what each is given and returns, and how its own operators are computed again alone.

The own operators of a call are those that are in no submodule. Computed again, they get what they had in the reference:
the call's inputs, the submodules' results, and the gradients of all that they compute, which are the call's results and
the submodules' inputs.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mantissa.doctor.random import without_dropout
from mantissa.step import islands
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import Op, Trace
from mantissa.tensors import numbers_in, storage


@dataclass
class Value:
    """A floating-point tensor that a call is given or returns."""

    tensor: Tensor
    """Detached; a copy, where it was changed in place afterwards."""
    differentiable: bool
    low: torch.dtype
    """Its dtype in the low precision."""
    gradient: Tensor | None = None
    """Gradient of the loss with respect to it; of an argument through this call alone, known once that is evaluated."""


class Nested:
    """The arguments of a call, or its results, with the floating-point tensors apart."""

    def __init__(self, nested: Any) -> None:
        leaves, self._structure = tree_flatten(nested)
        tensors = [leaf for leaf in leaves if _is_number(leaf)]
        self.values = [Value(tensor.detach(), tensor.requires_grad, tensor.dtype) for tensor in tensors]
        self._others = [Value if _is_number(leaf) else leaf for leaf in leaves]
        """Leaves, with the class in the place of a value."""
        self.strange = ""
        """Why it cannot be given again; empty: it can."""
        try:  # a call may change an object that it is given, such as a cache of keys
            self._others = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in self._others]
        except Exception as error:  # what cannot be copied says so in many ways
            self.strange = f"an argument cannot be copied ({type(error).__name__})"

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Return the nested value with other tensors."""
        left = iter(tensors)
        others = [leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in self._others]
        return tree_unflatten([next(left) if leaf is Value else leaf for leaf in others], self._structure)


@dataclass
class Call:
    """One call of a module."""

    module: str
    number: int
    """Number among this module's calls, from 0."""
    given: Nested
    autocast: torch.dtype | None
    """The autocast dtype; None: off."""
    in_fp32_module: bool
    """Whether it is inside of an fp32 module, whose outermost alone casts its results back to 16 bits."""
    returned: Nested = field(default_factory=lambda: Nested(None))
    children: list[Call] = field(default_factory=list)
    computes: bool = False
    """Whether operators run in it that are in none of its submodules."""
    skipped: str = ""
    """Reason why it cannot be evaluated; empty: it can."""

    def sources(self) -> list[tuple[str, Value]]:
        """Return what its own operators get, with names: its arguments, and the results of its submodules."""
        inner = [(f"{self._of(child)}'s result", child.returned) for child in self.children]
        return _numbered([("input", self.given), *inner])

    def targets(self) -> list[tuple[str, Value]]:
        """Return what its own operators compute, with names: its results, and the arguments of its submodules."""
        inner = [(f"{self._of(child)}'s input", child.given) for child in self.children]
        return _numbered([("result", self.returned), *inner])

    def _of(self, child: Call) -> str:
        return child.module.removeprefix(self.module).lstrip(".")


def _numbered(parts: list[tuple[str, Nested]]) -> list[tuple[str, Value]]:
    return [(f"{what} {number}", value) for what, nested in parts for number, value in enumerate(nested.values)]


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


# --- the recording ---


def record(step: Step) -> tuple[Replay, Replay, list[Call]]:
    """Take a step in the run's format and in the reference, without dropout, with a few samples.

    Returns:
        Both replays, and the calls, each after its children.
    """
    few = step.with_microbatches(step.first_samples())
    low, reference = Replay.as_run(few), Replay.exact(few)
    for module in [*low.model.modules(), *reference.model.modules()]:
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
        if getattr(getattr(module, "config", None), "use_cache", False):  # of transformers: no call could be repeated
            module.config.use_cache = False  # type: ignore[union-attr]
    low.keep_attributes()
    reference.keep_attributes()
    with _Recorder(reference).recording() as calls:
        reference.run()
    low.start()
    with _Recorder(low).recording() as in_low:
        low.loss(few.microbatches[0])
    _compare(calls, in_low)
    return low, reference, calls


class _Recorder:
    """Records the calls that a replay makes without dropout."""

    def __init__(self, replay: Replay) -> None:
        self._model, self._device = replay.model, replay.step.device.type
        self._calls: list[Call] = []
        """Calls that ended, each after its children."""
        self._running: list[Call] = []
        self._numbers: Counter[str] = Counter()
        self._values: dict[int, list[Value]] = {}
        """Values by their storage."""

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Return the calls of the passes that are taken in it."""
        with ExitStack() as hooks, without_dropout(recomputes=False), Trace(None, run=self._run):
            for name, module in self._model.named_modules():
                if isinstance(module, nn.Identity):  # its result is its argument, which the caller may change in place
                    continue
                begin = functools.partial(self._begin, name)
                hooks.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._end).remove)
            yield self._calls

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        autocast = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        call = Call(name, self._numbers[name], Nested((args, kwargs)), autocast, islands.entered)
        call.skipped = call.given.strange
        self._keep(call.given)
        self._numbers[name] += 1
        if self._running:
            self._running[-1].children.append(call)
        self._running.append(call)

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        call = self._running.pop()
        self._calls.append(call)
        call.returned = Nested(result)
        self._keep(call.returned)
        for value, tensor in zip(call.returned.values, numbers_in(result), strict=True):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(setattr, value, "gradient"))

    def _keep(self, nested: Nested) -> None:
        for value in nested.values:
            self._values.setdefault(storage(value.tensor), []).append(value)

    def _run(self, op: Op) -> Any:
        if self._running and not op.is_view:
            self._running[-1].computes = True
        for tensor in op.inputs if op.is_mutable and not op.in_backward else ():
            for value in self._values.pop(storage(tensor), []):  # before it is changed
                value.tensor = value.tensor.clone()
        return op.run()


def _compare(calls: list[Call], low: list[Call]) -> None:
    """Add to each call how it is called in the low precision."""
    others = {(call.module, call.number): call for call in low}
    for call in calls:
        other = others.get((call.module, call.number))
        parts = [(call.given, other.given), (call.returned, other.returned)] if other else []
        if other is None or any(len(mine.values) != len(its.values) for mine, its in parts):
            call.skipped = call.skipped or "the two precisions call it differently"
            continue
        for mine, its in parts:
            for value, in_low in zip(mine.values, its.values, strict=True):
                value.low = in_low.tensor.dtype
        call.autocast, call.in_fp32_module = other.autocast, other.in_fp32_module


# --- one call again ---


class Evaluated(NamedTuple):
    """What the own operators of a call compute, and their vector-Jacobian product."""

    targets: list[Tensor]
    gradients: dict[str, Tensor]
    """Gradients of the sources and of the parameters, by name."""


def evaluate(replay: Replay, call: Call, given: list[Tensor], cotangents: list[Tensor | None]) -> Evaluated:
    """Run the own operators of a call, in the format of a replay and with the autocast of the call there.

    Args:
        replay: whose model is called, with the buffers that it had before the step.
        call: of the recording.
        given: its sources.
        cotangents: the gradients of its targets; None: that target has none.

    Raises:
        RuntimeError: it does not call the submodules that it called in the reference.
    """
    # As it was: buffers, arguments, random numbers.
    module = replay.model.get_submodule(call.module)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(replay.step.buffers[f"{call.module}.{name}".lstrip(".")])
    known = call.sources()
    sources = [
        tensor.detach().requires_grad_(value.differentiable) for tensor, (_, value) in zip(given, known, strict=True)
    ]
    count = len(call.given.values)
    args, kwargs = call.given.with_tensors(sources[:count])
    replay.restore_generators()

    gradients: dict[str, Tensor] = {}
    with as_called(replay, call):
        # Forward, with the submodules' results in the place of the submodules.
        with _stubs(replay.model, call.children, sources[count:]) as inputs:
            targets = [*numbers_in(module(*args, **kwargs)), *inputs]

        # Backward, from the gradients of all that it computes.
        wrt = {name: source for (name, _), source in zip(known, sources, strict=True) if source.requires_grad}
        wrt |= {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        used = [
            (target, cotangent.to(target.dtype))
            for target, cotangent in zip(targets, cotangents, strict=True)
            if cotangent is not None and target.requires_grad
        ]
        if used and wrt:
            outputs, weights = zip(*used, strict=True)
            products = torch.autograd.grad(outputs, list(wrt.values()), weights, allow_unused=True)
            gradients = {name: gradient for name, gradient in zip(wrt, products, strict=True) if gradient is not None}
    return Evaluated([target.detach() for target in targets], gradients)


@contextmanager
def as_called(replay: Replay, call: Call) -> Iterator[None]:
    """Return what the call ran in: the format's autocast or the call's own, and inside of fp32 modules or not."""
    dtype = call.autocast if replay.format.half is not None else None
    autocast = torch.autocast(replay.step.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    inside = patch.object(islands, "entered", call.in_fp32_module)
    with inside, replay.around(), replay.built.autocast(), autocast, without_dropout(recomputes=False):
        yield


@contextmanager
def _stubs(model: nn.Module, children: list[Call], results: list[Tensor]) -> Iterator[list[Tensor]]:
    """Let submodules return these results, in the order of their calls, and collect what they are given."""
    left = iter(children)
    results = list(results)
    inputs: list[Tensor] = []

    def stub(name: str, *args: Any, **kwargs: Any) -> Any:
        child, given = next(left, None), numbers_in((args, kwargs))
        if child is None or child.module != name or len(given) != len(child.given.values):
            raise RuntimeError("another submodule is called")
        inputs.extend(given)
        # Copies, as what follows may change them in place.
        return child.returned.with_tensors([results.pop(0).clone() for _ in child.returned.values])

    with ExitStack() as patches:
        for name in {child.module for child in children}:
            patches.enter_context(patch.object(model.get_submodule(name), "forward", functools.partial(stub, name)))
        yield inputs
    if next(left, None) is not None:
        raise RuntimeError("a submodule is not called")
