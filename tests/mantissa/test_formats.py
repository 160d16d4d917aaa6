"""The table of formats says of each number format what torch's own dtypes say."""

from __future__ import annotations

import pytest
import torch

from mantissa.formats import BASIC, BF16, FORMATS, FP8, FP16, FP32, FP64, NEAREST, TF32, Number
from mantissa.names import format_name


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (FP64, torch.float64),
        (FP32, torch.float32),
        (BF16, torch.bfloat16),
        (FP16, torch.float16),
        (FP8, torch.float8_e4m3fn),
    ],
)
def test_range_and_rounding_are_those_of_the_dtype(number: Number, dtype: torch.dtype) -> None:
    facts = torch.finfo(dtype)
    assert (number.largest, number.unit_roundoff) == (facts.max, facts.eps / 2)
    smallest = torch.tensor(number.smallest, dtype=torch.float64)
    assert smallest > 0
    assert smallest.to(dtype).double() == smallest
    assert (smallest / 2).to(dtype).double() == 0  # a tie, which rounds to even


def test_tf32_has_the_exponents_of_fp32_and_the_significand_of_fp16() -> None:
    assert TF32.unit_roundoff == FP16.unit_roundoff
    assert TF32.largest == pytest.approx(FP32.largest, rel=2 * TF32.unit_roundoff)
    assert TF32.smallest == 2.0**-126 * 2 * TF32.unit_roundoff


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.bfloat16, "bf16"),
        (16, "fp16"),
        (32, "fp32"),
        ("bfloat16", "bf16"),
        ("16-mixed", "fp16"),
        ("bf16-true", "bf16_pure"),
        ("no", "fp32"),
    ],
)
def test_formats_have_the_names_of_torch_lightning_and_accelerate_too(given: object, name: str) -> None:
    assert format_name(given) == name
    assert format_name(name) == name


def test_every_row_is_one_that_layers_and_optimizer_carry_out() -> None:
    assert {"fp32", "tf32", "bf16", "fp16"} <= set(BASIC)
    only_half = {name for name, row in FORMATS.items() if row.only_half}
    assert {"bf16_pure", "fp16_pure"} <= only_half
    assert only_half.isdisjoint({"fp32", "tf32", "bf16", "fp16", "fp8", "bf16_master", "fp16_master", "bf16_sr"})
    for name, row in FORMATS.items():
        assert row.name == name
        assert row.half == (None if row.number in (FP64, FP32, TF32) else row.number.dtype)
        assert row.wide == (torch.float64 if row.number is FP64 else None)
        assert row.half_weights or not row.accumulates_in_fp32
        assert row.rounding == NEAREST or row.weights == torch.bfloat16  # which stochastic_round gives
