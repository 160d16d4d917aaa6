"""NVFP4 beside an exact reference, and the reference (ocp.py) beside torch's own formats.

MXFP8 and fp8 are rounded by torchao: what its products are here is in test_modules.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer.precision import ocp
from trainer.precision.nvfp4 import _transformed, quantize

LARGEST = 6 * 448.0
"""Of a tensor whose scale is 1."""


def normal(rows: int, columns: int, seed: int = 0) -> ocp.Array:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double().numpy()


def wide(rows: int, columns: int, seed: int = 0) -> ocp.Array:
    """Numbers whose blocks, and values in blocks, differ by many orders of magnitude."""
    return normal(rows, columns, seed) * np.exp(4 * normal(rows, columns // 16, seed + 1).repeat(16, 1))


class OnOneDevice(TorchDispatchMode):
    """Lets no operator take a tensor of the host, for whose copy the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(given.is_cuda for given in tree_leaves((args, kwargs)) if isinstance(given, Tensor)), func
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_given_nothing_by_the_host() -> None:
    with FakeTensorMode(), OnOneDevice():
        transformed = _transformed(torch.empty(32, 64, device="cuda", dtype=torch.bfloat16))
        elements, scale = quantize(transformed, stochastic=True)
    assert elements.is_cuda
    assert scale.is_cuda


def as_numbers(values: ocp.Array, dtype: torch.dtype) -> ocp.Array:
    return torch.from_numpy(values).to(dtype).double().numpy()


def of_quotients(values: ocp.Array, rows: int = 1) -> tuple[ocp.Array, float]:
    """Elements × scales of blocks, and the tensor's scale, of the reference that rounds each step to fp32."""
    quotients, scales, tensor_scale = ocp.nvfp4_quotients(values, rows)
    return ocp.nearest(quotients, ocp.E2M1) * scales, tensor_scale


def of_project(values: ocp.Array, square: bool = False, stochastic: bool = False) -> tuple[ocp.Array, float]:
    rounded, scale = quantize(torch.from_numpy(values).float(), square, stochastic)
    assert (rounded.dtype, scale.dtype, scale.shape) == (torch.bfloat16, torch.float32, ())
    return rounded.double().numpy(), scale.item()


def in_blocks(columns: ocp.Array, most: ocp.Array) -> ocp.Array:
    """A matrix with the scale 1, one row for each of ``most``: the numbers below the largest of each row's blocks."""
    numbers = np.resize(columns, (len(most), -(-len(columns) // 15), 15))
    blocks = np.concatenate([np.broadcast_to(most[:, None, None], (*numbers.shape[:2], 1)), numbers], -1)
    first = np.array([LARGEST, *np.zeros(blocks.shape[1] * 16 - 1)])
    return np.concatenate([first[None], blocks.reshape(len(most), -1)])


# --- the reference itself ---


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of zeros; all NaN are one."""
    nan = torch.full((), torch.nan, dtype=one.dtype)
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[one.dtype]
    return torch.equal(*(torch.where(each.isnan(), nan, each).view(integers) for each in (one, other)))


def test_every_code_has_the_value_that_torch_gives_it() -> None:
    """A wrong bias, subnormal or NaN in the reference would make every other test here worthless."""
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = torch.tensor([ocp.decode(code, 4, 3) for code in range(256)])
    e4m3[127] = e4m3[255] = torch.nan
    assert same_bits(codes.view(torch.float8_e4m3fn).float(), e4m3)
    e8m0 = torch.tensor([*ocp.E8M0, torch.nan], dtype=torch.float32)
    assert same_bits(codes.view(torch.float8_e8m0fnu).float(), e8m0)
    assert (ocp.E4M3[-1], ocp.E4M3[1], ocp.E8M0[0], ocp.E8M0[-1]) == (448, 2**-9, 2**-127, 2.0**127)
    assert [ocp.decode(code, 2, 1) for code in range(16)] == [
        *(0, 0.5, 1, 1.5, 2, 3, 4, 6),
        *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
    ]


def beside_midpoints(positive: ocp.Array) -> ocp.Array:
    """All values, all midpoints, and the fp32 numbers on both sides of a midpoint, of both signs."""
    middles = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    numbers = np.concatenate([positive, middles, *beside]).astype(np.float64)
    return np.concatenate([numbers, -numbers])


def test_rounding_to_e4m3_is_that_of_torch() -> None:
    """Ties away from even, or a rounding of subnormals to a coarser unit, would show at a midpoint or beside it."""
    numbers = beside_midpoints(ocp.E4M3)
    cast = torch.from_numpy(numbers).float().to(torch.float8_e4m3fn).float()
    assert same_bits(cast, torch.from_numpy(ocp.nearest(numbers, ocp.E4M3)).float())
    assert ocp.nearest(np.array([1e6, -np.inf]), ocp.E4M3).tolist() == [448, -448]


# --- to nearest ---


def test_every_element_and_the_numbers_between() -> None:
    """Ties away from even, or a wrong element, would show at a midpoint or one fp32 number beside it."""
    numbers = beside_midpoints(ocp.E2M1)
    values = in_blocks(numbers, np.array([6.0]))
    rounded, scale = of_project(values)
    assert scale == 1
    assert np.array_equal(rounded[1:], ocp.nearest(values[1:], ocp.E2M1))


def test_every_scale_of_a_block_and_the_numbers_between() -> None:
    """Scales that are clamped at 2^-6, rounded up, or lost in subnormals, or elements that do not saturate, would show.

    Near 2^-9 the largest of a block can be 9 times the scale, which saturates at 6; up to 2^-10 the scale is 0.
    """
    most = 6 * beside_midpoints(ocp.E4M3)
    most = most[most > 0]
    values = in_blocks(np.zeros(15), most)
    values[1:, 1:16] = -most[:, None] * np.arange(15) / 16
    values = as_numbers(values, torch.float32)
    reference, tensor_scale = of_quotients(values)
    scales = ocp.nvfp4_quotients(values)[1]
    rounded, scale = of_project(values)
    assert scale == tensor_scale == 1
    assert set(scales.flatten()) == set(ocp.E4M3)
    assert (np.abs(values[scales > 0]) / scales[scales > 0]).max() > 8
    assert np.array_equal(rounded, reference)


SHAPES = {"1 × 16": (False, 1), "16 × 16": (True, 16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draw", [normal, wide])
def test_random_matrices(draw: Callable[..., ocp.Array], shape: str, dtype: torch.dtype) -> None:
    """Blocks of another shape or direction, or one more rounding, would change some number."""
    square, rows = SHAPES[shape]
    values = as_numbers(draw(64, 256) * 1e-3, dtype)
    rounded, scale = of_project(values, square)
    reference, reference_scale = of_quotients(values, rows)
    assert scale == reference_scale
    assert np.array_equal(rounded, reference)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_zeros_stay_zeros(square: bool, stochastic: bool) -> None:
    """0 / 0 is NaN: a tensor of zeros, or a block of zeros in another tensor, would end training."""
    for zero in (0.0, -0.0):
        values = np.full((32, 32), zero)
        rounded, scale = of_project(values, square, stochastic)
        assert not (rounded * scale).any()
        assert math.isfinite(scale)
        values[0, 0] = 1.0
        rounded, scale = of_project(values, square, stochastic)
        assert rounded[0, 0] * scale == pytest.approx(1, rel=1e-6)
        assert np.count_nonzero(rounded) == 1


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(special: float, stochastic: bool) -> None:
    """A saturating clamp would turn it into 6, and training would go on; so the whole tensor is not finite."""
    for square in (False, True):
        values = normal(32, 32)
        values[3, 5] = special
        rounded, scale = of_project(values, square, stochastic)
        with np.errstate(invalid="ignore"):  # 0 × an infinite scale
            assert not np.isfinite(rounded * scale).any()


@pytest.mark.parametrize("exponent", [-149, -137, -60, 127])
def test_magnitudes_at_the_ends_of_fp32(exponent: int) -> None:
    """The tensor's scale is subnormal, or 0, where the tensor is tiny: NaN would end training, and 0 / 0 is one."""
    values = wide(16, 64)
    values = as_numbers(values / np.abs(values).max() * 2.0**exponent, torch.float32)
    rounded, scale = of_project(values)
    assert np.isfinite(rounded).all()
    reference, tensor_scale = of_quotients(values)
    assert scale == (tensor_scale or 1)  # 0: all values come out as zeros
    assert np.array_equal(rounded * scale, reference * tensor_scale)


# --- stochastic ---

DRAWS = 2**15


def tail(events: int, draws: int = DRAWS) -> float:
    """The distance of a mean of ``draws`` numbers from 0 to 1 from its expectation that all of ``events`` keep.

    But for a chance of 1e-9, by Hoeffding's inequality (1963): 2 exp(-2 draws distance²) for each.
    """
    return math.sqrt(math.log(2 * events / 1e-9) / (2 * draws))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stochastic_element_is_one_of_the_two_neighbours(shape: str) -> None:
    """Noise added before rounding to nearest, with a wrong width near a power of two, would reach a third element."""
    square, rows = SHAPES[shape]
    values = as_numbers(wide(64, 256), torch.float32)
    torch.manual_seed(9)  # not that of the values, which would be drawn from the same bits
    rounded, scale = of_project(values, square, stochastic=True)
    quotients, scales, tensor_scale = ocp.nvfp4_quotients(values, rows)
    assert scale == tensor_scale
    code = np.searchsorted(ocp.E2M1, np.abs(quotients), side="right") - 1
    low, high = (np.copysign(ocp.E2M1[np.minimum(code + step, 7)], quotients) for step in (0, 1))
    assert ((rounded == low * scales) | (rounded == high * scales)).all()
    between = (low != high) & (scales > 0)
    expected = ((quotients - low)[between] / (high - low)[between]).mean()
    assert abs((rounded == high * scales)[between].mean() - expected) < tail(1, between.sum())
    assert not np.array_equal(rounded, of_project(values, square, stochastic=True)[0])


def test_stochastic_rounding_has_no_bias_and_draws_for_each_element() -> None:
    """A bias would add up over steps; one draw for several elements would make their errors one large error."""
    inside = [0.0625, 0.45, 0.5625, 0.9, 1.03, 1.49, 1.75, 2.2, 2.9, 3.2, 3.9, 4.1, 5.9]
    row = np.array([6.0, *inside[:7], *(-number for number in inside[7:]), 0.25, -5.0])
    values = as_numbers(np.tile(row, (DRAWS + 1, 1)), torch.float32)
    values[0, 0] = LARGEST  # the scale of the tensor is 1; with 6 in it, so is that of every other block
    torch.manual_seed(1)
    rounded = of_project(values, stochastic=True)[0][1:]
    row = values[1]
    code = np.searchsorted(ocp.E2M1, np.abs(row), side="right") - 1
    low, high = ocp.E2M1[code], ocp.E2M1[np.minimum(code + 1, 7)]
    up = (np.abs(rounded) == high)[:, 1:]
    expected = (np.abs(row) - low)[1:] / (high - low)[1:]
    assert np.abs(up.mean(0) - expected).max() < tail(15)
    together = (up.T.astype(float) @ up) / DRAWS
    np.fill_diagonal(together, (expected**2))
    assert np.abs(together - np.outer(expected, expected)).max() < tail(15 * 14 // 2)
    again = (up[1:] & up[:-1]).mean(0)  # of one row and the next
    assert np.abs(again - expected**2).max() < tail(2 * 15, DRAWS // 2 - 1)  # two sets of independent pairs


def test_what_is_an_element_never_moves() -> None:
    """An offset in the draw, or a draw of exactly 1, would move what needs no rounding."""
    row = np.concatenate([ocp.E2M1, -ocp.E2M1])
    values = np.tile(row, (4097, 1))
    values[0, 0] = LARGEST
    torch.manual_seed(2)
    assert np.array_equal(of_project(values, stochastic=True)[0][1:], values[1:])
