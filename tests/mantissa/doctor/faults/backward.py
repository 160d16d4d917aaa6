"""Planted faults that are not finite in the backward pass: numbers 9, 17, 19 and 28 of docs/doctor.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mantissa.finding import BACKWARD, DOMAIN, EXCHANGE, OVERFLOW
from tests.mantissa.doctor.faults.planted import WIDTH, Expected, Fault, around, mean_square, noise
from trainer.data.contract import Batch
from trainer.precision.modes import Precision
from trainer.precision.scaler import StaticScaler


class LargeInput(nn.Module):
    """A linear layer with inputs of 100: its weight gradient is 1000 times the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.mul_(1e-2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x * 0 + 100)
        return x + y


class RootOfPositive(nn.Module):
    """The square roots of positive numbers, 0 elsewhere, the way that has no gradient at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).float().abs() * (x > 0)
        return torch.where(h > 0, torch.sqrt(h), 0.0)


class _DividesByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / torch.zeros((), device=grads[0].device)


class Custom(nn.Module):
    """A function whose backward divides by 0."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _DividesByZero.apply(x)
        return y


def small(output: Tensor, batch: Batch) -> Tensor:
    """Return a thousandth of the mean square."""
    return mean_square(output, batch) * 1e-3


def large_sum(output: Tensor, batch: Batch) -> Tensor:
    """Return a sum whose gradient is 10^4 for every output and sample, after the mean over 8 samples."""
    return output.float().sum() * 8e4


FAULTS = [
    Fault(
        9,
        "static scale 2²⁴: a weight gradient overflows",
        Expected(OVERFLOW, BACKWARD, "1.linear", "fp16+scaler"),
        lambda: around(LargeInput()),
        Precision(mode="fp16"),
        loss=small,
        scaler=StaticScaler(scale=2.0**24),
    ),
    Fault(
        28,
        "gradients that overflow only in the fp16 sum of two ranks",
        Expected(OVERFLOW, EXCHANGE, "0", "sum of 2 ranks"),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)),
        Precision(mode="fp16_master"),
        lambda: noise(size=0.1),
        large_sum,
        StaticScaler(scale=1.0),
        ranks=2,
    ),
    Fault(
        17,
        "where(x > 0, sqrt(x), 0) at 0",
        Expected(DOMAIN, BACKWARD, "1", "fp32"),
        lambda: around(RootOfPositive()),
        Precision(mode="fp16"),
    ),
    Fault(
        19,
        "a custom function with inf in its backward",
        Expected(DOMAIN, BACKWARD, "1", "fp32"),
        lambda: around(Custom()),
        Precision(mode="fp16"),
    ),
]
