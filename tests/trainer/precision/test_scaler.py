from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from mantissa.formats import FORMATS
from trainer.errors import UserError
from trainer.precision.scaler import AutoScaler, DynamicScaler, LossScale, Scaler, StaticScaler

CPU = torch.device("cpu")


def grad_scaler_history(config: DynamicScaler, goods: list[bool]) -> list[float]:
    """The scale that torch.amp.GradScaler uses at each step of a one-weight model."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    options = {"growth_factor": config.growth, "backoff_factor": config.backoff, "growth_interval": config.interval}
    scaler = torch.amp.GradScaler("cpu", init_scale=config.init, **options)
    scales = []
    for good in goods:
        scaler.scale(weight.sum())  # makes the scale's tensor
        scales.append(scaler.get_scale())
        weight.grad = torch.tensor(0.0 if good else float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return [*scales, scaler.get_scale()]


def own_history(config: DynamicScaler, goods: list[bool]) -> list[float]:
    scale = LossScale(CPU, config.init, config)
    scales = []
    for good in goods:
        scales.append(scale.scale.item())
        scale.update(torch.tensor(good))
    return [*scales, scale.scale.item()]


SOME = random.Random(0).choices([True, False], [4, 1], k=150)
"""Which of 150 steps are finite."""


@pytest.mark.parametrize(
    ("config", "goods"),
    [
        (DynamicScaler(init=1000.0, interval=3, floor_scale=2.0**-120), SOME),
        (DynamicScaler(init=1000.0, interval=1, floor_scale=2.0**-120), SOME),
        (DynamicScaler(init=1000.0, growth=1.7, backoff=0.3, interval=2, floor_scale=2.0**-120), SOME),
        (DynamicScaler(init=2.0**125, interval=1), [True] * 6),  # it never reaches infinity
    ],
)
def test_dynamic_scale_is_grad_scalers_bit_for_bit(config: DynamicScaler, goods: list[bool]) -> None:
    own = own_history(config, goods)
    assert own == grad_scaler_history(config, goods)
    assert len(set(own)) >= 3


def test_scale_stops_at_the_floor() -> None:
    assert own_history(DynamicScaler(init=4.0, floor_scale=1.5), [False] * 4) == [4, 2, 1.5, 1.5, 1.5]


def test_restored_state_continues() -> None:
    config = DynamicScaler(init=64.0, interval=4)
    first, second = (LossScale(CPU, config.init, config) for _ in range(2))
    for good in (True, False, True, True, True):
        first.update(torch.tensor(good))
    second.load_state_dict(first.state_dict())
    assert first.state_dict() == {"scale": 32.0, "good_steps": 3}
    for scale in (first, second):
        scale.update(torch.tensor(True))
        assert scale.state_dict() == {"scale": 64.0, "good_steps": 0}


def test_auto_scales_fp16_only() -> None:
    for mode in ("fp32", "tf32", "bf16"):
        assert not AutoScaler().build(FORMATS[mode], CPU).recovers
    assert AutoScaler().build(FORMATS["fp16"], CPU).rule == AutoScaler()
    assert StaticScaler(scale=8.0).build(FORMATS["fp16"], CPU).scale == 8


@pytest.mark.parametrize("mode", ["fp32", "bf16_sr", "fp16", "fp16_pure", "fp8"])
def test_contradictions_are_refused_unless_forced(mode: str) -> None:
    fits = (DynamicScaler, StaticScaler) if mode.startswith("fp16") else (Scaler,)
    AutoScaler().check(FORMATS[mode])
    for scaler in (Scaler, DynamicScaler, StaticScaler):
        scaler(force=True).check(FORMATS[mode])
        with (
            nullcontext()
            if scaler in fits
            else pytest.raises(UserError, match=rf"scaler={scaler.kind} with precision={mode}\b.*scaler=auto")
        ):
            scaler().check(FORMATS[mode])
