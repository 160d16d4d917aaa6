"""Local errors: the own operators of each module, in the run's format and in the reference's, from the same inputs.

Every module call of a step in the reference is computed again alone (``calls``). So an error has one place, errors do
not add up, and a rounding in one layer flips no ReLU of the next, which would change gradients by the square root of
the unit roundoff.

An error is compared with what rounding makes unavoidable: the reference's own change when inputs, weights and
gradients are rounded (the condition), or one rounding for each matmul in series, whose errors add up like
random numbers (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.display import listed
from mantissa.doctor.budget import Budget, LeftOutError
from mantissa.doctor.calls import Call, Evaluated, as_called, evaluate, record
from mantissa.doctor.cause import name_overflows
from mantissa.doctor.cures import ORDERS, line_of_error
from mantissa.doctor.finding import ERROR, UNDERFLOW, Examined, Finding
from mantissa.doctor.limits import HARM, NOISE
from mantissa.doctor.random import without_dropout
from mantissa.errors import FormatError, described
from mantissa.formats import BF16, FP16, FP32, TF32, Number, scaled_number
from mantissa.step.replay import Gradients, Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, FORWARD, PRODUCTS, Op, Trace
from mantissa.tensors import in_dtype, relative_error

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
_LARGE = 0.25
"""From this relative error on a module's result is wrong, whatever comes of it."""
_HARM_OF_FEW, _FEW = 0.25, 16
"""Relative error of a step's gradients of up to so many elements from which on an error in a module does harm."""
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
        """Error in terms of the bound: above 1, it is more than the format makes unavoidable.

        A gradient that is infinite is the loss scale's matter.
        """
        judged = self.cond < NOISE and (math.isfinite(self.e) or self.direction == FORWARD)
        return self.e / self.bound if judged else 0.0

    def finding(self, format: str) -> Finding:
        """Return it as a fault."""
        detail = f"{self.tensor}: e {self.e:.2g}, {self.limit} = {self.bound:.2g}"
        if self.kind == UNDERFLOW:
            lost = f"{self.e:.0%} of what is not 0 comes out as 0, or far too small, beside larger numbers"
            detail = f"{self.tensor}: {lost}"
        return Finding(self.kind, self.direction, self.module, format, detail=detail)


def module_errors(step: Step, budget: Budget) -> Examined:
    """Find modules whose error harms the gradients of the step, and their lines."""
    budget.expect(steps_in_memory=2)
    examined = harmful_errors(step)
    if not examined.rows:
        raise LeftOutError("; ".join(examined.left_out) or "no module computes")
    findings = tuple(
        replace(finding, line=finding.line or str(line_of_error(step, finding.module) or ""))
        for finding in name_overflows(Replay.as_run(step), examined.findings)
    )
    # A cure has to remove these errors, whatever harm is left.
    harmless = {row.module for row in examined.rows if row.ratio > 1} - {finding.module for finding in findings}
    return replace(examined, findings=findings, again=partial(_errors_beside, frozenset(harmless)))


def _errors_beside(harmless: frozenset[str], step: Step) -> Examined:
    """Return the errors of modules but for some."""
    errors = [error for error in local_errors(step).findings if error.module not in harmless]
    return Examined(findings=name_overflows(Replay.as_run(step), errors))


def local_errors(step: Step) -> Examined:
    """Return the local errors of a step in its run's format, a ``LocalError`` each."""
    low, reference, calls = record(step)

    # Every call alone, children first; the worst row of each module and direction.
    rows: list[LocalError] = []
    worst: dict[tuple[str, str], LocalError] = {}
    left_out: dict[str, set[str]] = {}
    for call in calls:
        of_call: list[LocalError] = []
        try:
            for row in _Comparison(low, reference, call).rows():
                of_call.append(row)  # those before an error stay
        except Exception as error:  # a module that routes by values, or counts its calls, cannot be called alone
            call.skipped = f"it cannot be called alone ({described(error)})"
        if call.skipped:
            left_out.setdefault(call.skipped, set()).add(call.module or "the model")
        rows += of_call
        for row in (row for row in of_call if row.ratio > 1):
            key = row.module, row.direction
            worst[key] = max(worst.get(key, row), row, key=lambda row: (row.kind == UNDERFLOW, row.ratio))  # its cause

    # A wrong result has a wrong gradient, which is no fault of its own.
    faults = [row for row in worst.values() if row.direction == FORWARD or (row.module, FORWARD) not in worst]
    parts = tuple(
        f"errors of {listed(sorted(modules), 'module') if len(modules) > 1 else min(modules)} ({why})"
        for why, modules in left_out.items()
    )
    findings = tuple(row.finding(step.format.name) for row in faults)
    return Examined(findings=findings, left_out=parts, rows=tuple(rows))


def harmful_errors(step: Step) -> Examined:
    """Return the local errors of a step, and as findings those that are large, or reach a gradient or the loss.

    A small one does no harm where what it is in is masked, or small beside the rest: rows of padding, for example.
    """
    local = local_errors(step)
    if not local.findings:
        return local
    with without_dropout():
        exact, low = Replay.reference(step).true_gradients(), Replay.as_run(step)
        errors = gradient_errors(low.true_gradients(), exact)
    # The error from which on a gradient is wrong; that of few elements is that of their sums by chance.
    wrong = {name: e for name, e in errors.items() if e > (HARM if exact[name].numel() > _FEW else _HARM_OF_FEW)}

    # What each layer repeats is judged together: one of them alone changes little.
    # An infinity may be a mask, or become 0 or 1 again: it is one that is wrong if a gradient is.
    rows = [row for row in local.rows if row.ratio > 1 and not row.sorts]
    large = {(row.module, row.direction) for row in rows if _LARGE < row.e < math.inf}
    infinite = {(row.module, row.direction) for row in rows if row.e == math.inf}
    siblings: dict[type[nn.Module], list[Finding]] = {}
    for finding in local.findings:
        siblings.setdefault(type(low.model.get_submodule(finding.module)), []).append(finding)
    harmful: list[Finding] = []
    for findings in siblings.values():
        is_large = any((finding.module, finding.direction) in large for finding in findings)
        if is_large or _fixes(step, [finding.module for finding in findings], wrong, exact):
            harmful += findings
    harmless = tuple(
        f"{finding.kind} in {finding.place} ({finding.detail}): the gradients of the step are right in spite of it"
        for finding in local.findings
        if finding not in harmful and (finding.module, finding.direction) not in infinite
    )
    named = tuple(finding for finding in local.findings if finding in harmful)
    return replace(local, findings=named, notes=harmless)


def _fixes(step: Step, modules: list[str], wrong: dict[str, float], exact: Gradients) -> bool:
    """Return whether a wrong gradient is half as wrong with modules in fp32, or none of them can be in fp32 alone."""
    fixed: dict[str, float] = {}
    if wrong and all(modules) and step.format.half is not None:
        with suppress(FormatError, RuntimeError), without_dropout():
            fixed = gradient_errors(Replay.as_run(step.in_fp32(modules)).true_gradients(), exact)
    return any(fixed.get(name, 0.0) < e / 2 for name, e in wrong.items())


def gradient_errors(gradients: Gradients, exact: Gradients) -> dict[str, float]:
    """Return the relative error of each gradient of a step that the reference has, too."""
    return {name: relative_error(gradient, exact[name]) for name, gradient in gradients.items() if name in exact}


# --- one call ---


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
        scaled = scaled_number(self._layer) if call.autocast is not None else None
        if scaled is not None or self._number.scaled:
            self._number = scaled or BF16

    def rows(self) -> Iterator[LocalError]:
        """Yield the errors of what it computes, and of the gradients; leave the input gradients in the call."""
        call = self._call
        if call.skipped:
            return

        # In the reference, which also says what gradients the calls inside of it get.
        sources = [value.tensor for value in self._sources]
        exact = evaluate(self._reference, call, sources, self._cotangents)
        for number, value in enumerate(call.given.values):
            value.gradient = exact.gradients.get(f"input {number}")
        if not call.computes:
            return

        # In the low precision, then rounded as that says. In fp16 at the scale that holds most of the gradients.
        exponents = _GRADIENT_SCALES if self._number is FP16 else (0,)
        scale = self._scale(exponents[0])
        low = self._low(scale)
        changed = self._rounded()
        rows = self._rows(exact, changed, low, scale)
        for exponent in exponents[1:]:
            if not any(row.direction == BACKWARD and not row.e <= row.bound for row in rows):
                break
            scale = self._scale(exponent)
            other = self._rows(exact, changed, self._low(scale), scale)
            rows = [min(pair, key=lambda row: row.e / row.bound) for pair in zip(rows, other, strict=True)]
        yield from rows
        if self._number.scaled:
            yield from self._lost()

    def _lost(self) -> list[LocalError]:
        """Return the share of each operand that a scaled layer loses, as it is seen beside an identity matrix."""
        # The layer computes the identity times the weight, the input and the gradient in turn.
        layer, x, gradient = copy.deepcopy(self._layer), self._sources[0].tensor, self._cotangents[0]
        eye, layer.bias = functools.partial(torch.eye, device=x.device), None
        with as_called(self._in_low, self._call):
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
            operands = [(FORWARD, "weight", weight, layer(eye(x.shape[-1])).t())]
            layer.weight = nn.Parameter(eye(x.shape[-1]))
            operands.append((FORWARD, "input 0", x, layer(x)))
            if gradient is not None:
                layer.weight, nothing = nn.Parameter(eye(gradient.shape[-1])), torch.zeros_like(gradient)
                result = layer(nothing.requires_grad_())
                (low,) = torch.autograd.grad(result, nothing, gradient.to(result.dtype))
                operands.append((BACKWARD, "gradient of result 0", gradient, low))

        # Of columns that share scales, how many numbers come out far too small.
        rows = []
        for direction, name, exact, low in operands:
            exact, low = (side.detach().abs().unflatten(-1, (-1, _COLUMNS)).flatten(0, -3) for side in (exact, low))
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
            self._sorts |= op.bare_name in ORDERS

        with Trace(None, count):
            low = evaluate(self._in_low, self._call, sources, cotangents)
        self._forward, self._backward = roundings[False], roundings[True]
        # Divided in the reference's dtype, in which a small scale loses nothing.
        dtype = next(self._reference.model.parameters()).dtype
        return low._replace(gradients={name: in_dtype(g, dtype) / scale for name, g in low.gradients.items()})

    def _rounded(self) -> Evaluated:
        """Round what the low precision rounds: its 16-bit tensors, and where there are matmuls all others, too."""
        number = self._number
        everything = self._forward > 0 or number.scaled

        def as_low(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            return rounded(tensor, number) if everything or dtype == number.dtype else tensor

        sources = [as_low(value.tensor, value.low) for value in self._sources]
        cotangents = [
            None if value.gradient is None else as_low(value.gradient, value.low) for _, value in self._targets
        ]
        with _rounded_weights(self._module, number):
            return evaluate(self._reference, self._call, sources, cotangents)

    def _rows(self, exact: Evaluated, changed: Evaluated, low: Evaluated, scale: float) -> list[LocalError]:
        both = self._forward + self._backward
        rows = []
        for number, (name, _) in enumerate(self._targets):
            result = low.targets[number]
            expected, other = (_within(of.targets[number], result.dtype) for of in (exact, changed))
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
        parameter = dict(self._layer.named_parameters()).get(name)
        if parameter is None or parameter.dtype.itemsize > 2:
            return 0
        if isinstance(self._layer, nn.LayerNorm) and parameter.device.type == "cpu":
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
    before = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        for parameter, data in before:
            parameter.data = rounded(data, number)
        yield
    finally:
        for parameter, data in before:
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
