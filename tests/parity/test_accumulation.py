"""1 × N microbatches and N × 1 give the same gradient, however the valid targets fall among them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.language import LossHead, torch_can_chunk
from tests.helpers import Arrays, KeptGradients, NoData, fit, start
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets
from trainer.hardware import Hardware
from trainer.optim.optimizer import Optimizer
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes

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

    def build_model(self, datasets: Datasets) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()

    def count_targets(self, batch: Batch) -> int:
        return int((batch["y"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        logits, labels = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        return LossOutput(F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100), {})


def gradient_and_loss(micro_batch_size: int) -> tuple[Tensor, float]:
    kept = KeptGradients()
    sizes = {"batch_size": SAMPLES, "micro_batch_size": micro_batch_size}
    trainer = start(Config(Tagging(), NoData(), clip=kept, optimizer=Optimizer("SGD", lr=0.1), device="cpu", **sizes))
    record = fit(trainer, 1)[0]
    return torch.cat([gradient.flatten() for gradient in kept.gradients]), record.loss.item()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_microbatches_do_not_change_gradient_or_loss(micro_batch_size: int) -> None:
    whole, loss = gradient_and_loss(SAMPLES)
    parts, loss_of_parts = gradient_and_loss(micro_batch_size)
    assert whole.dtype == torch.float64
    assert (parts - whole).norm() < 1e-12 * whole.norm()
    assert loss_of_parts == pytest.approx(loss, rel=1e-6)


MANY = 491_520
"""Targets of a step of GPT-2: 480 × 1024. 1/491,520 is no 16-bit number: bf16's next one is 0.34 % larger."""


@dataclass
class Counted(Recipe):
    """The output layer of a language model in one microbatch of a step of ``MANY`` targets."""

    chunked: bool = False

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(1, 256, 256)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(256, 32, generator=generator)
        arrays = Arrays(x=x, y=torch.randint(512, (256,), generator=generator))
        return Datasets(arrays, arrays, "made up")

    def build_model(self, datasets: Datasets) -> nn.Module:
        return LossHead(nn.Parameter(torch.randn(512, 32) / 6), self.chunked)

    def count_targets(self, batch: Batch) -> int:
        return MANY

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        return LossOutput(model(batch["x"], batch["y"]), {})


def output_gradient(mode: str, chunked: bool = False) -> tuple[Tensor, float]:
    kept = KeptGradients()
    recipe, precision = Counted(chunked=chunked), Precision(mode)
    trainer = start(
        Config(recipe, NoData(), device="cpu", steps=1, precision=precision, scaler=AutoScaler(), clip=kept)
    )
    record = fit(trainer)[0]
    return kept.gradients[0].double().flatten(), record.loss.item()


CHUNKED = pytest.param(True, marks=pytest.mark.skipif(not torch_can_chunk(), reason="this torch cannot"), id="chunked")


@pytest.mark.parametrize("chunked", [pytest.param(False, id="whole"), CHUNKED])
@pytest.mark.parametrize("mode", ["bf16", "fp16", "bf16_master", "fp16_master"])
def test_no_gradient_is_longer_for_a_count_that_16_bits_round(mode: str, chunked: bool) -> None:
    """In bf16 the mean's own would be 0.34 % too long in chunks, as a whole 0.28 % too short."""
    exact, loss = output_gradient("fp32")
    gradient, in_16_bits = output_gradient(mode, chunked)
    assert abs((gradient @ exact) / exact.norm().square() - 1) < 1e-3
    assert in_16_bits == pytest.approx(loss, rel=1e-3)  # it is the mean
