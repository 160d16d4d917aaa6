"""A model of seconds with one delicate layer: among its inputs are huge ones, beside which 4-bit numbers lose the rest.

``benchmarks/layers.py`` and tests name this folder as ``recipe_path``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainer.data.contract import Batch, Datasets, SampleId
from trainer.errors import check_number
from trainer.hardware import Hardware
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes

WIDTH, APART = 32, 16
"""``APART`` columns share a scale in nvfp4; in a delicate layer one of them is huge."""
HUGE = 1000.0
NOISE = 2.0
"""Standard deviation of what no model can learn, beside which the rounding of healthy layers is small."""


class Block(nn.Module):
    """tanh(A tanh(B x)), where a delicate B has huge inputs beside its own; their weights are 0, and stay so."""

    added: Tensor

    def __init__(self, delicate: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for linear in (self.up, self.down):
            nn.init.orthogonal_(linear.weight)
        huge = (torch.arange(WIDTH) % APART == 0) & torch.tensor(delicate)
        self.register_buffer("added", HUGE * huge)
        with torch.no_grad():
            self.up.weight[:, huge] = 0
        self.up.weight.register_hook(lambda gradient: gradient * ~huge.to(gradient.device))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x.float() + self.added))))


class Rows:
    """Inputs and outputs."""

    def __init__(self, seed: int, count: int, teacher: nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=generator)
        with torch.no_grad():
            self.y = teacher(self.x) + NOISE * torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        rows = torch.tensor([sample.index for sample in samples])
        return {"x": self.x[rows], "y": self.y[rows]}


@dataclass
class Delicate(Recipe):
    """The ``recipe=delicate`` config."""

    name: ClassVar[str] = "delicate"
    known_sum = True
    layer: int = 0
    """The block whose first layer is delicate, from 1; 0: none."""
    depth: int = 4
    """Blocks."""

    def __post_init__(self) -> None:
        check_number("recipe.layer", self.layer, 0)
        check_number("recipe.depth", self.depth)

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(80, 64, 64)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        """Return samples of a linear function of the inputs, and noise."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            teacher = nn.Linear(WIDTH, 1, bias=False)
            nn.init.normal_(teacher.weight, std=WIDTH**-0.5)
        return Datasets(Rows(1, 8192, teacher), Rows(2, 2048, teacher), "a linear function and noise")

    def build_model(self, datasets: Datasets) -> nn.Module:
        blocks = [Block(delicate=number == self.layer) for number in range(1, self.depth + 1)]
        return nn.ModuleDict({"h": nn.Sequential(*blocks), "head": nn.Linear(WIDTH, 1)})

    def blocks(self, model: nn.ModuleDict) -> list[nn.Module]:
        return list(model["h"].children())

    def count_targets(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: nn.ModuleDict, batch: Batch) -> LossOutput:
        prediction = model["head"](model["h"](batch["x"])).float()
        return LossOutput((prediction - batch["y"]).square().sum(), {})
