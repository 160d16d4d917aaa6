"""Local errors: the own operators of each module, in the run's format and in the reference's, from the same inputs.

Every module call of a step in the reference is computed again alone, which means: the operators that are in no
submodule. They get what they had in the reference: the call's inputs, the submodules' results, and the gradients of all
that they compute: the call's results, and the submodules' inputs. So an error has one place, errors do not add up, and
a rounding in one layer flips no ReLU of the next, which would change gradients by the square root of the unit roundoff.

An error is compared with what rounding makes unavoidable: the reference's own change when inputs, weights and
gradients are rounded (the condition), or one rounding for each matmul in series, whose errors add up like
random numbers (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from mantissa.display import dtype_name, listed
from mantissa.errors import FormatError
from mantissa.finding import BACKWARD, ERROR, FORWARD, INPUT, UNDERFLOW, Examined, Finding
from mantissa.formats import BF16, FP16, FP32, TF32, Number, scaled_number
from mantissa.step import islands
from mantissa.step.step import Gradients, Replay, Step, batch_key
from mantissa.step.trace import PRODUCTS, Op, Trace
from mantissa.tensors import in_dtype, numbers_in, relative_error, storage

FACTOR = 8
SUM = 0.6
"""Of u sqrt(n): the error of a parameter's gradient that is added up in 16 bits over n rows, as CPUs do for norms and
embeddings. Twice that of healthy layers: a layer norm in bf16 on a CPU has 2.4 u at 64 rows, 4.7 u at 256, 10 u at 1024
and 18 u at 4096, which is 0.3 u sqrt(n). Sums of one sign, which stop growing, have far more."""
_SCALED = 3
"""Times cond, in which each number is rounded at a scale of its own: the error of a layer in fp8, mxfp8 or nvfp4 that
is a fault. Simulated operands (512 × 256; normal, behind GELU, ReLU and softmax, with gains and means by channel, or
heavy tails) have at most 1.05 in mxfp8, 1.2 in nvfp4, whose gradients are rounded at random, and 1.7 in fp8, whose
gradients have a bit less."""
_COLUMNS, _LOST = 16, 0.75
"""Of so many columns of an operand, which share scales, so many of the numbers that are not 0 come out as 0, or at less
than half, where that is a fault. In nvfp4 the same simulation loses 0.07 of normal numbers, 0.17 behind a GELU, and
at most 0.61, of normal numbers times exp(2 normal ones); mxfp8 and fp8 lose at most 0.06."""
NOISE = 0.5
"""From this condition on, a result is noise in this format however it is computed, and is not judged."""
_LARGE = 0.25
"""From this relative error on a module's result is wrong, whatever comes of it."""
_ORDERS = ("topk", "sort", "argmax", "argmin", "nms")
"""Operators, by their bare names, that choose or order by size."""
HARM, _HARM_OF_FEW, _FEW = 0.05, 0.25, 16
"""Relative errors of a step's gradients from which on an error in a module does harm; of up to so many elements the
second one."""
_SIGNAL = 0.1
"""Share of the variation of an input over the samples that a format may round away."""
_ROWS = 8
"""Samples from which on each column of a table can be judged alone."""
_GRADIENT_SCALES = (0, 8, -8)
"""Exponents to try in fp16, where a gradient's largest element is made 2 to that power: what one of them fixes is the
loss scale's matter."""


def rounded(tensor: Tensor, number: Number) -> Tensor:
    """Return a floating-point tensor rounded to a format, in its own dtype; what is finite stays finite."""
    if tensor.is_complex():
        return tensor
    if number is TF32 or number.scaled:  # as if each had a scale of its own
        dropped = 24 + round(math.log2(number.unit_roundoff))
        bits = tensor.float().view(torch.int32)
        bits = (bits + (1 << dropped - 1) - 1 + (bits >> dropped & 1)) & -(1 << dropped)
        return bits.view(torch.float32).to(tensor.dtype)
    return _saturated(tensor, number.dtype).to(tensor.dtype)


@dataclass
class LocalError:
    """The local error of one tensor of one call."""

    module: str
    call: int
    direction: str
    tensor: str
    e: float
    """‖low − reference‖ / ‖reference‖."""
    cond: float
    """The same for the reference with rounded inputs, weights and gradients."""
    d: int
    """Rounded matmuls."""
    bound: float
    sorts: bool = False
    """Whether the call puts something in order: of what is nearly equal, rounding changes the order, and no more."""
    kind: str = ERROR
    """``UNDERFLOW``: ``e`` is the share of an operand's numbers that a scaled layer loses, of the worst columns."""
    limit: str = f"{FACTOR} x max(cond, u sqrt(d))"
    """What the bound is."""

    @property
    def ratio(self) -> float:
        """Error in terms of the bound: above 1, it is more than the format makes unavoidable."""
        judged = self.cond < NOISE and math.isfinite(self.e)
        return self.e / self.bound if judged else 0.0


def local_errors(step: Step) -> Examined:
    """Return the local errors of a step in its run's format, a ``LocalError`` each."""
    name = step.format.name
    low, reference, calls = record(step)
    table: list[LocalError] = []
    findings, notes = [], []
    worst: dict[tuple[str, str], LocalError] = {}
    left_out: dict[str, set[str]] = {}
    for call in calls:
        rows: list[LocalError] = []
        try:
            rows = _Comparison(low, reference, call).rows()
        except Exception as error:  # a module that routes by values, or counts its calls, cannot be called alone
            call.skipped = f"it cannot be called alone ({type(error).__name__})"
        if call.skipped:
            left_out.setdefault(call.skipped, set()).add(call.module or "the model")
        table += rows
        for row in (row for row in rows if row.ratio > 1):
            key = row.module, row.direction
            worst[key] = max(worst.get(key, row), row, key=lambda row: (row.kind == UNDERFLOW, row.ratio))  # its cause
    for why, modules in left_out.items():
        which = f"{listed(sorted(modules), 'module')} are" if len(modules) > 1 else f"{min(modules)} is"
        notes.append(f"errors of modules: {which} left out: {why}")
    for (module, direction), row in worst.items():
        if direction == BACKWARD and (module, FORWARD) in worst:  # a wrong result has a wrong gradient
            continue
        detail = f"{row.tensor}: e {row.e:.2g}, {row.limit} = {row.bound:.2g}"
        if row.kind == UNDERFLOW:
            detail = (
                f"{row.tensor}: {row.e:.0%} of what is not 0 comes out as 0, or far too small, beside larger numbers"
            )
        findings.append(Finding(row.kind, direction, module, name, detail=detail))
    return Examined(findings=tuple(findings), notes=tuple(notes), rows=tuple(table))


def harmful_errors(step: Step) -> Examined:
    """Return the local errors of a step, and as findings those that are large, or reach a gradient or the loss.

    A small one does no harm where what it is in is masked, or small beside the rest: rows of padding, for example.
    """
    found = local_errors(step)
    if not found.findings:
        return found
    large = {(row.module, row.direction) for row in found.rows if row.ratio > 1 and row.e > _LARGE and not row.sorts}
    with without_dropout():
        exact = step.reference().true_gradients()
        passes = step.as_run()
        own = _errors(passes.true_gradients(), exact)
    # The error from which on a gradient is wrong; that of few elements is that of their sums by chance.
    wrong = {name: e for name, e in own.items() if e > (HARM if exact[name].numel() > _FEW else _HARM_OF_FEW)}
    # What each layer repeats is judged together: one of them alone changes little.
    siblings: dict[type[nn.Module], list[Finding]] = {}
    for error in found.findings:
        siblings.setdefault(type(passes.model.get_submodule(error.module)), []).append(error)
    harmful: list[Finding] = []
    for errors in siblings.values():
        is_large = any((error.module, error.direction) in large for error in errors)
        if is_large or _fixes(step, [error.module for error in errors], wrong, exact):
            harmful += errors
    notes = [
        f"{error.kind} in {error.place} ({error.detail}): the gradients of the step are right in spite of it"
        for error in found.findings
        if error not in harmful
    ]
    told = tuple(error for error in found.findings if error in harmful)
    return replace(found, findings=told, notes=(*found.notes, *notes))


def _fixes(step: Step, modules: list[str], wrong: dict[str, float], exact: Gradients) -> bool:
    """Return whether a wrong gradient is half as wrong with modules in fp32, or none of them can be in fp32 alone."""
    fixed: dict[str, float] = {}
    if wrong and all(modules) and step.format.half is not None:
        with suppress(FormatError, RuntimeError), without_dropout():
            fixed = _errors(step.in_fp32(modules).as_run().true_gradients(), exact)
    return any(fixed.get(name, 0.0) < e / 2 for name, e in wrong.items())


def rounded_data(step: Step, share: float = _SIGNAL, columns: bool = False) -> Finding | None:
    """Return where a tensor of the batch is rounded by more than a share of what varies in it over the samples.

    With ``columns`` those of a table are judged, each alone.
    """
    passes = step.as_run()
    batch = passes.microbatches[0]
    found: list[Finding] = []

    def note(op: Op) -> None:  # a loss is given copies of the tensors
        if not op.casts_to_half or found or op.args[0].layout != torch.strided:
            return
        given = op.args[0].flatten()
        for name, tensor in batch.items():
            judged = tensor.ndim == 2 and len(tensor) >= _ROWS if columns else tensor.ndim
            if (
                judged
                and tensor.is_floating_point()
                and tensor.layout == torch.strided
                and torch.equal(tensor.flatten(), given)
            ):
                exact = tensor.detach().double()
                error = op.result.reshape(tensor.shape).double() - exact
                varies, lost, size = (
                    torch.linalg.vector_norm(each, dim=0 if columns else None)
                    for each in (exact - exact.mean(0), error - error.mean(0), exact)
                )
                lost = (lost / varies.clamp(min=1e-12 * size)).nan_to_num(0.0)  # a constant has nothing to lose
                if (lost > share).any():
                    numbers = (lost > share).nonzero().flatten().tolist()
                    where = listed(list(map(str, numbers)), "column") if columns else "it"
                    key = batch_key(name)
                    part = f"{lost.max().clamp(max=1):.0%} of what varies in {where}"
                    detail = f"rounding {key} to {dtype_name(op.result.dtype)} loses {part}: subtract the mean before"
                    finding = op.finding(op.result)
                    found.append(replace(finding, kind=INPUT, format=step.format.name, detail=detail, tensor=key))

    with Trace(passes.model, note):
        passes.loss(batch)
    return next(iter(found), None)


def rounded_away(step: Step) -> str:
    """Return what to add to a detail where data is rounded away."""
    finding = rounded_data(step)
    return f"; {finding.detail}" if finding else ""


def _errors(found: Gradients, exact: Gradients) -> dict[str, float]:
    return {name: relative_error(each, exact[name]) for name, each in found.items() if name in exact}


class _Comparison:
    """One call, evaluated in the reference, rounded, and in the low precision."""

    def __init__(self, low: Replay, reference: Replay, call: Call) -> None:
        self._in_low, self._reference, self._number, self._call = low, reference, low.format.number, call
        self._forward = self._backward = 0  # roundings of matmuls in series in the low precision
        self._sorts = False
        self._sources = [value for _, value in call.sources()]
        self._targets = call.targets()
        self._cotangents = [value.gradient for _, value in self._targets]
        self._module = reference.model.get_submodule(call.module)
        self._layer: Any = low.model.get_submodule(call.module)
        if self._number.scaled and (call.autocast is None or not scaled_number(self._layer)):
            self._number = BF16

    def rows(self) -> list[LocalError]:
        """Return the errors of what it computes, and of the gradients; leave the input gradients in the call."""
        call = self._call
        if call.skipped:
            return []
        sources = [value.tensor for value in self._sources]
        exact = evaluate(self._reference, call, sources, self._cotangents)
        for number, value in enumerate(call.given.values):
            value.gradient = exact.gradients.get(f"input {number}")
        if not call.computes:
            return []
        exponents = _GRADIENT_SCALES if self._number is FP16 else (0,)
        scale = self._scale(exponents[0])
        low = self._low(scale)
        changed = self._rounded()
        found = self._rows(exact, changed, low, scale)
        for exponent in exponents[1:]:
            if not any(row.direction == BACKWARD and not row.e <= row.bound for row in found):
                break
            scale = self._scale(exponent)
            other = self._rows(exact, changed, self._low(scale), scale)
            found = [min(pair, key=lambda row: row.e / row.bound) for pair in zip(found, other, strict=True)]
        return found + (self._lost() if self._number.scaled else [])

    def _lost(self) -> list[LocalError]:
        """Return the share of each operand that a scaled layer loses, as it is seen beside an identity matrix."""
        layer, x, gradient = copy.deepcopy(self._layer), self._sources[0].tensor, self._cotangents[0]
        eye, layer.bias = functools.partial(torch.eye, device=x.device), None
        with _as_called(self._in_low, self._call):
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
            operands = [(FORWARD, "weight", weight, layer(eye(x.shape[-1])).t())]
            layer.weight = nn.Parameter(eye(x.shape[-1]))
            operands.append((FORWARD, "input 0", x, layer(x)))
            if gradient is not None:
                layer.weight, nothing = nn.Parameter(eye(gradient.shape[-1])), torch.zeros_like(gradient)
                result = layer(nothing.requires_grad_())
                (low,) = torch.autograd.grad(result, nothing, gradient.to(result.dtype))
                operands.append((BACKWARD, "gradient of result 0", gradient, low))
        rows = []
        for direction, name, exact, low in operands:
            exact, low = (each.detach().abs().unflatten(-1, (-1, _COLUMNS)).flatten(0, -3) for each in (exact, low))
            there = exact != 0
            lost = there & ~((low >= exact / 2) & low.isfinite())
            shares = lost.sum((0, 2)) / there.sum((0, 2)).clamp(min=1)
            share, worst = shares.max(0)
            columns = f"{name}, columns {worst * _COLUMNS} to {worst * _COLUMNS + _COLUMNS - 1}"
            measured = share.item(), 0.0, 1, _LOST, False, UNDERFLOW, "share lost"
            rows.append(LocalError(self._call.module, self._call.number, direction, columns, *measured))
        return rows

    def _scale(self, exponent: int) -> float:
        """Return a factor for the gradients; 1 but in fp16."""
        amax = max((gradient.abs().max().item() for gradient in self._cotangents if gradient is not None), default=0.0)
        if self._number is not FP16 or not 0 < amax < math.inf:
            return 1.0
        return 2.0 ** (exponent - math.frexp(amax)[1])

    def _low(self, scale: float) -> Evaluated:
        sources = [_saturated(value.tensor, value.low) for value in self._sources]
        cotangents = [None if gradient is None else gradient * scale for gradient in self._cotangents]
        roundings: Counter[bool] = Counter()

        def count(op: Op) -> None:
            roundings[op.in_backward] += _roundings(op, self._number)
            self._sorts |= op.bare_name in _ORDERS

        with Trace(None, count):
            found = evaluate(self._in_low, self._call, sources, cotangents)
        self._forward, self._backward = roundings[False], roundings[True]
        # Divided in the reference's dtype, in which a small scale loses nothing.
        dtype = next(self._reference.model.parameters()).dtype
        return found._replace(gradients={name: in_dtype(g, dtype) / scale for name, g in found.gradients.items()})

    def _rounded(self) -> Evaluated:
        """Round what the low precision rounds: its 16-bit tensors, and where there are matmuls all others, too."""
        number = self._number
        everything = self._forward > 0 or number.scaled

        def as_low(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            return rounded(tensor, number) if everything or dtype == number.dtype else tensor

        sources = [as_low(value.tensor, value.low) for value in self._sources]
        cotangents = [
            each.gradient if each.gradient is None else as_low(each.gradient, each.low) for _, each in self._targets
        ]
        with _rounded_weights(self._module, number):
            return evaluate(self._reference, self._call, sources, cotangents)

    def _rows(self, exact: Evaluated, changed: Evaluated, low: Evaluated, scale: float) -> list[LocalError]:
        both = self._forward + self._backward
        rows = []
        for number, (name, _) in enumerate(self._targets):
            result = low.targets[number]
            expected, other = (_within(each.targets[number], result.dtype) for each in (exact, changed))
            rows.append(self._row(FORWARD, name, expected, other, result, self._forward))
        for name, tensor in exact.gradients.items():
            if name in low.gradients and name in changed.gradients:
                least = 0.0 if both else SUM * self._number.unit_roundoff * math.sqrt(self._rows_in_sum(name))
                of = tensor, changed.gradients[name], low.gradients[name]
                rows.append(self._row(BACKWARD, f"gradient of {name}", *of, both, scale, least))
        return [row for row in rows if not math.isnan(row.e)]

    def _rows_in_sum(self, name: str) -> float:
        """Return how many rows are added up in 16 bits for the gradient of a parameter; 0: it is another tensor.

        Infinite for torch's layer norm on a CPU, whose error has no limit where gradients cancel.
        """
        module = self._in_low.model.get_submodule(self._call.module)
        parameter = dict(module.named_parameters()).get(name)
        if parameter is None or parameter.dtype.itemsize > 2:
            return 0
        if isinstance(module, nn.LayerNorm) and parameter.device.type == "cpu":
            return math.inf
        width = parameter.shape[-1:].numel()
        return max((gradient.numel() // width for gradient in self._cotangents if gradient is not None), default=0)

    def _row(
        self,
        direction: str,
        name: str,
        exact: Tensor,
        changed: Tensor,
        low: Tensor,
        products: int,
        scale: float = 1.0,
        least: float = 0.0,
    ) -> LocalError:
        call, number = self._call, self._number
        e, cond = relative_error(low, exact), relative_error(changed, exact)
        d = max(1, products)
        if number is FP32:  # in norms, and in the gradients of norms and biases, so many numbers are added up
            largest = max((value.tensor.numel() for value in self._sources), default=0)
            sizes = [parameter.numel() for parameter in self._module.parameters(recurse=False)]
            d = max(d, largest // max(1, min([exact.numel(), *sizes])))
        norm = torch.linalg.vector_norm(in_dtype(exact, torch.float64)).item() * scale
        # In fp16 a number that is too small for the full precision has this error, which a loss scale can avoid.
        absolute = number.smallest / 2 * math.sqrt(exact.numel()) / norm if norm and number is FP16 else 0.0
        bound = max(FACTOR * max(cond, number.unit_roundoff * math.sqrt(d), absolute), least)
        row = LocalError(call.module, call.number, direction, name, e, cond, d, bound, self._sorts)
        if number.scaled:  # bounds of single roundings say too little of so few bits, and they average out
            bound, limit = _SCALED * max(cond, number.unit_roundoff / 2), f"{_SCALED} x max(cond, u / 2)"
            row = replace(row, bound=bound, limit=limit)
        return row


@contextmanager
def _rounded_weights(module: nn.Module, number: Number) -> Iterator[None]:
    """Round a module's parameters for a while."""
    own = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        for parameter, data in own:
            parameter.data = rounded(data, number)
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


_ATTENTION = "_scaled_dot_product"


def _roundings(op: Op, number: Number) -> int:
    """Return how many roundings in series a matmul makes: one, fused attention two; in fp32, one for each summand.

    The sums of 16-bit and TF32 numbers are in fp32, and do not matter.
    """
    name = op.bare_name
    count = 2 if name.startswith(_ATTENTION) else int(name in PRODUCTS)
    of = [tensor for tensor in op.inputs if tensor.dtype == number.dtype] if count else []
    if not of:
        return 0
    return count * _summands(name, of) if number is FP32 else count


def _summands(name: str, of: list[Tensor]) -> int:
    """Return how many numbers a matmul adds up for one of its results, from its floating-point inputs."""
    if name == "convolution":
        return of[1].numel() // of[1].shape[0]
    if name == "convolution_backward":
        return of[0].numel() // of[0].shape[1]
    if name.startswith(_ATTENTION):
        return max(of[0].shape[-1], of[1].shape[-2])
    return of[-2].shape[-1]


def _saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to another floating-point dtype; what is finite becomes its largest number rather than infinite."""
    return _within(tensor, dtype).to(dtype)


def _within(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit what is finite to the range of a narrower dtype: a mask of the lowest number is that of each format."""
    if torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
        return tensor
    largest = torch.finfo(dtype).max
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))


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
        found = [leaf for leaf in leaves if _is_number(leaf)]
        self.values = [Value(each.detach(), each.requires_grad, each.dtype) for each in found]
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


class Evaluated(NamedTuple):
    """What the own operators of a call compute, and their vector-Jacobian product."""

    targets: list[Tensor]
    gradients: dict[str, Tensor]
    """Gradients of the sources and of the parameters, by name."""


def record(step: Step) -> tuple[Replay, Replay, list[Call]]:
    """Take a step in the run's format and in the reference, without dropout, with a few samples.

    Returns:
        Both replays, and the calls, each after its children.
    """
    low = step.as_run()
    reference = step.exact()
    for module in [*low.model.modules(), *reference.model.modules()]:
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
        if getattr(getattr(module, "config", None), "use_cache", False):  # of transformers: no call could be repeated
            module.config.use_cache = False  # type: ignore[union-attr]
    low.keep_attributes()
    reference.keep_attributes()
    low.microbatches = reference.microbatches = step.first_samples()
    calls = _calls(reference, reference.run)
    low.start()
    _compare(calls, _calls(low, lambda: low.loss(low.microbatches[0])))
    return low, reference, calls


def _calls(passes: Replay, take: Callable[[], object]) -> list[Call]:
    """Return the calls that passes make without dropout, each after its children."""
    calls: list[Call] = []
    stack: list[Call] = []
    numbers: Counter[str] = Counter()
    values: dict[int, list[Value]] = {}  # by their storage
    device = passes.step.device.type

    def keep(nested: Nested) -> None:
        for value in nested.values:
            values.setdefault(storage(value.tensor), []).append(value)

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = Call(name, numbers[name], Nested((args, kwargs)), autocast, islands.entered)
        call.skipped = call.given.strange
        keep(call.given)
        numbers[name] += 1
        if stack:
            stack[-1].children.append(call)
        stack.append(call)

    def end(module: nn.Module, args: Any, result: Any) -> None:
        call = stack.pop()
        calls.append(call)
        call.returned = Nested(result)
        keep(call.returned)
        for value, tensor in zip(call.returned.values, numbers_in(result), strict=True):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(setattr, value, "gradient"))

    def run(op: Op) -> Any:
        if stack and not op.is_view:
            stack[-1].computes = True
        for tensor in op.inputs if op.is_mutable and not op.in_backward else ():
            for value in values.pop(storage(tensor), []):  # before it is changed
                value.tensor = value.tensor.clone()
        return op.run()

    with ExitStack() as hooks, without_dropout(recomputes=False), Trace(None, run=run):
        for name, module in passes.model.named_modules():
            if isinstance(module, nn.Identity):  # its result is its argument, which the caller may change in place
                continue
            first = functools.partial(begin, name)
            hooks.callback(module.register_forward_pre_hook(first, prepend=True, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        take()
    return calls


def _compare(calls: list[Call], low: list[Call]) -> None:
    """Add to each call how it is called in the low precision."""
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


def evaluate(passes: Replay, call: Call, given: list[Tensor], cotangents: list[Tensor | None]) -> Evaluated:
    """Run the own operators of a call, in the format of the passes and with the autocast of the call there.

    Args:
        passes: whose model is called, with the buffers that it had before the step.
        call: of the recording.
        given: its sources.
        cotangents: the gradients of its targets; None: that target has none.

    Raises:
        RuntimeError: it does not call the submodules that it called in the reference.
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
    passes.restore_generators()
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
    return Evaluated([target.detach() for target in targets], gradients)


@contextmanager
def _as_called(passes: Replay, call: Call) -> Iterator[None]:
    """Return what the call ran in: the format's autocast or the call's own, and inside of fp32 modules or not."""
    dtype = call.autocast if passes.format.half is not None else None
    autocast = torch.autocast(passes.step.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    islands.entered = call.in_fp32_module
    try:
        with passes.around(), passes.built.autocast(), autocast, without_dropout(recomputes=False):
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
            raise RuntimeError("another submodule is called")
        inputs.extend(found)
        # Copies, as what follows may change them in place.
        return child.returned.with_tensors([results.pop(0).clone() for _ in child.returned.values])

    with ExitStack() as patches:
        for name in {child.module for child in children}:
            patches.enter_context(patch.object(model.get_submodule(name), "forward", functools.partial(stub, name)))
        yield inputs
    if next(left, None) is not None:
        raise RuntimeError("a submodule is not called")


@contextmanager
def without_dropout(recomputes: bool = True) -> Iterator[None]:
    """Replace random numbers, as ``NoDropout`` does, also in what torch's activation checkpointing recomputes.

    Args:
        recomputes: whether it does so: what is computed again could not be told from another call of a module.
    """
    own, apply = vars(checkpoint), checkpoint.CheckpointFunction.apply

    def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with NoDropout():  # in a backward pass torch has left it
            return function(*args, **kwargs)

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return apply(functools.partial(again, function), preserve, *args) if recomputes else function(*args)

    def around(generator: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        return generator(functools.partial(again, function), *args, **kwargs) if recomputes else (None for _ in "1")

    names = [name for name in own if name.startswith("_checkpoint_without_reentrant_generator")]
    changed = {name: functools.partial(around, own[name]) for name in names}
    with patch.dict(own, changed, CheckpointFunction=SimpleNamespace(apply=reentrant)), NoDropout():
        yield


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


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
