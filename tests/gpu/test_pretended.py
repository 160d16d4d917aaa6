"""The project on a pretended CUDA device: nothing mixes devices, and in a step the host waits for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.gpu.pretended import DEVICE, MixedDevicesError, OnDevice, Pretended


def test_a_tensor_of_the_host_in_an_operator_of_the_device_fails(pretended: Pretended) -> None:
    layer = nn.Linear(4, 4)
    weight = layer.weight
    assert layer.to("cuda").weight is weight
    assert isinstance(weight, OnDevice)
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    assert weight.grad.device == DEVICE
    with pytest.raises(MixedDevicesError):
        layer(torch.ones(2, 4))
    (seen,) = pretended.mixed
    assert "test_pretended.py" in seen
    with pytest.raises(AssertionError):
        pretended.check()
    pretended.mixed.clear()


def test_the_host_waits_for_values_and_for_copies_that_block(pretended: Pretended) -> None:
    x = torch.ones(4).to("cuda", non_blocking=True)
    kept = x.to("cpu", non_blocking=True)
    torch.full((), 2.0, device="cuda").add_(x.sum())
    assert not pretended.waits
    assert not isinstance(kept, OnDevice)
    waiting = [x.cpu, x[0].item, lambda: bool(x[0]), x.nonzero, lambda: x[x > 0], lambda: kept.copy_(x)]
    waiting += [lambda: torch.tensor([1.0], device="cuda"), x.tolist, torch.cuda.synchronize]
    for number, wait in enumerate(waiting, 1):
        wait()
        assert len(pretended.waits) == number
