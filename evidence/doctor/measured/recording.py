"""Recording the module calls of a step in the reference, and evaluating each of them alone."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from evidence.doctor.measured.calls import (
    Call,
    Different,
    Evaluated,
    Values,
    numbers_in,
    products,
    relative_error,
    summands,
    versions,
)
from evidence.doctor.step.case import Case, CaseTrainer, Reference
from trainer.data.loader import to_device
from trainer.hardware import available_bytes
from trainer.parallel.activation import ActivationCheckpointing
from trainer.precision import islands

SAMPLES = 4
"""Of the first microbatch, at most: rounding errors are alike in all of them."""
MULTIPLICATIONS = 4e9
"""Of a forward pass, at most, where two samples need fewer: CPUs without 16-bit instructions are slow."""
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, Enum)


@dataclass
class Recording:
    """The calls of one step, each after its children, and the two trainers that took it."""

    case: Case
    """The step that was taken: of a few samples."""
    low: CaseTrainer
    reference: Reference
    calls: list[Call]
    notes: list[str]

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, samples: int = SAMPLES) -> Recording:
        """Take the step in the run's precision and in the reference's ``dtype``, without dropout."""
        plain = replace(case.config, activation_checkpointing=ActivationCheckpointing())
        case = replace(case, config=plain)
        low, reference = case.trainer(case.config.precision, own=True), Reference(case, dtype)
        for model in (low.model, reference.model):
            _out_of_place(model)
        least = least_samples(reference.model)
        have = min(len(tensor) for tensor in case.microbatches[0].values())
        calls, cost = _calls(reference, case.few(least))
        taken, notes = min(have, samples), []
        fits = int(least * available_bytes(low.device) / 2 / max(1, _held_bytes(calls)))
        if fits < taken:
            notes.append(f"errors of modules: {max(least, fits)} of {have} samples, to need at most half of the memory")
        taken = max(least, min(taken, fits, int(least * MULTIPLICATIONS / max(1, cost))))
        if taken > least:
            calls, _ = _calls(reference, case.few(taken))
        _note_low(low, case.few(taken), calls)
        return cls(case, low, reference, calls, notes)

    def exact(self, call: Call, sources: list[Tensor], cotangents: dict[int, Tensor]) -> Evaluated:
        """Evaluate a call in the reference."""
        with self.reference.around():
            return self._evaluate(self.reference, call, sources, cotangents)

    def in_low(self, call: Call, sources: list[Tensor], cotangents: dict[int, Tensor]) -> Evaluated:
        """Evaluate a call in the run's precision."""
        device, on = self.low.device, call.autocast is not None
        dtype = call.autocast or torch.bfloat16
        islands.entered = call.in_island
        try:
            with self.low.config.precision.autocast(device), torch.autocast(device.type, dtype=dtype, enabled=on):
                return self._evaluate(self.low, call, sources, cotangents)
        finally:
            islands.entered = False

    def _evaluate(
        self, trainer: CaseTrainer, call: Call, sources: list[Tensor], cotangents: dict[int, Tensor]
    ) -> Evaluated:
        module = trainer.model.get_submodule(call.module)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(self.case.buffers[f"{call.module}.{name}".lstrip(".")])
        flags = [*call.given.differentiable]
        for child in call.children:
            flags += child.returned.differentiable if child.returned else []
        sources = [source.detach().requires_grad_(flag) for source, flag in zip(sources, flags, strict=True)]
        own = len(call.given.tensors)
        args, kwargs = call.given.with_tensors(sources[:own])
        with NoDropout(), torch.enable_grad(), _stubs(trainer.model, call.children, sources[own:]) as inputs:
            targets = [*numbers_in(module(*args, **kwargs)), *inputs]
        names = zip(call.source_names(), sources, strict=True)
        wrt = {name: source for name, source in names if source.requires_grad}
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
        if child is None or child.module != name or len(found) != len(child.given.tensors) or child.returned is None:
            raise Different
        inputs.extend(found)
        # Copies, as what follows may change them in place.
        return child.returned.with_tensors([results.pop(0).clone() for _ in child.results])

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


@contextmanager
def swapped(parameters: list[nn.Parameter], others: dict[int, Tensor]) -> Iterator[None]:
    """Give parameters other values for a while; ``others`` has them by the parameters' ids."""
    own = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = others[id(parameter)]
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


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


def _out_of_place(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]


def _held_bytes(calls: list[Call]) -> int:
    held = [t for call in calls for t in (*call.given.tensors, *call.results, *call.gradients.values())]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


class _Hooks:
    """Calls ``begin`` and ``end`` at every call of a submodule, with its name."""

    def __init__(self, model: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> None:
        self._handles = []
        for name, module in model.named_modules():
            before, after = functools.partial(begin, name), functools.partial(end, name)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()


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


def _calls(trainer: CaseTrainer, case: Case) -> tuple[list[Call], int]:
    """Return the calls of the step in the reference, each after its children, and its forward multiplications."""
    calls: list[Call] = []
    stack: list[Call] = []
    numbers: Counter[str] = Counter()

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = Values.of((args, kwargs))
        call = Call(name, numbers[name], given)
        strange = [type(leaf).__name__ for leaf in given.leaves if not isinstance(leaf, (Tensor, *_PLAIN))]
        call.skipped = f"an argument is a {strange[0]}" if strange else ""
        numbers[name] += 1
        if stack:
            stack[-1].children.append(call)
        stack.append(call)

    def end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = stack.pop()
        calls.append(call)
        call.returned = Values.of(output)
        for position, tensor in enumerate(numbers_in(output)):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(call.gradients.__setitem__, position))

    with _Hooks(trainer.model, begin, end), NoDropout(), _Operators(stack) as operators:
        trainer.case = case
        trainer.attempt()
    for call in calls:
        if versions(call.given.tensors) != call.given.versions and not call.skipped:
            call.skipped = "an argument was changed in place afterwards"
        call.overwritten = versions(call.results) != (call.returned or call.given).versions
    return calls, operators.multiplications


def _note_low(trainer: CaseTrainer, case: Case, calls: list[Call]) -> None:
    """Take the forward pass in the low precision; add to each call its dtypes there, and its accumulated error."""
    found = {(call.module, call.number): call for call in calls}
    numbers: Counter[str] = Counter()
    stack: list[Call | None] = []
    device = trainer.device.type

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = found.get((name, numbers[name]))
        numbers[name] += 1
        stack.append(call)
        if call is not None:
            call.dtypes = [tensor.dtype for tensor in numbers_in((args, kwargs))]
            call.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            call.in_island = islands.entered

    def end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = stack.pop()
        if call is not None:
            results = numbers_in(output)
            call.result_dtypes = [tensor.dtype for tensor in results]
            if len(results) == len(call.results) and not call.overwritten:
                pairs = zip(results, call.results, strict=True)
                call.accumulated = max((relative_error(*pair) for pair in pairs), default=0.0)

    trainer.case = case
    trainer.start()
    with _Hooks(trainer.model, begin, end), NoDropout(), trainer.config.precision.autocast(trainer.device):
        trainer.recipe.loss(trainer.model, to_device(case.microbatches[0], trainer.device))
    for call in calls:
        alike = len(call.dtypes) == len(call.given.tensors) and len(call.result_dtypes) == len(call.results)
        if not alike and not call.skipped:
            call.skipped = "the two precisions call it differently"
