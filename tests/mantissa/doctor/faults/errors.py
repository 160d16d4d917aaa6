"""Planted faults of rounding: the results are finite, and have more error than 16 bits make necessary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mantissa.finding import BACKWARD, ERROR, FORWARD
from tests.mantissa.doctor.faults.planted import WIDTH, Block, Expected, Fault, around
from trainer.precision.modes import Precision

LONG = 4096
"""Terms of a sum, positions of a context."""
REPEATS = 10_000


class NaiveVariance(nn.Module):
    """Divides the features by a standard deviation that is computed as E[x²] - E[x]²."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.up.bias, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2
        result: Tensor = x + (h - h.mean(-1, keepdim=True)) / (variance.abs() + 1e-2).sqrt()
        return result


class RunningSum(nn.Module):
    """Adds up one term for each position, in the dtype of the terms."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        nn.init.constant_(self.gate.bias, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        terms = self.gate(x)[..., 0].sigmoid()
        total = torch.zeros_like(terms[:, 0])
        for term in terms.unbind(1):
            total = total + term
        result: Tensor = x.mean(1) * (total / terms.shape[1])[:, None]
        return result


class Tokens(nn.Module):
    """The mean embedding of many tokens, most of them the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(self.embed(x.long()[:, 0]).mean(1))
        return result


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position, computed in bf16."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        powers = torch.arange(0, WIDTH, 2) / WIDTH
        self.register_buffer("frequencies", 10_000.0**-powers, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).to(torch.bfloat16)
        angles = positions[:, None] * self.frequencies.to(torch.bfloat16)
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
        )


def _sequences(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, WIDTH)}


def _repeated() -> dict[str, Tensor]:
    tokens = torch.zeros(16, 1, REPEATS)
    tokens[:, :, :100] = torch.randint(1, 8, (16, 1, 100)).float()
    return {"x": tokens}


class Turned(nn.Module):
    """A layer before the rotation, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.rotary = Rotary()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.rotary(self.before(x)))


FAULTS = [
    Fault(
        20,
        "E[x²] - E[x]² with a mean of 100",
        Expected(ERROR, FORWARD, "1", "bf16"),
        lambda: around(NaiveVariance()),
        Precision(mode="bf16"),
    ),
    Fault(
        21,
        "a running sum of 4096 terms",
        Expected(ERROR, FORWARD, "0", "bf16"),
        lambda: nn.Sequential(RunningSum(), Block()),
        Precision(mode="bf16"),
        data=lambda: _sequences(16, LONG),
    ),
    Fault(
        23,
        "the embedding gradient of a token that occurs 10,000 times",
        Expected(ERROR, BACKWARD, "embed", "bf16_master"),
        Tokens,
        Precision(mode="bf16_master"),
        data=_repeated,
    ),
    Fault(
        26,
        "rotary angles at long context",
        Expected(ERROR, FORWARD, "rotary", "bf16"),
        Turned,
        Precision(mode="bf16"),
        data=lambda: _sequences(16, LONG),
    ),
]
