"""Every module call of a step in the reference, and each of them computed again alone, in any precision.

Alone means: the operators that are in no submodule. They get what they had in the reference: the call's inputs, the
submodules' results, and the gradients of all that they compute: the call's results, and the submodules' inputs. So an
error has one place, errors do not add up, and a rounding in one layer flips no ReLU of the next, which would change
gradients by the square root of the unit roundoff.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from mantissa import islands
from mantissa.step import Replay, Step
from mantissa.tensors import numbers_in, relative_error

_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, Enum)
_NUMBERS = object()
"""Stands for a floating-point tensor."""


class Different(Exception):
    """A call takes another way than in the reference."""


@dataclass
class Value:
    """A floating-point tensor that a call is given or returns."""

    tensor: Tensor
    """Detached."""
    differentiable: bool
    version: int
    """How often it had been changed in place."""
    low: torch.dtype
    """Its dtype in the low precision."""
    gradient: Tensor | None = None
    """Of the loss with respect to it; of an argument: through this call alone, filled when that is evaluated."""


class _Object(NamedTuple):
    """Something that is no tensor and no plain value, as it was."""

    value: Any


class Nested:
    """The arguments of a call, or its results, with the floating-point tensors apart."""

    def __init__(self, nested: Any) -> None:
        leaves, self._structure = tree_flatten(nested)
        self.strange = ""
        """The type of an object that cannot be copied; empty: there is none."""
        self._leaves = [_NUMBERS if _is_number(leaf) else self._kept(leaf) for leaf in leaves]
        found = [leaf for leaf in leaves if _is_number(leaf)]
        self.values = [Value(each.detach(), each.requires_grad, each._version, each.dtype) for each in found]

    def _kept(self, leaf: Any) -> Any:
        """Return a leaf as it is now: a call may change an object that it is given, such as a cache of keys."""
        if isinstance(leaf, (Tensor, *_PLAIN)):
            return leaf
        try:
            return _Object(copy.deepcopy(leaf))
        except Exception:  # what cannot be copied says so in many ways
            self.strange = f"an argument is a {type(leaf).__name__}"
            return leaf

    @property
    def changed(self) -> bool:
        """Whether a tensor was changed in place since."""
        return any(value.tensor._version != value.version for value in self.values)

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Return the nested value with other tensors."""
        left = iter(tensors)
        leaves = [copy.deepcopy(leaf.value) if isinstance(leaf, _Object) else leaf for leaf in self._leaves]
        return tree_unflatten([next(left) if leaf is _NUMBERS else leaf for leaf in leaves], self._structure)


@dataclass
class Call:
    """One call of a module."""

    module: str
    number: int
    """Of this module's calls, from 0."""
    given: Nested
    autocast: torch.dtype | None
    """The autocast dtype; None: off."""
    in_fp32_module: bool
    """Whether it is inside of an fp32 module, whose outermost alone casts its results back to 16 bits."""
    returned: Nested = field(default_factory=lambda: Nested(None))
    children: list[Call] = field(default_factory=list)
    computes: bool = False
    """Whether operators run in it that are in none of its submodules."""
    overwritten: bool = False
    """Its results were changed in place afterwards; the evaluation in the reference restores them."""
    skipped: str = ""
    """Why it cannot be evaluated."""
    accumulated: float = math.nan
    """The relative error of its results in the low precision's own run, with all that came before it."""

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


class Evaluated(NamedTuple):
    """What the own operators of a call compute, and their vector-Jacobian product."""

    targets: list[Tensor]
    passed: list[bool]
    """Whether a target is a source as it is."""
    gradients: dict[str, Tensor]
    """By name: those of the sources and of the parameters."""


class Recording(NamedTuple):
    """The calls of one step, each after its children, and the passes that took it."""

    low: Replay
    reference: Replay
    calls: list[Call]


def record(step: Step, dtype: torch.dtype, fp32_modules: list[str] | None = None) -> Recording:
    """Take a step in the run's format and in the reference's ``dtype``, without dropout, with a few samples."""
    low = step.as_run(fp32_modules, recompute=False)
    reference = step.reference(dtype, recompute=False)
    for module in [*low.model.modules(), *reference.model.modules()]:
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
        if getattr(getattr(module, "config", None), "use_cache", False):  # of transformers: no call could be repeated
            module.config.use_cache = False  # type: ignore[union-attr]
    low.microbatches = reference.microbatches = step.first_samples()
    calls = _calls(reference, reference.run)
    low.start()
    _compare(calls, _calls(low, lambda: low.loss(low.microbatches[0])))
    return Recording(low, reference, calls)


def _calls(passes: Replay, take: Callable[[], object]) -> list[Call]:
    """Return the calls that passes make without dropout, each after its children."""
    calls: list[Call] = []
    stack: list[Call] = []
    numbers: Counter[str] = Counter()
    device = passes.step.device.type

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = Call(name, numbers[name], Nested((args, kwargs)), autocast, islands.entered)
        call.skipped = call.given.strange
        numbers[name] += 1
        if stack:
            stack[-1].children.append(call)
        stack.append(call)

    def end(module: nn.Module, args: Any, result: Any) -> None:
        call = stack.pop()
        calls.append(call)
        call.returned = Nested(result)
        for value, tensor in zip(call.returned.values, numbers_in(result), strict=True):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(setattr, value, "gradient"))

    with ExitStack() as hooks, NoDropout(), _Computing(stack):
        for name, module in passes.model.named_modules():
            if isinstance(module, nn.Identity):  # its result is its argument, which the caller may change in place
                continue
            first = functools.partial(begin, name)
            hooks.callback(module.register_forward_pre_hook(first, prepend=True, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        take()
    for call in calls:
        if call.given.changed and not call.skipped:
            call.skipped = "an argument was changed in place afterwards"
        call.overwritten = call.returned.changed
    return calls


def _compare(calls: list[Call], low: list[Call]) -> None:
    """Add to each call how it is called in the low precision, and its accumulated error."""
    found = {(call.module, call.number): call for call in low}
    for call in calls:
        other = found.get((call.module, call.number))
        parts = [(call.given, other.given), (call.returned, other.returned)] if other else []
        if other is None or any(len(mine.values) != len(its.values) for mine, its in parts):
            call.skipped = call.skipped or "the two precisions call it differently"
            continue
        for mine, its in parts:
            for value, in_low in zip(mine.values, its.values, strict=True):
                value.low = in_low.tensor.dtype
        call.autocast, call.in_fp32_module = other.autocast, other.in_fp32_module
        if not call.overwritten:
            pairs = zip(other.returned.values, call.returned.values, strict=True)
            errors = [relative_error(in_low.tensor, value.tensor) for in_low, value in pairs]
            call.accumulated = max(errors, default=0.0)


def evaluate(passes: Replay, call: Call, given: list[Tensor], cotangents: list[Tensor | None]) -> Evaluated:
    """Run the own operators of a call, in the format of the passes and with the autocast of the call there.

    Args:
        passes: whose model is called, with the buffers that it had before the step.
        call: of the recording.
        given: its sources.
        cotangents: the gradients of its targets; None: that target has none.

    Raises:
        Different: it does not call the submodules that it called in the reference.
    """
    module = passes.model.get_submodule(call.module)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(passes.step.buffers[f"{call.module}.{name}".lstrip(".")])
    known = call.sources()
    sources = [
        each.detach().requires_grad_(value.differentiable) for each, (_, value) in zip(given, known, strict=True)
    ]
    own = len(call.given.values)
    args, kwargs = call.given.with_tensors(sources[:own])
    gradients: dict[str, Tensor] = {}
    passes.step.restore_generators()
    with _as_called(passes, call):
        with _stubs(passes.model, call.children, sources[own:]) as inputs:
            targets = [*numbers_in(module(*args, **kwargs)), *inputs]
        wrt = {name: source for (name, _), source in zip(known, sources, strict=True) if source.requires_grad}
        wrt |= {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        used = [
            (target, cotangent.to(target.dtype))
            for target, cotangent in zip(targets, cotangents, strict=True)
            if cotangent is not None and target.requires_grad
        ]
        if used and wrt:
            outputs, weights = zip(*used, strict=True)
            found = torch.autograd.grad(outputs, list(wrt.values()), weights, allow_unused=True)
            gradients = {name: gradient for name, gradient in zip(wrt, found, strict=True) if gradient is not None}
    passed = [any(target is source for source in sources) for target in targets]
    return Evaluated([target.detach() for target in targets], passed, gradients)


@contextmanager
def _as_called(passes: Replay, call: Call) -> Iterator[None]:
    """Return what the call ran in: the format's autocast or the call's own, and inside of fp32 modules or not."""
    dtype = call.autocast if passes.format.half is not None else None
    autocast = torch.autocast(passes.step.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    islands.entered = call.in_fp32_module
    try:
        with passes.around(), passes.autocast(), autocast, NoDropout():
            yield
    finally:
        islands.entered = False


@contextmanager
def _stubs(model: nn.Module, children: list[Call], results: list[Tensor]) -> Iterator[list[Tensor]]:
    """Let submodules return these results, in the order of their calls, and collect what they are given."""
    left = iter(children)
    results = list(results)
    inputs: list[Tensor] = []

    def stub(name: str, *args: Any, **kwargs: Any) -> Any:
        child = next(left, None)
        found = numbers_in((args, kwargs))
        if child is None or child.module != name or len(found) != len(child.given.values):
            raise Different
        inputs.extend(found)
        # Copies, as what follows may change them in place.
        return child.returned.with_tensors([results.pop(0).clone() for _ in child.returned.values])

    modules = {child.module: model.get_submodule(child.module) for child in children}
    own: dict[str, Any] = {name: module.__dict__.get("forward") for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.forward = functools.partial(stub, name)
        yield inputs
    finally:
        for name, module in modules.items():
            del module.forward
            if own[name] is not None:
                module.forward = own[name]
    if next(left, None) is not None:
        raise Different


class NoDropout(TorchFunctionMode):
    """Replaces random masks by their expectation, and random numbers by those of fp32."""

    _drawn: Mapping[Any, Any] = {
        torch.rand: torch.empty,
        torch.rand_like: torch.empty_like,
        torch.randn: torch.empty,
        torch.randn_like: torch.empty_like,
    }
    _identity = frozenset(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
    )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self._identity:
            return args[0] if args else kwargs["input"]
        if function in self._drawn:  # in every precision the same numbers, which depend on the dtype
            generator = kwargs.get("generator")
            like = self._drawn[function](*args, **{key: kwargs[key] for key in kwargs if key != "generator"})
            with _disable_current_modes():  # a wider reference would draw wider ones
                drawn = torch.empty(like.shape, dtype=torch.float32, device=like.device)
                draw = drawn.normal_ if function in (torch.randn, torch.randn_like) else drawn.uniform_
                drawn = draw(generator=generator)
            return drawn.to(like.dtype).requires_grad_(like.requires_grad)
        if function is torch.bernoulli and len(args) == 1:
            return args[0].detach().clone()
        if function is torch.Tensor.bernoulli_:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if function is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        elif function is F.multi_head_attention_forward:
            args = (*args[:10], 0.0, *args[11:])
        return function(*args, **kwargs)


class _Computing(TorchDispatchMode):
    """Notes which calls compute something by themselves: the last of the stack, at each operator that is no view."""

    def __init__(self, stack: list[Call]) -> None:
        super().__init__()
        self._stack = stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stack and not func.is_view:
            self._stack[-1].computes = True
        return func(*args, **(kwargs or {}))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
