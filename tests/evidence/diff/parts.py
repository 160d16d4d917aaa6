"""A tiny model in which one thing can be made another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16


class Scaled(torch.autograd.Function):
    """Passes values on, and gradients times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Block(nn.Module):
    """A layer with a residual connection.

    Args:
        change: what is another one: an ``operator`` more, a ``cast``, a ``value`` in an operator, or ``backward``.
    """

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.layer(self.norm(x)))
        if self.change == "operator":
            y = (y * 1.01).clone()
        if self.change == "cast":
            y = y.bfloat16().float()
        if self.change == "value":
            y = torch.add(y, y, alpha=0.01)
        else:
            y = torch.add(y, y, alpha=0.02)
        y = Scaled.apply(y, 1.01 if self.change == "backward" else 1.0)  # type: ignore[no-untyped-call]
        return x + self.dropout(y)


class Model(nn.Module):
    """Blocks, of which the second one can be changed, or the ``buffer``."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(""), Block(change), Block("")])
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.tensor(2.0 if change == "buffer" else 1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)  # type: ignore[no-any-return]
