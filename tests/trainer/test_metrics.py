from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import CPU, NoData, SmallConvNet, compose, fit, same_bits
from tests.parallel.test_metrics import Scored, trainer_of
from trainer.config.schema import Config
from trainer.data.contract import Batch
from trainer.errors import UserError
from trainer.metrics import NAMED, Metrics, averages, reported
from trainer.parallel.single import Parallel
from trainer.recipe import LossOutput
from trainer.run.report import warnings
from trainer.trainer import Trainer

LABELS = torch.tensor([0, 1])
SHARES = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]])


def metrics(recipe: Any, *names: str) -> Metrics:
    return Metrics(recipe, None, list(names), torch.device("cpu"))


def output(predictions: Any, **sums: Tensor) -> LossOutput:
    return LossOutput(torch.tensor(1.0), sums, predictions, LABELS)


class Vector(Scored):
    def metrics(self, datasets: Any) -> dict[str, Any]:
        from torchmetrics.classification import MulticlassRecall

        return {"recall": MulticlassRecall(3, average=None)}


@pytest.mark.parametrize(
    ("recipe", "names", "predictions", "message"),
    [
        (SmallConvNet(), ["ece"], None, r"metrics=\[ece\] needs the probabilities .* reports loss, accuracy$"),
        (SmallConvNet(), ["ece"], 3 * SHARES, r"metrics=\[ece\] needs the probabilities"),
        (SmallConvNet(), ["accuracy"], SHARES, r"\[accuracy\] has no effect: .* reports loss, accuracy already"),
        (Scored(), [], None, r"recipe=scored has metrics, but its loss returns no predictions"),
        (Vector(), [], SHARES, r"recall has 3 values; .* wrap it in torchmetrics' ClasswiseWrapper"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    recipe: Any, names: list[str], predictions: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        metrics(recipe, *names).names_in(output(predictions, accuracy=torch.tensor(1)))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"metrics=\[f1_mean\] is not one of accuracy, .*, ece; did you mean 'f1_macro'"
    ):
        compose("recipe=resnet", "metrics=[f1_mean]")


def test_torchmetrics_says_which_value_is_the_best() -> None:
    from torchmetrics import classification

    for name, choice in NAMED.items():
        assert getattr(classification, f"Multiclass{choice.kind}").higher_is_better is choice.rises, name
    found = metrics(Scored())
    names = ("valid/ece", "valid/f1_macro", "valid/bleu", "valid/rouge_rouge1_recall", "valid/loss", "valid/accuracy")
    assert [found.falls(name) for name in names] == [True, False, False, False, True, False]


def test_16_bit_predictions_are_widened() -> None:
    found = metrics(SmallConvNet(), "ece")
    found.update(output(SHARES.half()))
    assert {each.dtype for each in found._metrics["ece"].confidences} == {torch.float32}  # type: ignore[union-attr]


def test_evaluation_changes_no_step() -> None:
    plain, evaluated = (trainer_of(5, Parallel(), "cpu") for _ in range(2))
    fit(plain)
    generator = torch.get_rng_state()
    evaluated.metric_names()
    fit(evaluated)
    evaluated.evaluate()
    assert torch.equal(torch.get_rng_state(), generator)
    assert same_bits(plain.state_dict(), evaluated.state_dict())


def test_more_right_answers_than_targets_are_a_wrong_count() -> None:
    assert reported(SmallConvNet(), {"loss": 9.0, "top1": 3.0}, 3) == {"loss": 3.0, "top1": 1.0}
    with pytest.raises(UserError, match=r"top1 is 1.33, and cannot be above 1: count_targets .* counts 3 targets"):
        reported(SmallConvNet(), {"loss": 9.0, "top1": 4.0}, 3)


LOGITS = torch.randn(2, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (lambda: F.cross_entropy(LOGITS, LABELS), True),
        (lambda: F.mse_loss(LOGITS, SHARES).double(), True),
        (lambda: LOGITS.square().mean(), True),
        (lambda: F.cross_entropy(LOGITS, LABELS, reduction="sum"), False),
        (lambda: F.cross_entropy(LOGITS, LABELS) * 2, False),
        (lambda: LOGITS.square().mean(1).sum(), False),
        (lambda: torch.tensor(1.0), False),
    ],
)
def test_a_mean_is_told_from_a_sum(loss: Callable[[], Tensor], is_mean: bool) -> None:
    assert averages(loss()) is is_mean


@dataclass
class Mean(SmallConvNet):
    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        return LossOutput(F.cross_entropy(model(batch["image"]).float(), batch["label"]), {})


@pytest.mark.parametrize(("recipe", "said"), [(SmallConvNet(), 0), (Mean(), 1)])
def test_a_loss_that_is_a_mean_is_reported_at_the_start(recipe: SmallConvNet, said: int, tmp_path: Path) -> None:
    trainer = Trainer.from_config(Config(recipe, NoData()), CPU)
    trainer.observe()
    found = warnings(trainer, tmp_path)
    assert [sentence.endswith('return a sum, as with reduction="sum"') for sentence in found] == said * [True]
