"""Local errors: the own operators of each module, in the run's format and in the reference's, from the same inputs.

An error is compared with what rounding makes unavoidable: the reference's own change when inputs, weights and
gradients are rounded (the condition), or one rounding for each matrix product in series, whose errors add up like
random numbers (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.display import dtype_name
from mantissa.doctor.calls import Call, Different, Evaluated, Recording, products, relative_error, summands
from mantissa.finding import BACKWARD, ERROR, FORWARD, Finding
from mantissa.formats import BF16, FP8, FP16, FP32, TF32, Format, Number
from mantissa.step import Step, tensors

FACTOR = 8
SUM = 0.6
"""Of u sqrt(n): the error of a parameter's gradient that is added up in 16 bits over n rows, as CPUs do for norms and
embeddings. Twice that of healthy layers: a layer norm in bf16 on a CPU has 2.4 u at 64 rows, 4.7 u at 256, 10 u at 1024
and 18 u at 4096, which is 0.3 u sqrt(n). Sums of one sign, which stop growing, have far more."""
NOISE = 0.5
"""From this condition on, a result is noise in this format however it is computed, and is not judged."""
_GRADIENT_SCALES = (0, 8, -8)
"""Exponents to try in fp16, where a gradient's largest element is made 2 to that power: what one of them mends is the
loss scale's matter."""


def reference_dtype(format: Format) -> torch.dtype:
    """Return the dtype of what a format is compared with: fp32 for 16 bits, fp64 for fp32 and tf32."""
    return torch.float32 if format.number in (BF16, FP16) else torch.float64


def rounded(tensor: Tensor, number: Number) -> Tensor:
    """Return a floating-point tensor rounded to a format, in its own dtype; what is finite stays finite."""
    if number is TF32:
        bits = tensor.float().view(torch.int32)
        bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
        return bits.view(torch.float32).to(tensor.dtype)
    return saturated(tensor, number.dtype).to(tensor.dtype)


@dataclass
class Row:
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
    """Rounded matrix products."""
    bound: float
    accumulated: float
    """That of the low precision's own run, forward only: to be seen, not judged."""

    @property
    def ratio(self) -> float:
        """Above 1, the error is more than the format makes unavoidable."""
        judged = self.cond < NOISE and math.isfinite(self.e)
        return self.e / self.bound if judged else 0.0


@dataclass
class Pairs:
    """All local errors of a step."""

    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(step: Step, reference: torch.dtype | None = None, fp32_modules: list[str] | None = None) -> Pairs:
    """Return the local errors of a step in its run's format.

    Args:
        step: the step.
        reference: what it is compared with; None: see ``reference_dtype``.
        fp32_modules: in the place of the run's.
    """
    name = step.format.name
    if step.format.number is FP8:
        return Pairs(notes=[f"errors of modules: not judged with precision={name}"])
    recording = Recording.of(step, reference or reference_dtype(step.format), fp32_modules)
    result = Pairs(notes=recording.notes)
    weights = {id(p): rounded(p.data, step.format.number) for p in recording.reference.model.parameters()}
    worst: dict[tuple[str, str], tuple[Row, Call]] = {}
    for call in recording.calls:
        try:
            rows = _Evaluation(recording, step.format.number, weights, call).rows()
        except Different:
            call.skipped, rows = call.skipped or "it takes another way", []
        if call.skipped:
            result.notes.append(f"errors of modules: {call.module or 'the model'} is left out: {call.skipped}")
        result.rows += rows
        for row in rows:
            key = call.module, row.direction
            if row.ratio > 1 and (key not in worst or row.ratio > worst[key][0].ratio):
                worst[key] = row, call
    for (module, direction), (row, call) in worst.items():
        if direction == BACKWARD and (module, FORWARD) in worst:  # a wrong result has a wrong gradient
            continue
        if _sums_in_half(recording.low.model.get_submodule(module), row):
            result.notes.append(
                f"{module}: torch's layer norm on a CPU adds up its {row.tensor} in 16 bits, e {row.e:.2g}"
            )
        else:
            dtype = dtype_name(call.returned.low[0]) if call.returned.low else ""
            detail = f"{row.tensor}: e {row.e:.2g}, {FACTOR} x max(cond, u sqrt(d)) = {row.bound:.2g}"
            result.findings.append(Finding(ERROR, direction, module, name, dtype=dtype, detail=detail))
    return result


def _sums_in_half(module: nn.Module, row: Row) -> bool:
    """Return whether torch's own kernel adds up this gradient in 16 bits, whatever the model is.

    Layer norm on a CPU does, over all rows: 0.33 u sqrt(n) of random gradients, without a limit where they cancel.
    """
    weights = row.direction == BACKWARD and row.tensor in ("gradient of weight", "gradient of bias")
    return weights and isinstance(module, nn.LayerNorm) and next(module.parameters()).device.type == "cpu"


class _Evaluation:
    """One call, evaluated in the reference, rounded, and in the low precision."""

    def __init__(self, recording: Recording, number: Number, weights: dict[int, Tensor], call: Call) -> None:
        self._recording, self._number, self._weights, self._call = recording, number, weights, call
        self._products = _Products(number)
        self._sources, self._targets, self._cotangents = call.sources(), call.targets(), call.cotangents()
        self._module = recording.reference.model.get_submodule(call.module)

    def rows(self) -> list[Row]:
        """Return the errors of what it computes, and of the gradients; leave the input gradients in the call."""
        call = self._call
        if any(child.skipped and child.overwritten for child in call.children):
            call.skipped = "a submodule's result is not known"
        if call.skipped:
            return []
        exact = self._recording.exact(call, [each.tensor for each in self._sources], self._cotangents)
        call.returned.tensors = exact.targets[: len(call.returned.tensors)]
        inputs = (f"input {number}" for number in range(len(call.given.tensors)))
        call.input_gradients = {n: exact.gradients[name] for n, name in enumerate(inputs) if name in exact.gradients}
        if not call.operators:
            return []
        scale = self._scale(0)
        low = self._low(scale)
        changed = self._rounded()
        found = self._rows(exact, changed, low, scale)
        if self._number is FP16:
            for exponent in _GRADIENT_SCALES[1:]:
                if not any(row.direction == BACKWARD and not row.e <= row.bound for row in found):
                    break
                scale = self._scale(exponent)
                other = self._rows(exact, changed, self._low(scale), scale)
                found = [min(pair, key=lambda row: row.e / row.bound) for pair in zip(found, other, strict=True)]
        return found

    def _scale(self, exponent: int) -> float:
        """Return a factor for the gradients; 1 but in fp16."""
        amax = max((gradient.abs().max().item() for gradient in self._cotangents.values()), default=0.0)
        if self._number is not FP16 or not 0 < amax < math.inf:
            return 1.0
        return 2.0 ** (exponent - math.frexp(amax)[1])

    def _low(self, scale: float) -> Evaluated:
        sources = [saturated(each.tensor, each.low) for each in self._sources]
        cotangents = {number: gradient * scale for number, gradient in self._cotangents.items()}
        with self._products:
            found = self._recording.in_low(self._call, sources, cotangents)
        wide = self._recording.dtype
        return found._replace(gradients={name: g.to(wide) / scale for name, g in found.gradients.items()})

    def _rounded(self) -> Evaluated:
        """Round what the low precision rounds: its 16-bit tensors, and where there are products all others, too."""
        number = self._number
        everything = self._products.forward > 0

        def as_low(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            return rounded(tensor, number) if everything or dtype == number.dtype else tensor

        sources = [as_low(each.tensor, each.low) for each in self._sources]
        cotangents = {place: as_low(g, self._targets[place].low) for place, g in self._cotangents.items()}
        with _swapped(self._module, self._weights):
            return self._recording.exact(self._call, sources, cotangents)

    def _rows(self, exact: Evaluated, changed: Evaluated, low: Evaluated, scale: float) -> list[Row]:
        forward, both = self._products.forward, self._products.forward + self._products.backward
        rows = []
        for number, target in enumerate(self._targets):
            if not exact.passed[number]:
                result = low.targets[number]
                expected, other = (_within(each.targets[number], result.dtype) for each in (exact, changed))
                rows.append(self._row(FORWARD, target.name, expected, other, result, forward))
        for name, tensor in exact.gradients.items():
            if name in low.gradients and name in changed.gradients:
                least = 0.0 if both else SUM * self._number.unit_roundoff * math.sqrt(self._rows_in_sum(name))
                of = tensor, changed.gradients[name], low.gradients[name]
                rows.append(self._row(BACKWARD, f"gradient of {name}", *of, both, scale, least))
        return [row for row in rows if not math.isnan(row.e)]

    def _rows_in_sum(self, name: str) -> int:
        """Return how many rows are added up in 16 bits for the gradient of a parameter; 0: it is another tensor."""
        parameter = dict(self._recording.low.model.get_submodule(self._call.module).named_parameters()).get(name)
        if parameter is None or parameter.dtype not in (torch.bfloat16, torch.float16):
            return 0
        return max(
            (gradient.numel() // parameter.shape[-1:].numel() for gradient in self._cotangents.values()), default=0
        )

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
    ) -> Row:
        call, number = self._call, self._number
        e, cond = relative_error(low, exact), relative_error(changed, exact)
        d = max(1, products)
        if number is FP32:  # in norms, and in the gradients of norms and biases, so many numbers are added up
            largest = max((each.tensor.numel() for each in self._sources), default=0)
            sizes = [parameter.numel() for parameter in self._module.parameters(recurse=False)]
            d = max(d, largest // max(1, min([exact.numel(), *sizes])))
        norm = torch.linalg.vector_norm(exact.double()).item() * scale
        # In fp16 a number that is too small for the full precision has this error, which a loss scale can avoid.
        absolute = number.smallest / 2 * math.sqrt(exact.numel()) / norm if norm and number is FP16 else 0.0
        bound = max(FACTOR * max(cond, number.unit_roundoff * math.sqrt(d), absolute), least)
        accumulated = call.accumulated if direction == FORWARD and name.startswith("result") else math.nan
        return Row(call.module, call.number, direction, name, e, cond, d, bound, accumulated)


@contextmanager
def _swapped(module: nn.Module, values: dict[int, Tensor]) -> Iterator[None]:
    """Give a module's parameters other values for a while; ``values`` has them by the parameters' ids."""
    own = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        for parameter, _ in own:
            parameter.data = values[id(parameter)]
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


class _Products(TorchDispatchMode):
    """Counts the roundings of matrix products, in series: one each, attention has two; in fp32, each summand.

    The sums of 16-bit and TF32 numbers are in fp32, and do not matter.
    """

    def __init__(self, number: Number) -> None:
        super().__init__()
        self._number = number
        self.forward = self.backward = 0

    def __enter__(self) -> Any:
        self.forward = self.backward = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        of = [tensor for tensor in tensors((args, kwargs)) if tensor.dtype == self._number.dtype]
        count = products(name)
        if count and of:
            count *= summands(name, of) if self._number is FP32 else 1
            if torch._C._current_autograd_node() is None:
                self.forward += count
            else:
                self.backward += count
        return output


def saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to another floating-point dtype; what is finite becomes its largest number rather than infinite."""
    if not tensor.is_floating_point():
        return tensor
    result = tensor.to(dtype)
    return result if torch.equal(result.isinf(), tensor.isinf()) else _within(tensor, dtype).to(dtype)


def _within(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit what is finite to the range of a narrower dtype: a mask of the lowest number is that of each format."""
    if torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
        return tensor
    largest = torch.finfo(dtype).max
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))
