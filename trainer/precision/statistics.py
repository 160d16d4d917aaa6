"""Statistics of what scaled layers multiply: what their formats flush to zero and saturate, and the noise they add.

A layer that is measured has a table, fp32 on its device: a row for each of ``OPERANDS``, in the columns below, added up
over the microbatches of a step. A product adds its operands by ``add``, inside of an operator of its own: torch.compile
does not look into that, and keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

OPERANDS = ("input", "weight", "dgrad", "wgrad")
"""The factors of the matmul of the forward pass, and the gradient of its result, as the matmul of the input's gradient
(dgrad) multiplies it, and that of the weight's gradient (wgrad)."""
INPUT, WEIGHT, DGRAD, WGRAD = range(len(OPERANDS))
SQNR, FLUSHED, SATURATED, AMAX = "sqnr_db", "flushed", "saturated", "amax"
"""Signal to quantisation noise in dB, 20 log10(‖x‖ / ‖x − rounded x‖), as torchao's ``compute_error``; the shares of
the elements that are not 0 which are rounded to 0, and which are larger than the largest number of the format at their
scale; the largest size of an element."""
SAMPLE = 16384
"""Elements of an operand that are measured in a microbatch: whole rows, as many as are no more than that, but at least
those of one block. The largest size is that of all."""
_NONZERO, _FLUSHED, _SATURATED, _SIGNAL, _NOISE, _AMAX = range(6)
_COLUMNS = 6
_UNIT = 2.0**-22
"""What is larger than the largest by no more than this was made so by the rounding of a scale."""


def new_table(layer: nn.Module) -> Tensor:
    """Return the table of a layer of which nothing is known yet: operands × columns, fp32."""
    weight: Any = layer.weight
    return torch.zeros(len(OPERANDS), _COLUMNS, device=weight.device)


def sampled(values: Tensor, high: int = 1) -> Tensor:
    """Return rows of a matrix at even distances, ``high`` neighbours at a time, of which its rows are a multiple.

    The distance has no factor in common with the number of rows: these are of samples of one length.
    """
    rows, columns = values.shape
    groups = rows // high
    distance = math.ceil(groups / max(1, SAMPLE // (high * columns)))
    while distance < groups and math.gcd(distance, groups) > 1:
        distance += 1
    return values.unflatten(0, (groups, high))[::distance].flatten(0, 1)


def amax(values: Tensor) -> Tensor:
    """Return the largest size of an element of a matrix, of its dtype."""
    low, high = (values if values.is_contiguous() else values.t()).aminmax()  # abs would make a copy
    return torch.maximum(high, -low)


def add(table: Tensor, operand: int, peak: Tensor, sample: Tensor, rounded: Tensor, largest: Tensor) -> None:
    """Add what a microbatch shows of an operand to the table of its layer.

    Args:
        table: see above.
        operand: its row.
        peak: the largest size of its elements.
        sample: the part of it that is measured, fp32.
        rounded: what that was rounded to, fp32 of the same shape.
        largest: the largest number of the format at the scale of each element of the sample, which it broadcasts to.
    """
    row, sizes = table[operand], sample.abs()
    flushed = (sizes != 0).logical_and_(rounded == 0)
    counts = map(torch.count_nonzero, (sizes, flushed, sizes > largest * (1 + _UNIT)))
    row[:_SIGNAL] += torch.stack([*counts])
    # Squares of small gradients would underflow.
    unit = sizes.amax()
    unit = torch.where(unit == 0, 1, unit)
    norms = torch.stack([torch.linalg.vector_norm(each / unit) for each in (sample, sample - rounded)]) * unit
    row[_SIGNAL:_AMAX] = torch.hypot(row[_SIGNAL:_AMAX], norms)
    row[_AMAX] = torch.maximum(row[_AMAX], peak)


def measured(names: list[str], sums: Tensor, peaks: Tensor) -> Iterator[tuple[str, str, str, float]]:
    """Yield the name, the operand, the layer and the value of every statistic that there is.

    None is of an operand that the layer did not round or that was 0 throughout, or of one with NaN or infinity; and
    without any noise there is no signal to noise.

    Args:
        names: of the layers.
        sums: of the tables of all microbatches and ranks, with squared norms; layers × operands × columns, fp64.
        peaks: their largest sizes, layers × operands.
    """
    for layer, table, sizes in zip(names, sums.tolist(), peaks.tolist(), strict=True):
        for operand, row, size in zip(OPERANDS, table, sizes, strict=True):
            if not row[_NONZERO] or not math.isfinite(size):
                continue
            if row[_NOISE]:
                yield SQNR, operand, layer, 10 * math.log10(row[_SIGNAL] / row[_NOISE])
            yield FLUSHED, operand, layer, row[_FLUSHED] / row[_NONZERO]
            yield SATURATED, operand, layer, row[_SATURATED] / row[_NONZERO]
            yield AMAX, operand, layer, size


def split(tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is added up over ranks, with squared norms, and what the largest is taken of; fp64 on the host."""
    sums = tables.to("cpu", torch.float64)
    sums[..., _SIGNAL:_AMAX] = sums[..., _SIGNAL:_AMAX].square()
    return sums[..., :_AMAX], sums[..., _AMAX]
