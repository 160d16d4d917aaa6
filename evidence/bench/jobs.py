"""The jobs that the benchmarks train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data.synthetic import Vectors
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets
from trainer.hardware import Hardware
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """A recipe with overrides, as on the command line."""

    name: str
    overrides: tuple[str, ...]
    steps: int = 1
    """Optimizer steps in one block, after which another loop has its turn."""
    rounds: int = 1
    """Blocks of each loop in one repeat."""
    recipe: type[Recipe] | None = None
    """Replaces the config's recipe; ``command`` then describes it."""
    command: str = "python scripts/train.py"
    threads: int | None = None
    """Number of threads of torch's operators on a CPU; None: torch's default."""

    def config(self, *further: str) -> Config:
        """Return the config of this job with further overrides."""
        config = compose([*self.overrides, *further])
        return config if self.recipe is None else replace(config, recipe=self.recipe())

    def line(self, *further: str) -> str:
        """Return the command that trains this, for the report."""
        return " ".join([self.command, *self.overrides, *further])


def steps_of(trainer: Trainer) -> Callable[[int], None]:
    """Return the function that takes a number of optimizer steps."""
    batches = trainer.batches()

    def run(steps: int) -> None:
        for _ in range(steps):
            trainer.train_step(next(batches))

    return run


def gpt2_job(hardware: Hardware) -> Job:
    """Return GPT-2, 124M on a GPU and mini on a CPU, on synthetic tokens."""
    if hardware.is_gpu:
        return Job("gpt2 124M", ("recipe=gpt2", "recipe.size=124M", "data=synthetic", "batch_size=16"), 10, 5)
    overrides = ("recipe=gpt2", "recipe.size=mini", "data=synthetic", "data.vocab_size=4096", "batch_size=16")
    return Job("gpt2 mini", overrides, 2, 5)


def resnet_job(hardware: Hardware) -> Job:
    """Return ResNet-50 on 224 × 224 images; on a GPU the batch stays on the device, or loading would be the limit."""
    overrides = ("recipe=resnet", "recipe.arch=resnet50", "data=synthetic")
    if hardware.is_gpu:
        return Job("resnet50", (*overrides, "batch_size=128", "loader=synthetic-on-device"), 10, 2)
    return Job("resnet50", (*overrides, "batch_size=32"))


@dataclass
class TinyMLP(Recipe):
    """An MLP of 64 → 64 → 10. It has no name, so ``recipe=`` does not offer it."""

    def sizes(self, hardware: Hardware) -> Sizes:
        """Return sizes so small that most of a step is overhead."""
        return Sizes(steps=1000, batch_size=32, micro_batch_size=32)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        """Normal vectors, labelled by a fixed linear map."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8192, 64, generator=generator)
        labels = (x @ torch.randn(64, 10, generator=generator)).argmax(1)
        return Datasets(Vectors(x, labels), Vectors(x[:64], labels[:64]), "normal vectors")

    def build_model(self, datasets: Datasets) -> nn.Module:
        """Build the two layers."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def count_targets(self, batch: Batch) -> int:
        """One label per vector."""
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Cross-entropy."""
        return LossOutput(F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum"), {})


TINY_MLP = Job(
    "tiny MLP",
    ("data=synthetic", "batch_size=32"),
    steps=100,
    rounds=20,
    recipe=TinyMLP,
    command="one thread, an MLP of 64 → 64 → 10 as the recipe, with",
    threads=1,  # at this size, a second thread only waits at barriers
)
# No more samples than one batch: the ledger counts the data that a step touches, and the model is to be measured.
BIGNET = Job("bignet", ("recipe=bignet", "data=synthetic", "data.samples=512", "profiler=none"))
