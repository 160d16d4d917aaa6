"""Every module call of a step in the reference, and each of them computed again alone, in any precision.

Alone means: the operators that are in no submodule. They get what they had in the reference: the call's inputs, the
submodules' results, and the gradients of all that they compute: the call's results, and the submodules' inputs. So an
error has one place, errors do not add up, and a rounding in one layer flips no ReLU of the next, which would change
gradients by the square root of the unit roundoff.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from mantissa.step import Passes, Step

SAMPLES = 4
"""Of the first microbatch, at most: rounding errors are alike in all of them."""
MULTIPLICATIONS = 4e9
"""Of a forward pass, at most, where two samples need fewer: CPUs without 16-bit instructions are slow."""
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, Enum)
_NUMBERS = object()
"""Stands for a floating-point tensor."""


class Different(Exception):
    """A call takes another way than in the reference."""


@dataclass
class Values:
    """The arguments of a call, or its results: nested, with the floating-point tensors apart."""

    structure: TreeSpec
    leaves: list[Any]
    """With ``_NUMBERS`` in the place of the floating-point tensors."""
    tensors: list[Tensor]
    """Detached."""
    differentiable: list[bool]
    """Whether a tensor has a gradient."""
    versions: list[int]
    """How often a tensor had been changed in place."""
    low: list[torch.dtype] = field(default_factory=list)
    """The tensors' dtypes in the low precision."""

    @classmethod
    def of(cls, value: Any) -> Values:
        """Take a nested value apart."""
        leaves, structure = tree_flatten(value)
        found = [leaf for leaf in leaves if _is_number(leaf)]
        rest = [_NUMBERS if _is_number(leaf) else leaf for leaf in leaves]
        gradients = [tensor.requires_grad for tensor in found]
        return cls(structure, rest, [tensor.detach() for tensor in found], gradients, [each._version for each in found])

    @property
    def changed(self) -> bool:
        """Whether a tensor was changed in place since."""
        return [tensor._version for tensor in self.tensors] != self.versions

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Return the nested value with other tensors."""
        left = iter(tensors)
        return tree_unflatten([next(left) if leaf is _NUMBERS else leaf for leaf in self.leaves], self.structure)


class Named(NamedTuple):
    """A tensor that the own operators of a call get or compute."""

    name: str
    tensor: Tensor
    low: torch.dtype
    """Its dtype in the low precision."""
    differentiable: bool


@dataclass
class Call:
    """One call of a module."""

    module: str
    number: int
    """Of this module's calls, from 0."""
    given: Values
    returned: Values = field(default_factory=lambda: Values.of(None))
    overwritten: bool = False
    """Its results were changed in place afterwards; the evaluation in the reference restores them."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Of the loss with respect to the results, by position; those that are not used have none."""
    children: list[Call] = field(default_factory=list)
    operators: int = 0
    """That run in it and in none of its submodules."""
    skipped: str = ""
    """Why it cannot be evaluated."""
    autocast: torch.dtype | None = None
    """The autocast dtype in the low precision; None: off."""
    in_fp32_module: bool = False
    """Whether it is inside of an fp32 module, whose outermost alone casts its results back to 16 bits."""
    accumulated: float = math.nan
    """The relative error of its results in the low precision's own run, with all that came before it."""
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    """Of the given tensors, by position, through this call alone; filled when it is evaluated in the reference."""

    def sources(self) -> list[Named]:
        """Return what its own operators get: its arguments, and the results of its submodules."""
        inner = [
            each for child in self.children for each in child._named(child.returned, f"{self._of(child)}'s result")
        ]
        return self._named(self.given, "input") + inner

    def targets(self) -> list[Named]:
        """Return what its own operators compute: its results, and the arguments of its submodules."""
        inner = [each for child in self.children for each in child._named(child.given, f"{self._of(child)}'s input")]
        return self._named(self.returned, "result") + inner

    def _named(self, values: Values, what: str) -> list[Named]:
        known = zip(values.tensors, values.low, values.differentiable, strict=True)
        return [Named(f"{what} {number}", *each) for number, each in enumerate(known)]

    def _of(self, child: Call) -> str:
        return child.module.removeprefix(self.module).lstrip(".")

    def cotangents(self) -> dict[int, Tensor]:
        """Return the gradients of the loss with respect to what its own operators compute, by position."""
        found, start = dict(self.gradients), len(self.returned.tensors)
        for child in self.children:
            found |= {start + position: gradient for position, gradient in child.input_gradients.items()}
            start += len(child.given.tensors)
        return found


class Evaluated(NamedTuple):
    """What the own operators of a call compute, and their vector-Jacobian product."""

    targets: list[Tensor]
    passed: list[bool]
    """Whether a target is a source as it is."""
    gradients: dict[str, Tensor]
    """By name: those of the sources and of the parameters."""


@dataclass
class Recording:
    """The calls of one step, each after its children, and the passes that took it."""

    low: Passes
    reference: Passes
    dtype: torch.dtype
    """Of the reference."""
    calls: list[Call]
    notes: list[str]

    @classmethod
    def of(cls, step: Step, dtype: torch.dtype, fp32_modules: list[str] | None = None) -> Recording:
        """Take the step in the run's format and in the reference's ``dtype``, without dropout, with a few samples."""
        low = step.passes(step.format.name, own=True, fp32_modules=fp32_modules, recompute=False)
        reference = step.reference(dtype, recompute=False)
        for module in [*low.model.modules(), *reference.model.modules()]:
            if getattr(module, "inplace", False) is True:
                module.inplace = False  # type: ignore[assignment]
        least = least_samples(reference.model)
        have = min(len(tensor) for tensor in step.microbatches[0].values())
        reference.microbatches = step.first_samples(least)
        calls, cost = _calls(reference)
        taken, notes = min(have, SAMPLES), []
        fits = int(least * step.free_bytes() / 2 / max(1, _held_bytes(calls)))
        if fits < taken:
            notes.append(f"errors of modules: {max(least, fits)} of {have} samples, to need at most half of the memory")
        taken = max(least, min(taken, fits, int(least * MULTIPLICATIONS / max(1, cost))))
        if taken > least:
            reference.microbatches = step.first_samples(taken)
            calls, _ = _calls(reference)
        low.microbatches = step.first_samples(taken)
        _note_low(low, calls)
        return cls(low, reference, dtype, calls, notes)

    def exact(self, call: Call, sources: list[Tensor], cotangents: dict[int, Tensor]) -> Evaluated:
        """Evaluate a call in the reference."""
        with self.reference.around():
            return _evaluate(self.reference, call, sources, cotangents)

    def in_low(self, call: Call, sources: list[Tensor], cotangents: dict[int, Tensor]) -> Evaluated:
        """Evaluate a call in the run's format."""
        device, on = self.low.step.device.type, call.autocast is not None
        self.low.in_fp32_module = call.in_fp32_module
        try:
            with self.low.autocast(), torch.autocast(device, dtype=call.autocast or torch.bfloat16, enabled=on):
                return _evaluate(self.low, call, sources, cotangents)
        finally:
            self.low.in_fp32_module = False


def _evaluate(passes: Passes, call: Call, sources: list[Tensor], cotangents: dict[int, Tensor]) -> Evaluated:
    module = passes.model.get_submodule(call.module)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(passes.step.buffers[f"{call.module}.{name}".lstrip(".")])
    known = call.sources()
    sources = [source.detach().requires_grad_(each.differentiable) for source, each in zip(sources, known, strict=True)]
    own = len(call.given.tensors)
    args, kwargs = call.given.with_tensors(sources[:own])
    with NoDropout(), torch.enable_grad(), _stubs(passes.model, call.children, sources[own:]) as inputs:
        targets = [*numbers_in(module(*args, **kwargs)), *inputs]
    wrt = {each.name: source for each, source in zip(known, sources, strict=True) if each.differentiable}
    wrt |= {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    used = [number for number in cotangents if targets[number].requires_grad]
    found: dict[str, Tensor] = {}
    if used and wrt:
        given = [cotangents[number].to(targets[number].dtype) for number in used]
        results = torch.autograd.grad([targets[n] for n in used], list(wrt.values()), given, allow_unused=True)
        found = {name: result for name, result in zip(wrt, results, strict=True) if result is not None}
    passed = [any(target is source for source in sources) for target in targets]
    return Evaluated([target.detach() for target in targets], passed, found)


@contextmanager
def _stubs(model: nn.Module, children: list[Call], results: list[Tensor]) -> Iterator[list[Tensor]]:
    """Let submodules return these results, in the order of their calls, and collect what they are given."""
    left = iter(children)
    results = list(results)
    inputs: list[Tensor] = []

    def stub(name: str, *args: Any, **kwargs: Any) -> Any:
        child = next(left, None)
        found = numbers_in((args, kwargs))
        if child is None or child.module != name or len(found) != len(child.given.tensors):
            raise Different
        inputs.extend(found)
        # Copies, as what follows may change them in place.
        return child.returned.with_tensors([results.pop(0).clone() for _ in child.returned.tensors])

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
    """Replaces random masks by their expectation."""

    _identity = frozenset(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
    )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self._identity:
            return args[0] if args else kwargs["input"]
        if function is torch.Tensor.bernoulli_:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if function is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        elif function is F.multi_head_attention_forward:
            args = (*args[:10], 0.0, *args[11:])
        return function(*args, **kwargs)


def least_samples(model: nn.Module) -> int:
    """Return how few samples a model in training takes: batch norm needs two."""
    return 2 if any(isinstance(module, _NormBase) for module in model.modules()) else 1


def _held_bytes(calls: list[Call]) -> int:
    held = [t for call in calls for t in (*call.given.tensors, *call.returned.tensors, *call.gradients.values())]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


@contextmanager
def _hooked(model: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> Iterator[None]:
    """Call ``begin(name, arguments)`` and ``end(result)`` at every call of a submodule."""

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        begin(name, (args, kwargs))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            first = functools.partial(before, name)
            handle = module.register_forward_pre_hook(first, prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
            hooks.callback(module.register_forward_hook(lambda module, args, result: end(result)).remove)
        yield


class _Operators(TorchDispatchMode):
    """Counts each operator that computes at the call that it runs in, and the multiplications of all."""

    def __init__(self, stack: list[Call]) -> None:
        super().__init__()
        self._stack = stack
        self.multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._stack and not func.is_view:
            self._stack[-1].operators += 1
            name, numbers = func.__name__.partition(".")[0], numbers_in((args, kwargs))
            if products(name) and numbers and isinstance(output, Tensor):
                self.multiplications += summands(name, numbers) * output.numel()
        return output


def _calls(passes: Passes) -> tuple[list[Call], int]:
    """Return the calls of the step in the reference, each after its children, and its forward multiplications."""
    calls: list[Call] = []
    stack: list[Call] = []
    numbers: Counter[str] = Counter()

    def begin(name: str, arguments: Any) -> None:
        call = Call(name, numbers[name], Values.of(arguments))
        strange = [type(leaf).__name__ for leaf in tree_leaves(arguments) if not isinstance(leaf, (Tensor, *_PLAIN))]
        call.skipped = f"an argument is a {strange[0]}" if strange else ""
        numbers[name] += 1
        if stack:
            stack[-1].children.append(call)
        stack.append(call)

    def end(result: Any) -> None:
        call = stack.pop()
        calls.append(call)
        call.returned = Values.of(result)
        for position, tensor in enumerate(numbers_in(result)):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(call.gradients.__setitem__, position))

    with _hooked(passes.model, begin, end), NoDropout(), _Operators(stack) as operators:
        passes.attempt()
    for call in calls:
        if call.given.changed and not call.skipped:
            call.skipped = "an argument was changed in place afterwards"
        call.overwritten = call.returned.changed
    return calls, operators.multiplications


def _note_low(passes: Passes, calls: list[Call]) -> None:
    """Take the forward pass in the low precision; add to each call its dtypes there, and its accumulated error."""
    found = {(call.module, call.number): call for call in calls}
    numbers: Counter[str] = Counter()
    stack: list[Call | None] = []
    device = passes.step.device.type

    def begin(name: str, arguments: Any) -> None:
        call = found.get((name, numbers[name]))
        numbers[name] += 1
        stack.append(call)
        if call is not None:
            call.given.low = [tensor.dtype for tensor in numbers_in(arguments)]
            call.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            call.in_fp32_module = passes.in_fp32_module

    def end(result: Any) -> None:
        call = stack.pop()
        if call is not None:
            results = numbers_in(result)
            call.returned.low = [tensor.dtype for tensor in results]
            if len(results) == len(call.returned.tensors) and not call.overwritten:
                pairs = zip(results, call.returned.tensors, strict=True)
                call.accumulated = max((relative_error(*pair) for pair in pairs), default=0.0)

    passes.start()
    with _hooked(passes.model, begin, end), NoDropout():
        passes.loss(passes.microbatches[0])
    for call in calls:
        for values in (call.given, call.returned):
            if len(values.low) != len(values.tensors):
                values.low = [tensor.dtype for tensor in values.tensors]
                call.skipped = call.skipped or "the two precisions call it differently"


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def numbers_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a nested value."""
    return [leaf for leaf in tree_leaves(value) if _is_number(leaf)]


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "convolution", "convolution_backward")
_ATTENTION = "_scaled_dot_product"


def products(name: str) -> int:
    """Return how many matrix products an operator is, in series; fused attention is two."""
    return 2 if name.startswith(_ATTENTION) else int(name in _PRODUCTS)


def summands(name: str, of: list[Tensor]) -> int:
    """Return how many numbers a product adds up for one of its results, from its floating-point inputs."""
    if name == "convolution":
        return of[1].numel() // of[1].shape[0]
    if name == "convolution_backward":
        return of[0].numel() // of[0].shape[1]
    if name.startswith(_ATTENTION):
        return max(of[0].shape[-1], of[1].shape[-2])
    return of[-2].shape[-1]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of the difference over that of ``expected``, of the elements where that is finite.

    Infinite, if ``found`` is not finite there; NaN, if ``expected`` is 0.
    """
    found, expected = found.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    if not bool(finite.all()):
        found, expected = found[finite], expected[finite]
    size = torch.linalg.vector_norm(expected).item()
    error = torch.linalg.vector_norm(found - expected).item()
    if not size:
        return math.nan
    return error / size if math.isfinite(error) else math.inf
