"""Metrics of torchmetrics over uneven microbatches and ranks are those of all samples at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Arrays, NoData
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.hardware import Hardware, detect
from trainer.metrics import NAMED
from trainer.parallel.single import Parallel
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes
from trainer.trainer import Trainer

Ranks = Callable[[str, int], list[dict[str, Any]]]
SAMPLES, CLASSES = 23, 4
SIZES = (1, 5, 32)
"""Samples of a microbatch: two ranks have 12 and 11 of them, or 3 (the last of 3 samples) and 2, or 1 and none."""


@dataclass
class Scored(Recipe):
    """A linear classifier of noise, with metrics whose states are sums, lists of any length and moments."""

    name = "scored"

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(1, 64, 32)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, 6, generator=generator)
        arrays = Arrays(x=x, y=torch.randint(CLASSES, (SAMPLES,), generator=generator))
        return Datasets(arrays, arrays, "noise")

    def build_model(self, datasets: Datasets) -> nn.Module:
        return nn.Linear(6, CLASSES)

    def count_targets(self, batch: Batch) -> int:
        return len(batch["y"])

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        logits, y = model(batch["x"]).float(), batch["y"]
        right = (logits.argmax(1) == y).sum()
        return LossOutput(F.cross_entropy(logits, y, reduction="sum"), {"share": right}, logits.detach().softmax(1), y)

    def metrics(self, datasets: Datasets) -> dict[str, Any]:
        from torchmetrics import PearsonCorrCoef
        from torchmetrics.classification import MulticlassRecall
        from torchmetrics.text import BLEUScore, ROUGEScore
        from torchmetrics.wrappers import ClasswiseWrapper

        class Moments(PearsonCorrCoef):
            def update(self, shares: Tensor, labels: Tensor) -> None:
                super().update(shares[:, 0], labels.to(shares))

        class Bleu(BLEUScore):
            def update(self, shares: Tensor, labels: Tensor) -> None:
                super().update(words(shares.argmax(1)), [[word] for word in words(labels)])

        class Rouge(ROUGEScore):
            def update(self, shares: Tensor, labels: Tensor) -> None:
                super().update(words(shares.argmax(1)), words(labels))

        return {
            "pearson": Moments(),
            "bleu": Bleu(n_gram=1),
            "rouge": Rouge(rouge_keys="rouge1"),
            "recall": ClasswiseWrapper(MulticlassRecall(CLASSES, average=None)),
        }


def words(numbers: Tensor) -> list[str]:
    return [f"word{number}" for number in numbers.tolist()]


def trainer_of(size: int, parallel: Parallel, device: str) -> Trainer:
    numbers: Any = {"batch_size": 2 * size, "micro_batch_size": size, "eval_samples": SAMPLES}
    config = Config(Scored(), NoData(), metrics=[*NAMED], parallel=parallel, device=device, **numbers)
    return Trainer.from_config(config, detect(device), parallel.world(device))


def metrics(parallel: Parallel, device: str) -> list[dict[str, float]]:
    """Of every size, the second of two evaluations: the first is forgotten."""
    trainers = [trainer_of(size, parallel, device) for size in SIZES]
    return [[trainer.evaluate() for _ in range(2)][1] for trainer in trainers]


@pytest.fixture(scope="module")
def at_once() -> dict[str, float]:
    """By scikit-learn, and where it has none by torchmetrics, of all samples in one microbatch."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    trainer = trainer_of(32, Parallel(), "cpu")
    with torch.no_grad():
        batch = trainer.datasets.valid.batch([SampleId(index, None) for index in range(SAMPLES)])
        output = trainer.recipe.loss(trainer.model, batch)
    shares, y = output.predictions, batch["y"]
    given, one_hot = shares.argmax(1), F.one_hot(y, CLASSES)
    found = {
        "loss": output.loss_sum.item() / SAMPLES,
        "share": sk.accuracy_score(y, given),
        "accuracy": sk.accuracy_score(y, given),
        "precision_macro": sk.precision_score(y, given, average="macro", zero_division=0),
        "recall_macro": sk.recall_score(y, given, average="macro"),
        "f1_macro": sk.f1_score(y, given, average="macro"),
        "f1_weighted": sk.f1_score(y, given, average="weighted"),
        "auroc": sk.roc_auc_score(one_hot, shares),
        "average_precision": sk.average_precision_score(one_hot, shares),
        "mcc": sk.matthews_corrcoef(y, given),
        "kappa": sk.cohen_kappa_score(y, given),
        "ece": multiclass_calibration_error(shares, y, CLASSES, n_bins=15).item(),
    }
    for name, metric in trainer.recipe.metrics(trainer.datasets).items():
        metric.update(shares, y)
        value = metric.compute()
        found |= {f"{name}_{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize(("mode", "processes"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_uneven_microbatches_and_ranks_change_no_metric(
    mode: str, processes: int, ranks: Ranks, at_once: dict[str, float]
) -> None:
    for rank in ranks("all", processes):
        for size, found in zip(SIZES, rank["metrics"][mode], strict=True):
            assert found == pytest.approx(at_once, rel=1e-5, abs=1e-6), size
