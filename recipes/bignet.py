"""BigNet: a stack of equal linear layers, to show the memory by category and what autocast can save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn

from recipes.data.synthetic import Synthetic
from trainer.data.contract import Batch, Datasets
from trainer.errors import UserError, check_number, check_range
from trainer.hardware import Hardware
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes

_BLOCK = 4
"""Linear layers in a block; about √20, where recomputing blocks of 20 layers saves most (Chen et al. 2016)."""


@dataclass
class BigNet(Recipe):
    """The ``recipe=bignet`` config: ``layers`` × Linear(``width``, ``width``) with ReLU between them."""

    name: ClassVar[str] = "bignet"
    unit: ClassVar[str] = "samples"
    known_sum = True
    reads_data = True
    architecture: ClassVar[tuple[str, ...]] = ("layers", "width")
    layers: int = 20
    """Linear layers."""
    width: int = 1000
    """Inputs and outputs of each layer."""
    loss_weight: float = 1.0
    """Multiplies the loss: a small one makes gradients that fp16 cannot hold without loss scaling."""

    def __post_init__(self) -> None:
        check_number("recipe.layers", self.layers)
        check_number("recipe.width", self.width)
        check_range("recipe.loss_weight", self.loss_weight, "(0, inf)")

    def sizes(self, hardware: Hardware) -> Sizes:
        """Batch 512 in one piece, long enough to see the loss fall."""
        return Sizes(steps=60, batch_size=512, micro_batch_size=512)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        """Vectors and the outputs of a fixed teacher network."""
        if not isinstance(data, Synthetic):
            raise UserError(f"recipe=bignet cannot read data={data.kind}; use data=synthetic")
        return data.vectors(self.width)

    def build_model(self, datasets: Datasets) -> nn.Module:
        """Build the stack with He's initialisation, without which the signal vanishes over 20 layers."""
        layers: list[nn.Module] = []
        for left in reversed(range(self.layers)):
            linear = nn.Linear(self.width, self.width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu" if left else "linear")
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.ReLU()] if left else [linear]
        size = 2 * _BLOCK  # with the ReLUs
        return nn.Sequential(*(nn.Sequential(*layers[i : i + size]) for i in range(0, len(layers), size)))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def count_targets(self, batch: Batch) -> int:
        """One target vector per sample."""
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Mean squared error over the vector, summed over the samples, times ``loss_weight``, in fp32."""
        prediction = model(batch["x"]).float()
        loss = F.mse_loss(prediction, batch["y"], reduction="sum") / self.width
        return LossOutput(loss * self.loss_weight, {})

    def summary_fields(self, model: nn.Module, datasets: Datasets) -> dict[str, Any]:
        return {"size": f"{self.layers}x{self.width}"}
