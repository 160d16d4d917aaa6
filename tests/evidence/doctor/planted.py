"""Tiny models in the project's trainer, and steps of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from evidence.doctor.step import step_of as step_of_trainer
from mantissa.step.step import Step
from tests.helpers import Arrays, NoData, trainer_of
from tests.mantissa.doctor.faults import BATCH, mean_square, noise
from trainer.checkpoint.store import Checkpoint
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets
from trainer.hardware import Hardware
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes
from trainer.trainer import Trainer

_TOKENS = ("data=synthetic", "data.vocab_size=90", "batch_size=4")
TINY = {
    "gpt2": ("recipe=gpt2", "recipe.size=tiny", "recipe.context=16", *_TOKENS),
    "llama": (
        *("recipe=llama", "recipe.layers=1", "recipe.width=32", "recipe.heads=4", "recipe.kv_heads=2", "recipe.ffn=64"),
        *("recipe.context=16", *_TOKENS),
    ),
    "bert": ("recipe=bert", "recipe.context=24", *_TOKENS),
    "t5": ("recipe=t5", "recipe.context=24", *_TOKENS),
    "resnet": ("recipe=resnet", "recipe.arch=tiny_regnet", "data=digits", "batch_size=4"),
    "bignet": ("recipe=bignet", "recipe.layers=4", "recipe.width=16", "batch_size=16"),
}
"""The project's recipes, small."""


def step_of(model: Callable[[], nn.Module], mode: str = "bf16") -> Step:
    """The first step of a model."""
    return step_of_trainer(Planted(model, Precision(mode=mode)).trainer())


def step_of_run(*overrides: str) -> Step:
    """The first step of a run."""
    return step_of_trainer(trainer_of(*overrides))


@dataclass(frozen=True)
class Planted:
    """A model in the trainer, before its first step, in one process."""

    model: Callable[[], nn.Module]
    """Takes a batch's ``x`` and returns a tensor; built after seeding."""
    precision: Precision
    loss: Callable[[Tensor, Batch], Tensor] = field(default=lambda output, batch: mean_square(output, batch))
    """From the model's output and the batch to the loss, summed over the samples."""

    def trainer(self) -> Trainer:
        """Return the trainer."""
        config = Config(
            recipe=PlantedRecipe(planted=self),
            data=NoData(),
            precision=self.precision,
            scaler=AutoScaler(),
            seed=0,
            checkpoint=Checkpoint(enabled=False),
            device="cpu",
        )
        return Trainer.from_config(config)


@dataclass
class PlantedRecipe(Recipe):
    """The recipe of a planted model. It has no name, so no command line offers it."""

    name: ClassVar[str] = ""
    planted: Any = None

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(100, BATCH, BATCH)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        torch.manual_seed(seed + 1)
        arrays = Arrays(**noise())
        return Datasets(arrays, arrays, "of a planted model")

    def build_model(self, datasets: Any) -> nn.Module:
        model: nn.Module = self.planted.model()
        return model

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.children())

    def count_targets(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        return LossOutput(self.planted.loss(model(batch["x"]), batch), {})
