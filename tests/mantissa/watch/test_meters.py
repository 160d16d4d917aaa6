"""What is measured of a step: lost updates, headroom of outputs and gradients, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mantissa
from mantissa.watch.meters import Measured


def test_lost_updates_are_measured_by_parameter_group_and_warned_about_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.bfloat16)
    groups = [{"params": net[0].parameters(), "name": "linear"}, {"params": net[1].weight}, {"params": net[1].bias}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5)
    said: list[str] = []
    watch = mantissa.Watch(net, optimizer, every=2, precision="bf16_pure", say=said.append)
    assert watch.metrics() == {}
    for _ in range(6):
        loss = net(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    assert [measured.step for measured in watch.history] == [2, 4, 6]
    last = watch.history[-1]
    assert list(last.lost) == ["linear", "1", "2"]
    assert last.lost["1"].lost_share == 1.0  # norm weights of 1
    assert last.lost["2"].lost_share < 0.5  # and biases near 0
    assert last.weights["1"] == pytest.approx(8**0.5)
    assert sum("parameter group 1 are lost" in text for text in said) == 1
    assert not any("group 2 are lost" in text for text in said)
    assert "lost updates, group 1" in str(watch)
    metrics = watch.metrics()
    assert metrics["precision/loss"] == last.loss
    assert metrics["precision/lost_updates/1"] == 1.0
    assert metrics["precision/weight_norm/1"] == last.weights["1"]
    assert metrics["precision/skipped_steps"] == 0
    assert metrics["precision/least_bits_to_overflow"] == min(last.overflow.values())


def test_weights_that_do_not_move_are_named_but_in_the_first_step_of_a_warm_up() -> None:
    net, said = nn.Linear(8, 1), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    watch = mantissa.Watch(net, optimizer, every=1, say=said.append)
    for rate in (0.0, 0.1, 0.0, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        loss = net(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    assert [text.partition(":")[0] for text in said if "No weight of parameter group 0 moves" in text] == ["step 3"]


def scaled_step(
    net: nn.Module, x: Tensor, scaler: Any, loss_of: Callable[[Tensor], Tensor]
) -> tuple[Measured, list[str]]:
    """Take a step of weights that stay, under autocast in fp16; return what was measured, and what was said."""
    optimizer, said = torch.optim.SGD(net.parameters(), 0.0), list[str]()
    watch = mantissa.Watch(net, optimizer, scaler, every=1, say=said.append)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(net(x).float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    watch.step(loss.item())
    assert watch.history[0].loss == loss
    return watch.history[0], said


def test_headroom_is_that_of_the_outputs_and_of_the_scaled_gradients() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Identity())
    nn.init.eye_(net[0].weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    measured, said = scaled_step(net, torch.full((2, 2), 2.0**15), scaler, lambda output: output.mean() / 2**10)
    assert measured.overflow["0"] == pytest.approx(1.0, abs=1e-3)
    assert measured.underflow["0"] == pytest.approx(15 + 14)
    # Each is 2 · 2^15 / 4 / 2^10, times the scale
    assert measured.overflow["0.weight.grad"] == pytest.approx(16 - 8, abs=1e-3)
    assert measured.underflow["0.weight.grad"] == pytest.approx(8 + 14)
    assert sum("within a factor of 2" in text for text in said) == 1


def test_a_scale_that_grows_at_the_measured_step_is_the_one_before_and_its_gradients_are_no_warning() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=1)
    measured, said = scaled_step(nn.Linear(2, 2), torch.ones(4, 2), scaler, lambda output: output.sum(1).mean())
    assert scaler.get_scale() == 2.0**16
    assert measured.overflow["bias.grad"] == pytest.approx(1 - 2**-11, abs=1e-3)
    assert not any("within a factor of 2" in text for text in said)


def test_weights_that_an_update_makes_nan_are_told_once() -> None:
    net = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
    optimizer, said = torch.optim.Adam(net.parameters(), eps=0.0), list[str]()
    watch = mantissa.Watch(net, optimizer, every=2, precision="fp32", say=said.append)
    for _ in range(6):
        loss = net(torch.tensor([0, 1])).square().mean()  # the third row has a gradient of 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    assert sum("Weights of parameter group 0 are not finite" in text for text in said) == 1
