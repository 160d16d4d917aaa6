"""Local errors: the own operators of each module, in the run's precision and in the reference's, from the same inputs.

An error is compared with what rounding makes unavoidable: the reference's own change when inputs, weights and
gradients are rounded (the condition), or one rounding for each matrix product in series, whose errors add up like
random numbers (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from evidence.doctor.measured.calls import Call, Different, Evaluated, products, relative_error, summands
from evidence.doctor.measured.recording import Recording, swapped
from evidence.doctor.provenance.tape import tensors
from evidence.doctor.step.case import Case
from evidence.doctor.step.finding import BACKWARD, ERROR, FORWARD, Finding
from mantissa.display import dtype_name
from mantissa.formats import FORMATS as MODES
from trainer.errors import UserError

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


@dataclass(frozen=True)
class Format:
    """What numbers are rounded to."""

    dtype: torch.dtype
    u: float
    """The unit roundoff: half the distance from 1 to the next number."""
    reference: torch.dtype
    tf32: bool = False
    eta: float = 0.0
    """The largest rounding error of a number that is too small for the full precision: a loss scale can avoid it."""

    @property
    def sums(self) -> bool:
        """Whether sums are rounded to it, too: those of 16-bit and TF32 numbers are in fp32, and do not matter."""
        return self.dtype == torch.float32 and not self.tf32

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return a floating-point tensor rounded, in its own dtype; what is finite stays finite."""
        if self.tf32:
            bits = tensor.float().view(torch.int32)
            bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
            return bits.view(torch.float32).to(tensor.dtype)
        return saturated(tensor, self.dtype).to(tensor.dtype)


FORMATS = {
    "fp32": Format(torch.float32, 2**-24, torch.float64),
    "tf32": Format(torch.float32, 2**-11, torch.float64, tf32=True),
    "bf16": Format(torch.bfloat16, 2**-8, torch.float32),
    "fp16": Format(torch.float16, 2**-11, torch.float32, eta=2**-25),
}


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


def check_reference(mode: str, reference: torch.dtype | None) -> None:
    """Check that the reference, if one is given, is wider than the precision.

    Raises:
        UserError: it is not.
    """
    if MODES[mode].number.name in FORMATS and FORMATS[MODES[mode].number.name].dtype == reference:
        raise UserError(f"reference=fp32 is no reference for precision={mode}; use reference=fp64, or leave it out")


def measure(case: Case, reference: torch.dtype | None = None) -> Pairs:
    """Return the local errors of a step in its run's precision.

    Args:
        case: the step.
        reference: what it is compared with; None: fp32 for 16 bits, fp64 for fp32 and tf32.
    """
    mode = case.config.precision.mode
    if MODES[mode].number.name not in FORMATS:
        return Pairs(notes=[f"errors of modules: not judged with precision={mode}"])
    format = FORMATS[MODES[mode].number.name]
    if reference is not None:
        format = replace(format, reference=reference)
    recording = Recording.of(case, format.reference)
    result = Pairs(notes=recording.notes)
    model = recording.reference.model
    weights = {id(p): format.rounded(p.data) for p in model.parameters()}
    worst: dict[tuple[str, str], tuple[Row, Call]] = {}
    for call in recording.calls:
        try:
            rows = _Evaluation(recording, format, weights, call).rows()
        except Different:
            call.skipped, rows = call.skipped or "it takes another way", []
        if call.skipped:
            result.notes.append(f"errors of modules: {call.module or 'the model'} is left out: {call.skipped}")
        result.rows += rows
        for row in rows:
            key = call.module, row.direction
            if row.ratio > 1 and (key not in worst or row.ratio > worst[key][0].ratio):
                worst[key] = row, call
    # A wrong result has a wrong gradient.
    judged = {key: pair for key, pair in worst.items() if key[1] == FORWARD or (key[0], FORWARD) not in worst}
    for row, call in judged.values():
        if _sums_in_half(recording.low.model.get_submodule(call.module), row):
            result.notes.append(
                f"{row.module}: torch's layer norm on a CPU adds up its {row.tensor} in 16 bits, e {row.e:.2g}"
            )
        else:
            result.findings.append(_finding(row, call, mode))
    return result


def _sums_in_half(module: nn.Module, row: Row) -> bool:
    """Return whether torch's own kernel adds up this gradient in 16 bits, whatever the model is.

    Layer norm on a CPU does, over all rows: 0.33 u sqrt(n) of random gradients, without a limit where they cancel.
    """
    weights = row.direction == BACKWARD and row.tensor in ("gradient of weight", "gradient of bias")
    return weights and isinstance(module, nn.LayerNorm) and next(module.parameters()).device.type == "cpu"


class _Evaluation:
    """One call, evaluated in the reference, rounded, and in the low precision."""

    def __init__(self, recording: Recording, format: Format, weights: dict[int, Tensor], call: Call) -> None:
        self._recording, self._format, self._weights, self._call = recording, format, weights, call
        self._products = _Products(format)
        self._sources, self._cotangents = call.sources(), call.cotangents()
        module = recording.reference.model.get_submodule(call.module)
        self._sizes = [p.numel() for p in module.parameters(recurse=False)]

    def rows(self) -> list[Row]:
        """Return the errors of what it computes, and of the gradients; leave the input gradients in the call."""
        call = self._call
        if any(child.skipped and child.overwritten for child in call.children):
            call.skipped = "a submodule's result is not known"
        if call.skipped:
            return []
        exact = self._recording.exact(call, self._sources, self._cotangents)
        names = call.source_names()[: len(call.given.tensors)]
        if call.returned is not None:
            call.returned.tensors = exact.targets[: len(call.results)]
        call.input_gradients = {n: exact.gradients[name] for n, name in enumerate(names) if name in exact.gradients}
        if not call.operators:
            return []
        scale = self._scale(0)
        low = self._low(scale)
        rounded = self._rounded()
        found = self._rows(exact, rounded, low, scale)
        if self._format.dtype == torch.float16:
            for exponent in _GRADIENT_SCALES[1:]:
                if not any(row.direction == BACKWARD and not row.e <= row.bound for row in found):
                    break
                scale = self._scale(exponent)
                other = self._rows(exact, rounded, self._low(scale), scale)
                found = [min(pair, key=lambda row: row.e / row.bound) for pair in zip(found, other, strict=True)]
        return found

    def _scale(self, exponent: int) -> float:
        """Return a factor for the gradients; 1 but in fp16."""
        amax = max((gradient.abs().max().item() for gradient in self._cotangents.values()), default=0.0)
        if self._format.dtype != torch.float16 or not 0 < amax < math.inf:
            return 1.0
        return 2.0 ** (exponent - math.frexp(amax)[1])

    def _low(self, scale: float) -> Evaluated:
        sources = [saturated(*pair) for pair in zip(self._sources, self._call.source_dtypes(), strict=True)]
        cotangents = {number: gradient * scale for number, gradient in self._cotangents.items()}
        with self._products:
            found = self._recording.in_low(self._call, sources, cotangents)
        wide = self._format.reference
        return found._replace(gradients={name: g.to(wide) / scale for name, g in found.gradients.items()})

    def _rounded(self) -> Evaluated:
        """Round what the low precision rounds: its 16-bit tensors, and where there are products all others, too."""
        call, format = self._call, self._format
        everything = self._products.forward > 0

        def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            return format.rounded(tensor) if everything or dtype == format.dtype else tensor

        sources = [rounded(*pair) for pair in zip(self._sources, call.source_dtypes(), strict=True)]
        dtypes = call.target_dtypes()
        cotangents = {number: rounded(g, dtypes[number]) for number, g in self._cotangents.items()}
        module = self._recording.reference.model.get_submodule(call.module)
        with swapped(list(module.parameters()), self._weights):
            return self._recording.exact(call, sources, cotangents)

    def _rows(self, exact: Evaluated, rounded: Evaluated, low: Evaluated, scale: float) -> list[Row]:
        counted = self._products
        rows = []
        for number, name in enumerate(self._call.target_names()):
            if not exact.passed[number]:
                result = low.targets[number]
                expected, other = (_within(each.targets[number], result.dtype) for each in (exact, rounded))
                rows.append(self._row(FORWARD, name, expected, other, result, counted.forward))
        for name, tensor in exact.gradients.items():
            if name in low.gradients and name in rounded.gradients:
                of = tensor, rounded.gradients[name], low.gradients[name]
                both = counted.forward + counted.backward
                least = SUM * self._format.u * math.sqrt(self._rows_in_sum(name)) if not both else 0.0
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
        rounded: Tensor,
        low: Tensor,
        products: int,
        scale: float = 1.0,
        least: float = 0.0,
    ) -> Row:
        call, format = self._call, self._format
        e, cond = relative_error(low, exact), relative_error(rounded, exact)
        d = max(1, products)
        if format.sums:  # in norms, and in the gradients of norms and biases, so many numbers are added up
            largest = max((tensor.numel() for tensor in self._sources), default=0)
            d = max(d, largest // max(1, min([exact.numel(), *self._sizes])))
        norm = torch.linalg.vector_norm(exact.double()).item() * scale
        absolute = format.eta * math.sqrt(exact.numel()) / norm if norm else 0.0
        bound = max(FACTOR * max(cond, format.u * math.sqrt(d), absolute), least)
        accumulated = call.accumulated if direction == FORWARD and name.startswith("result") else math.nan
        return Row(call.module, call.number, direction, name, e, cond, d, bound, accumulated)


class _Products(TorchDispatchMode):
    """Counts the roundings of matrix products, in series: one each, attention has two; if sums count, each summand."""

    def __init__(self, format: Format) -> None:
        super().__init__()
        self._dtype = format.dtype
        self._sums = format.sums
        self.forward = self.backward = 0

    def __enter__(self) -> Any:
        self.forward = self.backward = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        of = [tensor for tensor in tensors((args, kwargs)) if tensor.dtype == self._dtype]
        count = products(name)
        if count and of:
            count *= summands(name, of) if self._sums else 1
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


def _finding(row: Row, call: Call, mode: str) -> Finding:
    dtype = dtype_name(call.result_dtypes[0]) if call.result_dtypes else ""
    detail = f"{row.tensor}: e {row.e:.2g}, {FACTOR} x max(cond, u sqrt(d)) = {row.bound:.2g}"
    return Finding(ERROR, row.direction, row.module, mode, dtype=dtype, detail=detail)
