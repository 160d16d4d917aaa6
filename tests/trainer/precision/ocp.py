"""Block formats in fp64, as their specifications define them: what the quantisers of this project are tested against.

From the OCP Microscaling Formats (MX) Specification v1.0 (2023): sections 5.1 (a block is one scale X and elements P,
its values are X × P; a NaN scale makes all of them NaN), 5.3.1 (E4M3, as in the OCP 8-bit Floating Point Specification
v1.0), 5.3.3 (E2M1), 5.4.1 (E8M0), 6.3 (conversion: P is V / X rounded to the nearest element, ties to the even code,
saturated). In two things this is not section 6.3: the scale, there the power of two of the largest value, is rounded up
here (RCEIL), so that nothing saturates, as in cuBLAS ("1D block scaling"); and NVFP4 is no format of OCP's (NVIDIA,
"Pretraining Large Language Models with NVFP4", arXiv 2509.25149, appendix on quantisation).

Nothing is divided where a rounding is decided: values are compared with midpoints × scale, which fp64 holds exactly.
Matrices are (rows, columns), fp64, and hold numbers of fp32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def decode(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a code: sign, exponent, mantissa, as sections 5.3.1 and 5.3.3 lay it out; NaN not considered."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    mantissa = code % 2**mantissa_bits
    lowest = 1 - (2 ** (exponent_bits - 1) - 1) - mantissa_bits  # of the unit of subnormal numbers
    if exponent == 0:
        return sign * math.ldexp(mantissa, lowest)
    return sign * math.ldexp(2**mantissa_bits + mantissa, lowest + exponent - 1)


E4M3 = np.array([decode(code, 4, 3) for code in range(127)])
"""Of the codes from 0 to 126; 127 is NaN, and 128 more is the negative."""
E5M2 = np.array([decode(code, 5, 2) for code in range(124)])
"""Of the codes from 0 to 123; 124 is infinite, and 128 more is the negative."""
E2M1 = np.array([decode(code, 2, 1) for code in range(8)])
"""Of the codes from 0 to 7; 8 more is the negative."""
E8M0 = np.array([math.ldexp(1.0, code - 127) for code in range(255)])
"""Of the codes from 0 to 254; 255 is NaN."""


def encode(values: Array, positive: Array, unit: Array | float = 1.0) -> NDArray[np.int64]:
    """The code of each |value| / unit: nearest, ties to the even code, above the largest the largest.

    ``positive``: the values of all codes in turn; ``unit``: a positive number, or 0, for which every value is large.
    """
    middles = (positive[1:] + positive[:-1]) / 2 * np.asarray(unit)[..., None]
    sizes = np.abs(values)[..., None]
    below = (middles < sizes).sum(-1)
    tie = (middles == sizes).any(-1)
    return below + (tie & (below % 2 == 1))


def nearest(values: Array, positive: Array, unit: Array | float = 1.0) -> Array:
    """The element for each value / unit, with its sign; NaN stays NaN."""
    elements = np.copysign(positive[encode(values, positive, unit)], values)
    return np.where(np.isnan(values), np.nan, elements)


def largest(values: Array, rows: int, columns: int) -> Array:
    """The largest size in its block of rows × columns, for each value."""
    (height, width) = values.shape
    tiles = np.abs(values).reshape(height // rows, rows, width // columns, columns)
    return np.broadcast_to(tiles.max((1, 3), keepdims=True), tiles.shape).reshape(values.shape)


def mxfp8(values: Array) -> tuple[Array, Array]:
    """Elements and scales (one for each value) of MXFP8 in 1 × 32 blocks along the columns.

    The scale is the smallest of E8M0 with which the largest value of its block is at most 448: found in the table, not
    by a logarithm. Infinities and NaN as in PTX (cvt.rp.satfinite.ue8m0x2.f32): an infinity takes the largest scale and
    saturates, and NaN makes its block NaN.
    """
    most = largest(values, 1, 32)
    code = np.searchsorted(E4M3[-1] * E8M0, most)
    code[np.isinf(most)] = 254
    scales = np.append(E8M0, np.nan)[code]
    return nearest(values, E4M3, scales), scales


def nvfp4_quotients(values: Array, rows: int = 1) -> tuple[Array, Array, float]:
    """What NVFP4 rounds to elements in blocks of rows × 16, each step rounded to fp32; with both scales.

    Steps: the largest of a block / 6 / the tensor's scale gives the block's scale; value / (that × the tensor's).
    """
    one = np.float32
    tensor_scale = one(np.abs(values).max() / (E2M1[-1] * E4M3[-1]))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        blocks = largest(values, rows, 16).astype(one) / one(E2M1[-1]) / tensor_scale
        scales = nearest(np.nan_to_num(blocks.astype(float)), E4M3)  # 0 / 0 is of a tensor of zeros
        quotients = values.astype(one) / (scales.astype(one) * tensor_scale)
    return np.nan_to_num(quotients.astype(float)), scales, float(tensor_scale)
