"""Metrics of torchmetrics over uneven microbatches and ranks are those of all samples at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import NoData, SmallConvNet
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.hardware import detect
from trainer.metrics import NAMED
from trainer.parallel.wrap import Parallel
from trainer.recipe import LossOutput
from trainer.trainer import Trainer

SIZES = (64, 3, 5)
"""Samples of a microbatch: of two ranks one has all 64 and the other none; 33 and 31 (its last is one); 34 and 30."""


class Scored(SmallConvNet):
    """With metrics whose states are sums, moments, and lists of any length."""

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        logits, label = model(batch["image"]).float(), batch["label"]
        return LossOutput(F.cross_entropy(logits, label, reduction="sum"), {}, logits.detach().softmax(1), label)

    def metrics(self, datasets: Datasets) -> dict[str, Any]:
        from torchmetrics import MetricCollection, PearsonCorrCoef
        from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
        from torchmetrics.text import BLEUScore, ROUGEScore
        from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

        class Moments(PearsonCorrCoef):
            def update(self, shares: Tensor, labels: Tensor) -> None:
                super().update(shares[:, 0], labels.to(shares))

        class Bleu(BLEUScore):
            def update(self, shares: Tensor, labels: Tensor) -> None:
                super().update(words(shares.argmax(1)), [[word] for word in words(labels)])

        class Rouge(ROUGEScore):
            def update(self, shares: Tensor, labels: Tensor) -> None:
                super().update(words(shares.argmax(1)), words(labels))

        recall = ClasswiseWrapper(MulticlassRecall(5, average=None))
        several = MetricCollection({"one": MulticlassAccuracy(5), "four": MulticlassAccuracy(5, top_k=4)})
        containers = {"recall": recall, "several": several, "extremes": MinMaxMetric(MulticlassAccuracy(5))}
        return {"pearson": Moments(), "bleu": Bleu(1), "rouge": Rouge(rouge_keys="rouge1"), **containers}


def words(numbers: Tensor) -> list[str]:
    return [f"word{number}" for number in numbers.tolist()]


def trainer_of(size: int, parallel: Parallel, device: str = "cpu") -> Trainer:
    numbers: Any = {"steps": 2, "batch_size": 2 * size, "micro_batch_size": size, "eval_samples": 64}
    config = Config(Scored(), NoData(), metrics=[*NAMED], parallel=parallel, device=device, **numbers)
    return Trainer.from_config(config, detect(device), parallel.world(device))


def metrics(parallel: Parallel, device: str) -> list[dict[str, float]]:
    """An evaluation of every size; the two samples of the check before it are forgotten."""
    trainers = [trainer_of(size, parallel, device) for size in SIZES]
    return [trainer.evaluate() for trainer in trainers if trainer.metric_names()]


@pytest.mark.parametrize(("mode", "processes"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_uneven_microbatches_and_ranks_change_no_metric(
    mode: str, processes: int, ranks: Callable[[str, int], list[dict[str, Any]]]
) -> None:
    (alone,) = ranks("all", 1)
    at_once = alone["metrics"]["single"][0]
    trainer = trainer_of(64, Parallel())
    with torch.no_grad():
        batch = trainer.datasets.valid.batch([SampleId(index, None) for index in range(64)])
        shares, labels = trainer.recipe.loss(trainer.model.eval(), batch)[2:]
    given = shares.argmax(1)
    assert at_once["auroc"] == pytest.approx(roc_auc_score(labels, shares, multi_class="ovr"))
    assert at_once["f1_macro"] == pytest.approx(f1_score(labels, given, average="macro"))
    assert at_once["mcc"] == pytest.approx(matthews_corrcoef(labels, given))
    assert len(at_once) == 1 + len(NAMED) + 2 + 3 + 5 + 2 + 3  # ROUGE has three values, recall one for each class
    assert at_once["several_one"] == at_once["extremes_raw"] < at_once["several_four"]
    for rank in ranks("all", processes):
        for found in rank["metrics"][mode]:
            assert found == pytest.approx(at_once, rel=1e-5)
