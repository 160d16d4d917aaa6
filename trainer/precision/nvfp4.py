"""NVFP4 on any device: operands are rounded to it, which bf16 holds exactly, and multiplied.

A number is an element of 4 bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times the scale of its block of
16 (E4M3) times the scale of its tensor (fp32). How a linear layer trains in it: NVIDIA, "Pretraining Large Language
Models with NVFP4", arXiv 2509.25149, 2025. Weights have blocks of 16 × 16, so that forward and backward passes see the
same ones; gradients are rounded stochastically; both factors of a weight's gradient are transformed before, so that no
outlier decides a block's scale. The recipe also has some blocks, most of them the last, in bf16: ``Precision.modules``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.precision import statistics

BLOCK = 16
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_EXPONENT = 0x7F800000
"""The bits of an fp32 number that are its exponent."""
_SIGNS = 0b0100_1101_1110_0010
"""Random signs of the Hadamard transform, drawn once: they are the same in all layers and steps, as in the source."""


def quantize(values: Tensor, square: bool = False, stochastic: bool = False) -> tuple[Tensor, Tensor]:
    """Round a matrix to NVFP4; the values are the product of both results. What is not finite makes all so.

    Args:
        values: rows × columns; blocks lie along the columns.
        square: whether a block is 16 × 16, not 1 × 16.
        stochastic: whether elements are rounded to one of both neighbours at random, without bias but for the largest
            of a block: it is clamped at 6 where the block's scale was rounded down, which makes a matrix shorter along
            itself, by 0.3 % of normal numbers to 0.7 % of Student's t with 3 degrees. Else to nearest, ties to even.

    Returns:
        Elements times scales of blocks, bf16 of the same shape, exact; and the scale of the tensor, fp32 scalar.
    """
    blocks = _blocks(values, square)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    whole = largest.amax() / (_LARGEST * _LARGEST_SCALE)
    whole = torch.where(whole == 0, 1, whole)
    scales = _scales(largest, whole)
    scaled = blocks / torch.where(scales == 0, math.inf, scales * whole)  # 0 where the scale is
    powers = (scaled.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=1)  # of two, at most the element
    doubled = scaled.mul_(2).div_(powers)  # elements are whole numbers of half such a power
    if stochastic:
        below = doubled.floor()
        rounded = below.add_(torch.rand_like(below) < doubled.sub_(below))
    else:
        rounded = doubled.round_()
    elements = rounded.mul_(powers).clamp_(-2 * _LARGEST, 2 * _LARGEST)
    return elements.mul_(scales / 2).bfloat16().view(values.shape), whole


def _blocks(values: Tensor, square: bool) -> Tensor:
    """Return a matrix as rows of blocks × rows in a block × columns of blocks × columns in a block, fp32."""
    (rows, columns), high = values.shape, BLOCK if square else 1
    return values.float().view(rows // high, high, columns // BLOCK, BLOCK)


def _scales(largest: Tensor, whole: Tensor) -> Tensor:
    """Return the scales of blocks, fp32, of the largest size in each and the scale of the tensor."""
    # Where even the tensor's scale is subnormal, its rounding may lift a block's beyond the largest.
    return (largest / _LARGEST / whole).clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn).float()


class _Product(torch.autograd.Function):
    """The three matmuls of a linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, table: Tensor | None) -> Tensor:
        rounded, factor = quantize(weight, square=True), quantize(x)
        if table is not None:
            _observe(x, *factor, False, table, statistics.INPUT)
            _observe(weight, *rounded, True, table, statistics.WEIGHT)
        ctx.table = table
        ctx.save_for_backward(x, *rounded)
        return _matmul(factor, rounded)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight, scale), table = upstream, ctx.saved_tensors, ctx.table
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            factor = quantize(gradient, stochastic=True)
            if table is not None:
                _observe(gradient, *factor, False, table, statistics.DGRAD)
            of_x = _matmul(factor, (weight.t(), scale))
        if ctx.needs_input_grad[1]:
            turned = _transformed(gradient)
            factor = quantize(turned, stochastic=True)
            if table is not None:
                _observe(turned, *factor, False, table, statistics.WGRAD)
            of_weight = _matmul(factor, quantize(_transformed(x)))
        return of_x, of_weight, None


def product(x: Tensor, weight: Tensor, table: Tensor | None = None) -> Tensor:
    """Return ``x`` (rows × in, bf16) times the transpose of ``weight`` (out × in), rows × out, bf16.

    The sides of the weight are multiples of 16, and so is the number of rows where gradients are computed.

    Args:
        x: the inputs.
        weight: may be fp32.
        table: gets the ``statistics`` of both and of the gradients; None: nothing is measured.
    """
    result: Tensor = _Product.apply(x, weight, table)
    return result


@torch.library.custom_op("mantissa::observe_nvfp4", mutates_args=["table"])
def _observe(values: Tensor, elements: Tensor, whole: Tensor, square: bool, table: Tensor, operand: int) -> None:
    """Add the statistics of an operand to a table, of the very elements that are multiplied."""
    high = BLOCK if square else 1
    sample = statistics.sampled(values, high).float()
    blocks = _blocks(sample, square)
    largest = (_scales(blocks.abs().amax((1, 3), keepdim=True), whole) * whole * _LARGEST).expand_as(blocks)
    rounded = statistics.sampled(elements, high).float() * whole
    statistics.add(table, operand, statistics.amax(values), sample, rounded, largest.reshape(sample.shape))


def _matmul(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Return ``a`` times the transpose of ``b``, both as ``quantize`` returns them: bf16, rounded once.

    Sums and scales are fp32. A product of bf16 with a scalar on the GPU would round that to bf16, too.
    """
    if a[0].is_cuda and not torch.version.hip:
        sums = torch.mm(a[0], b[0].t(), out_dtype=torch.float32)
    else:  # there mm has no such argument
        sums = torch.mm(a[0].float(), b[0].t().float())
    return (sums * (a[1] * b[1])).bfloat16()


def _transformed(values: Tensor) -> Tensor:
    """Return the transpose of a matrix, each 16 numbers of a row turned by a random Hadamard transform (fp32)."""
    return (values.t().float().reshape(-1, BLOCK) @ _hadamard(values.device)).view(values.shape[1], -1)


def _hadamard(device: torch.device) -> Tensor:
    """Return the transform: an orthogonal matrix of 16 × 16, whose rows have random signs.

    An element of Hadamard's matrix is negative where row and column have an odd number of bits in common. A tensor is
    not kept: the first one may be a fake one, of the memory forecast. It is made on the device: for a copy from the
    host, that would wait.
    """
    rows = torch.arange(BLOCK, device=device)
    common = rows[:, None] & rows
    common = common ^ common >> 2
    signs = (common ^ common >> 1) + (torch.full_like(rows, _SIGNS) >> rows)[:, None]
    return (1 - 2 * (signs & 1)) / math.sqrt(BLOCK)
