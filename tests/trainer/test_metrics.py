from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch.nn import functional as F
from torchmetrics.classification import MulticlassRecall

from tests.helpers import CPU, NoData, SmallConvNet, copied, fit, same_bits
from tests.parallel.test_metrics import Scored, trainer_of
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.metrics import Metrics
from trainer.parallel.world import World
from trainer.parallel.wrap import Parallel
from trainer.recipe import LossOutput
from trainer.trainer import Trainer


def test_a_recipe_without_predictions_has_none() -> None:
    trainer = Trainer.from_config(Config(SmallConvNet(), NoData(), metrics=["ece"]), CPU)
    with pytest.raises(UserError, match=r"so it has only loss; leave it out$"):
        trainer.metric_names()


def test_torchmetrics_says_which_value_is_the_best() -> None:
    found = Metrics(Scored(), None, ["ece"], torch.device("cpu"))
    falling, rising = ("ece", "loss"), ("rouge_rouge1_recall", "accuracy", "several_four", "extremes_raw")
    assert [name for name in falling + rising if found.lower_is_better(f"valid/{name}")] == [*falling]


def test_what_the_first_samples_have_in_common_joins_no_metrics() -> None:
    found = Metrics(Scored(), None, None, torch.device("cpu"))
    shares = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04], [0.3, 0.5, 0.1, 0.06, 0.04]])
    found.names_in(LossOutput(torch.tensor(1.0), {}, shares, torch.tensor([0, 1])))
    found.update(LossOutput(torch.tensor(1.0), {}, shares, torch.tensor([1, 0])))
    values = found.values(World())
    assert (values["several_one"], values["several_four"]) == (0, 1)


def test_a_value_for_each_class_is_refused() -> None:
    class Own(SmallConvNet):
        def metrics(self, datasets: Any) -> dict[str, Any]:
            return {"recall": MulticlassRecall(5, average=None)}

    found = Metrics(Own(), None, None, torch.device("cpu"))
    with pytest.raises(UserError, match=r"recall.*ClasswiseWrapper"):
        found.names_in(LossOutput(torch.tensor(1.0), {}, torch.rand(4, 5), torch.arange(4)))


def test_only_classes_that_occur_are_averaged() -> None:
    found = Metrics(SmallConvNet(), None, ["auroc", "average_precision"], torch.device("cpu"))
    shares, labels = torch.rand(9, 5).softmax(1).half(), torch.tensor([0, 1, 1, 3, 0, 3, 3, 1, 0])
    found.update(LossOutput(torch.tensor(1.0), {}, shares, labels))
    one_hot, of = F.one_hot(labels, 5)[:, [0, 1, 3]], shares[:, [0, 1, 3]]
    assert {shares.dtype for shares in found._metrics["auroc"].preds} == {torch.float32}  # 16 bits are widened
    expected = {"auroc": roc_auc_score(one_hot, of), "average_precision": average_precision_score(one_hot, of)}
    assert found.values(World()) == pytest.approx(expected)


def test_evaluation_changes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loss draws from the generator of training."""
    loss = Scored.loss
    monkeypatch.setattr(Scored, "loss", lambda *given: (torch.rand(3), loss(*given))[1])
    plain = trainer_of(5, Parallel())
    fit(plain)
    expected = copied(plain.state_dict())  # with the state of the generators, which are the process's
    evaluated = trainer_of(5, Parallel())
    evaluated.metric_names()
    fit(evaluated, 1)
    evaluated.evaluate()
    fit(evaluated)
    assert same_bits(evaluated.state_dict(), expected)
