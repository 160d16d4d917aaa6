"""A recipe of that model, in which other things can be made other ones, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from tests.evidence.diff.parts import WIDTH, Model
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.recipe import LossOutput, Recipe, Sizes


class Rows:
    """Vectors of numbers from 0 to 1."""

    def __init__(self, count: int, first: float) -> None:
        self.x = torch.linspace(first, 1.0, count * WIDTH).reshape(count, WIDTH)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, samples: list[SampleId]) -> Batch:
        return {"x": self.x[[sample.index for sample in samples]]}


@dataclass
class PartingRecipe(Recipe):
    """Learns the sum of the numbers of a vector."""

    name: ClassVar[str] = "partingrecipe"
    change: str = ""
    """What is another one: of the model, or ``draw``, ``data``, ``loss``."""

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
