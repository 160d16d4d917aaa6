"""Modules and operators that compute in fp32, as a cure says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mantissa


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
