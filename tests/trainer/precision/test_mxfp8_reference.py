"""MXFP8 as torchao emulates it, against the specification: every code, special blocks, all magnitudes.

Where torchao deviates, the test says on which numbers, and what comes out.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.precision import ocp

EDGES = 448 * ocp.E8M0[:247]  # blocks up to here take the scale of that code; the next is beyond fp32
LOG2_ERROR = 2.0**-17 * math.log(2)  # relative: an ulp of logarithms from 64 to 128


def torchao(values: ocp.Array, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What torchao makes of the values: scales (uint8), values."""
    config = pytest.importorskip("torchao.prototype.mx_formats.config", reason="torchao is optional")
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    rounded = MXTensor.to_mx(
        torch.from_numpy(values).to(dtype),
        torch.float8_e4m3fn,
        32,
        config.ScaleCalculationMode.RCEIL,
        KernelPreference.EMULATED,
    )
    return rounded.scale.view(torch.uint8), rounded.dequantize(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of zeros; all NaN are one."""
    nan = torch.full((), torch.nan, dtype=one.dtype)
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[one.dtype]
    return torch.equal(*(torch.where(each.isnan(), nan, each).view(integers) for each in (one, other)))


def expected(values: ocp.Array, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values after rounding; also in bf16 they are exact, or all sums of products would have a second error."""
    exact = torch.from_numpy(np.prod(ocp.mxfp8(values), 0))
    rounded = exact.to(dtype)
    assert torch.equal(rounded.double()[rounded.isfinite()], exact[rounded.isfinite()])
    return rounded


def scale_codes(values: ocp.Array) -> Tensor:
    scales = ocp.mxfp8(values)[1][:, ::32]
    return torch.from_numpy(np.where(np.isnan(scales), 255, np.log2(scales) + 127)).to(torch.uint8)


def normal(rows: int, columns: int, seed: int = 0) -> ocp.Array:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double().numpy()


# --- the reference itself: codes ---


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


# --- torchao ---


def test_blocks_take_every_scale_that_fp32_needs() -> None:
    """A logarithm that is off at a power of two would double or halve the scale of a block at its edge."""
    below = np.nextafter(EDGES.astype(np.float32), np.float32(0)).astype(np.float64)
    values = np.concatenate([EDGES, below])[:, None].repeat(32, 1)
    codes, _ = torchao(values)
    assert codes.flatten().tolist() == [*range(247)] * 2
    assert torch.equal(codes, scale_codes(values))


SPECIAL = {
    "zeros": np.zeros(32),
    "negative zeros": np.full(32, -0.0),
    "all equal": np.full(32, 3.3),
    "one huge among tiny": np.array([2.0**100, *np.full(31, 2.0**-40)]),
    "one infinity": np.array([np.inf, *np.arange(31.0)]),
    "an infinity beside a huge one": np.array([-np.inf, 3e38, *np.arange(30.0)]),
    "one NaN": np.array([np.nan, *np.arange(31.0)]),
    "NaN and infinity": np.array([np.nan, np.inf, *np.arange(30.0)]),
    "the largest of fp32": np.full(32, float(np.finfo(np.float32).max)),
    "just below 248 × 2^120, which rounds to 240 × 2^120": np.full(32, 247.9 * 2.0**120),
    "subnormal beside normal": np.array([3e-36, *np.full(31, 1e-40)]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks(name: str) -> None:
    """A clamp that turns NaN into 448, or an infinity that comes out finite, would hide from training that it broke."""
    values = SPECIAL[name].astype(np.float32).astype(np.float64)[None]
    codes, rounded = torchao(values)
    assert same_bits(rounded, expected(values))
    assert torch.equal(codes, scale_codes(values))
    broken = torch.from_numpy(~np.isfinite(values))
    assert not rounded[broken].isfinite().any()


def test_what_rounds_up_to_2_to_the_128_is_infinite() -> None:
    """The specification (5.1) leaves products beyond fp32 open: finite numbers from 248 × 2^120 on become infinite."""
    values = np.full((1, 32), 248 * 2.0**120)
    assert expected(values).isinf().all()
    assert torchao(values)[1].isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_blocks_of_all_magnitudes(dtype: torch.dtype) -> None:
    """A scale from rounded arithmetic, a second rounding, or blocks along another dimension would change some bit."""
    exponents = np.arange(-117, 118)[:, None]  # from where nothing is below 448 × 2^-127 to where nothing overflows
    values = np.concatenate([normal(235, 128) * 2.0**exponents, normal(64, 128, 1) * np.exp(3 * normal(64, 128, 2))])
    values = torch.from_numpy(values).to(dtype).double().numpy()
    codes, rounded = torchao(values, dtype)
    assert torch.equal(codes, scale_codes(values))
    assert same_bits(rounded, expected(values, dtype))


# --- where torchao deviates ---


def test_deviation_the_scale_just_above_an_edge() -> None:
    """torchao takes the ceiling of an fp32 logarithm: it is too small just above 448 × 2^k, by at most 39 numbers.

    Then the scale is half of the right one, and the largest of the block saturates, by at most 5e-6 of its size.
    No bf16 and no fp16 number is so close to an edge.
    """
    edges = EDGES[1::6].astype(np.float32)[:, None]  # the widest among them: 448 × 2^-126
    above = (edges.view(np.int32) + np.arange(1, 100, dtype=np.int32)).view(np.float32).astype(np.float64)
    values = above.reshape(-1, 1).repeat(32, 1)
    codes, rounded = torchao(values)
    difference = scale_codes(values).int() - codes.int()
    assert set(difference.unique().tolist()) == {0, 1}
    excess = torch.from_numpy((above / edges - 1).reshape(-1))
    halved = difference[:, 0] == 1
    assert excess[halved].max() < LOG2_ERROR < 5.3e-6
    saturated = torch.from_numpy(edges.repeat(99, 1).reshape(-1, 1).repeat(32, 1))
    assert torch.equal(rounded[halved], saturated[halved])
    assert same_bits(rounded[~halved], expected(values)[~halved])
    for dtype, number in ((torch.bfloat16, 1 + 2**-7), (torch.float16, 1 + 2**-10)):
        closest = (torch.tensor(448.0, dtype=dtype) * number).double() / 448 - 1
        assert closest > 100 * LOG2_ERROR


def test_deviation_tiny_blocks_become_zero() -> None:
    """torchao divides by 1 where the scale is 2^-127: blocks up to 448 × 2^-127 (2.6e-36) come out as zeros.

    By the specification their values keep their elements.
    """
    values = np.float32(normal(8, 64, 4) * 2.0 ** -np.arange(121, 145, 3)[:, None]).astype(np.float64)
    assert ocp.largest(values, 1, 32).max() <= EDGES[0]
    codes, rounded = torchao(values)
    assert torch.equal(codes, scale_codes(values))
    assert not codes.any()
    assert not rounded.any()
    assert expected(values)[:4].count_nonzero() > 200
