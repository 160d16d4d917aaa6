"""Planted faults of gradients that fp16 cannot hold: numbers 10 to 12."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mantissa.finding import BACKWARD, SCALE, UNDERFLOW
from tests.mantissa.doctor.faults.planted import WIDTH, Expected, Fault, around, mean_square
from trainer.data.contract import Batch
from trainer.precision.modes import Precision
from trainer.precision.scaler import Scaler, StaticScaler


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class Faint(nn.Module):
    """A residual layer whose gradient is far smaller than that of all others."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + _Scaled.apply(self.layer(x), 2.0**-30)
        return result


class TwoBranches(nn.Module):
    """The sum of two branches. The gradients of one are 2**46 times as large as those of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.tiny = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Scaled.apply(self.big(x), 2.0**12) + _Scaled.apply(self.tiny(x), 2.0**-34)
        return result


def _small_loss(output: Tensor, batch: Batch) -> Tensor:
    return mean_square(output, batch) * 1e-6


FAULTS = [
    Fault(
        10,
        "no loss scale, and a loss of 1e-6",
        Expected(UNDERFLOW, BACKWARD, ("0.up", "0.down", "1", "2.up", "2.down"), "fp16"),
        lambda: around(nn.Linear(WIDTH, WIDTH)),
        Precision(mode="fp16"),
        loss=_small_loss,
        scaler=Scaler(force=True),
    ),
    Fault(
        11,
        "one layer's gradient times 2**-30",
        Expected(UNDERFLOW, BACKWARD, "1.layer", "fp16"),
        lambda: around(Faint()),
        Precision(mode="fp16"),
        scaler=StaticScaler(scale=1024),
    ),
    Fault(
        12,
        "a big and a tiny branch",
        Expected(SCALE, BACKWARD, "tiny", "fp16"),
        TwoBranches,
        Precision(mode="fp16"),
    ),
]
