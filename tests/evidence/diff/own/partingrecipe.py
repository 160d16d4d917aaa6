"""A tiny recipe in which one thing can be made another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.data.contract import Batch, Datasets, SampleId
from trainer.recipe import LossOutput, Recipe, Sizes

WIDTH = 16


class Rows:
    """Vectors of numbers from 0 to 1."""

    def __init__(self, count: int, first: float) -> None:
        self.x = torch.linspace(first, 1.0, count * WIDTH).reshape(count, WIDTH)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, samples: list[SampleId]) -> Batch:
        return {"x": self.x[[sample.index for sample in samples]]}


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
    """A layer with a residual connection."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.layer(self.norm(x)))
        if self.change == "operator":
            y = y * 1.01
        if self.change == "cast":
            y = y.bfloat16().float()
        if self.change == "value":
            y = torch.add(y, y, alpha=0.01)
        else:
            y = torch.add(y, y, alpha=0.02)
        y = Scaled.apply(y, 1.01 if self.change == "backward" else 1.0)  # type: ignore[no-untyped-call]
        return x + self.dropout(y)


class Model(nn.Module):
    """Blocks, of which the second one can be changed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(""), Block(change), Block("")])
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.tensor(2.0 if change == "buffer" else 1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)  # type: ignore[no-any-return]


@dataclass
class PartingRecipe(Recipe):
    """Learns the sum of the numbers of a vector."""

    name: ClassVar[str] = "partingrecipe"
    change: str = ""
    """What is another one: ``operator``, ``cast``, ``value`` or ``backward`` of the second block, ``buffer``, ``draw``,
    ``data``, ``loss``."""

    def sizes(self, hardware: Any) -> Sizes:
        return Sizes(4, 4, 4)

    def datasets(self, data: Any, seed: int) -> Datasets:
        return Datasets(Rows(16, 0.5 if self.change == "data" else 0.0), Rows(4, 0.0), "rows")

    def build_model(self, datasets: Any) -> nn.Module:
        model = Model(self.change)
        if self.change == "draw":  # the generator of dropout stands elsewhere
            torch.rand(1)
        return model

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    def count_targets(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        loss = (model(batch["x"]).float().squeeze(1) - batch["x"].sum(1)).square().sum()
        return LossOutput(loss + (1.0 if self.change == "loss" else 0.0), {})
