"""Watch on a pretended CUDA device, whose fixture fails where the host waits within a step."""

from __future__ import annotations

import torch
from torch import nn

import mantissa
from tests.gpu.pretended import Pretended


def test_a_step_whose_loss_is_not_known_is_measured_without_waiting(pretended: Pretended) -> None:
    net = nn.Linear(8, 1).to("cuda")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    watch = mantissa.Watch(net, optimizer, every=2, say=lambda text: None)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.ones(4, 8, device="cuda")).square().mean().backward()
        optimizer.step()
        watch.step()
    watch.close()
    assert watch.number == 4
    pretended.check()
