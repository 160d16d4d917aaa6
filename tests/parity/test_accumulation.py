"""1 × N microbatches and N × 1 give the same gradient, however the valid targets fall among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Arrays, NoData, start
from trainer.config import Config
from trainer.hardware import Hardware
from trainer.optimizer import Optimizer
from trainer.recipe import Batch, Datasets, DataSource, LossOutput, Recipe, Sizes
from trainer.update import Clip

SAMPLES, LENGTH, WIDTH, CLASSES = 8, 12, 6, 5


@dataclass
class Tagging(Recipe):
    """Label each position of a sequence, some of them not: between none and all of a sample's are valid. fp64."""

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(1, SAMPLES, SAMPLES)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
        y = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
        for sample, valid in enumerate([0, 1, 2, 3, 5, 8, 10, 12]):
            y[sample, valid:] = -100
        return Datasets(Arrays(x=x, y=y), Arrays(x=x, y=y), "made up")

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()

    def count_targets(self, batch: Batch) -> int:
        return int((batch["y"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        logits, labels = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        return LossOutput(F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100), {})


@dataclass
class Copy(Clip):
    """Changes nothing and keeps the gradients, which the step clears."""

    kind: ClassVar[str] = "copy"
    gradients: list[Tensor] = field(default_factory=list)

    def apply(self, parameters: list[nn.Parameter], norm: Tensor) -> None:
        self.gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def gradient_and_loss(micro_batch_size: int) -> tuple[Tensor, float]:
    copy = Copy()
    config = Config(
        Tagging(),
        NoData(),
        clip=copy,
        optimizer=Optimizer("SGD", lr=0.1),
        device="cpu",
        batch_size=SAMPLES,
        micro_batch_size=micro_batch_size,
    )
    trainer = start(config)
    record = trainer.train_step(next(trainer.batches()))
    return torch.cat([gradient.flatten() for gradient in copy.gradients]), record.loss.item()


def mean_of_means(micro_batch_size: int) -> Tensor:
    """What a loop computes that divides each microbatch's mean loss by their number."""
    trainer = start(Config(Tagging(), NoData(), device="cpu", batch_size=SAMPLES, micro_batch_size=micro_batch_size))
    microbatches = next(trainer.batches())
    for batch in microbatches:
        targets = max(1, trainer.recipe.count_targets(batch))
        (trainer.recipe.loss(trainer.model, batch).loss_sum / targets / len(microbatches)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


def relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_microbatches_do_not_change_gradient_or_loss(micro_batch_size: int) -> None:
    whole, loss = gradient_and_loss(SAMPLES)
    parts, loss_of_parts = gradient_and_loss(micro_batch_size)
    assert whole.dtype == torch.float64
    assert relative(parts, whole) < 1e-12
    assert loss_of_parts == pytest.approx(loss, rel=1e-6)


def test_the_whole_batch_is_the_mean_over_valid_targets() -> None:
    whole, _ = gradient_and_loss(SAMPLES)
    assert relative(mean_of_means(SAMPLES), whole) < 1e-12


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_mean_of_means_would_not_have_passed(micro_batch_size: int) -> None:
    whole, _ = gradient_and_loss(SAMPLES)
    assert relative(mean_of_means(micro_batch_size), whole) > 1e-3
