"""What a look at some samples tells before the first step, such as that a loss is a mean and no sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from recipes.bignet import BigNet
from tests.helpers import Arrays, NoData, same_bits, start, trainer_of
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.errors import UserError, is_out_of_memory
from trainer.hardware import Hardware
from trainer.precision.modes import Precision
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes

LABELS = torch.arange(96).reshape(16, 6) % 5
LABELS[:, 3:] = torch.where(torch.arange(16)[:, None] % 3 == 0, -100, LABELS[:, 3:])  # padding


@dataclass
class Tags(Recipe):
    """Label each position of a sequence, with dropout and batch norm."""

    how: str = "sum"

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(2, 8, 8)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        x = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(1))
        return Datasets(Arrays(x=x, y=LABELS), Arrays(x=x, y=LABELS), "made up")

    def build_model(self, datasets: Datasets) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 5))

    def count_targets(self, batch: Batch) -> int:
        return COUNTS.get(self.how, lambda batch: int((batch["y"] != -100).sum()))(batch)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        return LossOutput(LOSSES[self.how](model(batch["x"]).float(), batch), {"right": torch.zeros(())})


def samples(batch: Batch) -> int:
    return len(batch["y"])


def entropy(logits: Tensor, batch: Batch, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction=reduction)


def random_weights(logits: Tensor, batch: Batch) -> Tensor:
    """As of a diffusion model, whose noise is drawn in evaluation, too."""
    return entropy(logits, batch) * torch.rand(()) ** 8


def contrastive(logits: Tensor, batch: Batch) -> Tensor:
    rows = F.normalize(logits.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="sum")


def squeezed(logits: Tensor, batch: Batch) -> Tensor:
    """Which one sample breaks, since its first dimension is taken away, too."""
    rows, labels = logits[:, :1].squeeze(), batch["y"][:, 0]
    return F.cross_entropy(rows, labels, reduction="sum")


LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "sum": entropy,
    "mean over tokens": lambda logits, batch: entropy(logits, batch, "mean"),
    "mean over samples": lambda logits, batch: entropy(logits, batch, "none").view(-1, 6).sum(1).mean(),
    "mean of squares": lambda logits, batch: F.mse_loss(logits, torch.zeros_like(logits)),
    "mean for each sample, summed": lambda logits, batch: entropy(logits, batch, "none").view(-1, 6).mean(1).sum(),
    "mean that each microbatch counts once": lambda logits, batch: entropy(logits, batch, "mean"),
    "random": random_weights,
    "contrastive": contrastive,
    "squeezed": squeezed,
    "zero": lambda logits, batch: 0 * entropy(logits, batch),
    "not finite": lambda logits, batch: entropy(logits, batch) / 0,
}
COUNTS: dict[str, Callable[[Batch], int]] = {
    "mean over samples": samples,
    "mean of squares": samples,
    "mean for each sample, summed": samples,
    "mean that each microbatch counts once": lambda batch: 1,
    "contrastive": samples,
    "squeezed": samples,
}
MEANS = [how for how in LOSSES if how.startswith(("mean over", "mean of"))]
PRECISIONS = ["fp32", "bf16_pure"]


def config(how: str, mode: str = "fp32") -> Config:
    return Config(Tags(how), NoData(), device="cpu", precision=Precision(mode))


@pytest.mark.parametrize("mode", PRECISIONS)
@pytest.mark.parametrize("how", MEANS)
def test_a_mean_is_refused_with_the_remedy(how: str, mode: str) -> None:
    with pytest.raises(UserError, match='reduction="sum"'):
        start(config(how, mode)).check_sum()


@pytest.mark.parametrize("mode", PRECISIONS)
@pytest.mark.parametrize("how", sorted(LOSSES.keys() - {*MEANS}))
def test_no_other_loss_is_taken_for_a_mean(how: str, mode: str) -> None:
    start(config(how, mode)).check_sum()


def test_of_single_samples_the_mean_is_the_sum_and_nothing_is_changed_by_looking() -> None:
    start(replace(config("mean over samples"), micro_batch_size=1)).check_sum()
    trainer, other = start(config("sum")), start(config("sum"))
    before = torch.get_rng_state()
    trainer.check_sum()
    assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(dict(trainer.model.state_dict()), dict(other.model.state_dict()))
    assert all(module.training for module in trainer.model.modules())


class Augmented(Arrays):
    """Which draws from torch's generator, and needs a seed, as a recipe's own training data may."""

    uses_global_generator = True

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        assert all(isinstance(sample.seed, int) for sample in samples)
        torch.rand(3)
        return super().batch(samples)


@pytest.mark.parametrize("how", ["sum", "mean over samples"])
def test_training_data_that_are_augmented_at_random_are_looked_at_too(how: str) -> None:
    trainer = start(config(how))
    trainer.datasets = replace(trainer.datasets, train=Augmented(**trainer.datasets.train.tensors))
    before = torch.get_rng_state()
    with pytest.raises(UserError) if how in MEANS else nullcontext():
        trainer.check_sum()
    assert torch.equal(torch.get_rng_state(), before)


def test_cudnn_measures_kernels_again_where_the_look_at_some_samples_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = start(config("sum"))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(trainer.datasets.train, "batch", Mock(side_effect=UserError("the data is gone")))
    with pytest.raises(UserError, match="gone"):
        trainer.check_sum()
    assert torch.backends.cudnn.benchmark


def test_a_cpu_without_memory_for_the_first_pass_is_no_mistake_of_the_loss() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            return model(batch[0]).square().mean()
        return torch.empty(2**60).mean()  # torch refuses it before the system is asked

    data = TensorDataset(torch.randn(8, 3))
    trainer = start(Config(Recipe.of(nn.Linear(3, 1), loss, data, data), NoData(), device="cpu", steps=1))
    with pytest.raises(Exception) as raised:
        trainer.check_first_pass()
    assert is_out_of_memory(raised.value)


SMALL = ("batch_size=4", "steps=2", "eval_samples=8")
TEXT = ("recipe.size=nano", "data=synthetic", "recipe.context=32")
OURS = {
    "gpt2": TEXT, "llama": TEXT, "bert": TEXT, "t5": TEXT, "bignet": ("recipe.layers=2", "recipe.width=8"),
    "resnet": ("recipe.arch=shufflenet_v2_x0_5", "augment=light", "augment.mixup=0.2"),
    "text_classifier": ("recipe.model_type=distilbert", "recipe.config.n_layers=1", "data=synthetic"),
}  # fmt: skip


@pytest.mark.parametrize("recipe", OURS)
def test_our_own_recipes_sum(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(f"recipe={recipe}", "precision=bf16", *OURS[recipe], *SMALL)
    monkeypatch.setattr(type(trainer.recipe), "known_sum", False)
    trainer.check_sum()


def test_a_subclass_of_our_recipes_with_a_loss_of_its_own_is_looked_at() -> None:
    class Named(BigNet):
        """The loss is that of BigNet."""

    class Own(BigNet):
        """The loss may be anything."""

        def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
            return super().loss(model, batch)

    assert (BigNet.known_sum, Named.known_sum, Own.known_sum) == (True, True, False)
