"""Modules and operators that compute in fp32, as a cure says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mantissa
from mantissa.errors import FormatError, UsageError


@pytest.mark.parametrize("autocast", [True, False])
def test_islands_and_operators_need_no_more_than_what_a_cure_says(autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model = model if autocast else model.half()
    mantissa.keep_fp32(model, ["0"])
    copied, x = copy.deepcopy(model), torch.full((2, 8), 0.5)
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast), mantissa.fp32_ops(["exp"]):
        y = copied[0](x)
        assert y.dtype == y.exp().dtype == (torch.float32 if autocast else torch.float16)
        copied(x).sum().backward()
    assert all(weight.grad is not None for weight in copied.parameters())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["fc"], "no submodule 'fc'; it has 0, 1"),
        ([nn.Linear(1, 1)], "each of names must be a name, and is of type Linear"),
        (None, "is of type NoneType"),
    ],
)
def test_names_that_are_no_modules_are_refused(names: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mantissa.keep_fp32(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), names)


@pytest.mark.parametrize(
    ("island", "inputs"),
    [(nn.Linear(8, 8), torch.ones(2, 8)), (nn.Embedding(4, 8), torch.ones(2, 8, dtype=torch.long))],
)
def test_a_cast_after_keep_fp32_is_refused(island: nn.Module, inputs: torch.Tensor) -> None:
    # As Lightning's bf16-true casts. An embedding would compute, in bf16.
    model = nn.Sequential(island)
    mantissa.keep_fp32(model, "0")
    with pytest.raises(FormatError, match="cast the model first, then call keep_fp32"):
        model.bfloat16()(inputs)
    mantissa.keep_fp32(model, "0")
    assert model(inputs).dtype == torch.bfloat16


def test_a_bare_name_is_one_name() -> None:
    model = nn.ModuleDict({"ab": nn.Linear(1, 1), "a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}).half()
    mantissa.keep_fp32(model, "ab")
    assert [name for name, weight in model.named_parameters() if weight.dtype == torch.float32] == [
        "ab.weight",
        "ab.bias",
    ]


@pytest.mark.parametrize("name", ["softmax", "torch.softmax", "F.softmax", "aten._softmax"])
def test_an_operator_goes_by_any_of_its_names(name: str) -> None:
    with mantissa.fp32_ops(name), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype == torch.float32


@pytest.mark.parametrize("name", ["softmaxx", "exp_", "@"])
def test_what_no_operator_is_called_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"torch has no operator '{name}'"):
        mantissa.fp32_ops([name])
