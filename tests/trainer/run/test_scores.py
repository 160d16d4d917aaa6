from __future__ import annotations

import math

import pytest

from tests.helpers import compose
from trainer.errors import UserError
from trainer.run.scores import Scores


def scores(*overrides: str) -> Scores:
    return Scores(compose("recipe=resnet", *overrides))


def test_the_lowest_loss_or_the_highest_accuracy_is_the_best() -> None:
    by_loss, by_top1 = scores(), scores("checkpoint.best=valid/top1")
    for step, loss, top1 in ((1, 2.0, 0.3), (2, 1.0, 0.6), (3, 1.5, 0.7), (4, math.nan, math.nan)):
        for each in (by_loss, by_top1):
            score = each.add(step, {"loss": loss, "top1": top1})
    assert (score.value, score.improved) == (None, False)
    assert by_loss.best == {"step": 2, "value": 1.0}
    assert by_top1.best == {"step": 3, "value": 0.7}
    assert by_top1.rank(score._replace(value=0.7)) == -0.7  # a manifest's best score is the lowest
    assert by_loss.rank(score._replace(value=0.7)) == 0.7


@pytest.mark.parametrize(
    ("metric", "values", "stops_at"),
    [
        ("valid/loss", [1.0, 0.8, 0.79, 0.75, 0.76, 0.77], 6),  # 0.79 does not improve by 0.02; 0.75 does
        ("valid/top1", [0.1, 0.2, 0.21, 0.21, 0.5, 0.5], 4),
        ("valid/loss", [math.nan, math.nan], 2),
        ("valid/loss", [1.0, 0.9, 0.8, 0.7], None),
    ],
)
def test_early_stopping_waits_for_an_improvement_by_more_than_min_delta(
    metric: str, values: list[float], stops_at: int | None
) -> None:
    watching = scores("early_stopping.patience=2", "early_stopping.min_delta=0.02", f"early_stopping.metric={metric}")
    stopped = None
    for step, value in enumerate(values, 1):
        metrics = {"loss": 1.0, "top1": 0.1} | {metric.removeprefix("valid/"): value}
        copy = scores("early_stopping.patience=2", "early_stopping.min_delta=0.02", f"early_stopping.metric={metric}")
        copy.load_state_dict(watching.state_dict())  # as a resumed run does
        watching = copy
        watching.add(step, metrics)
        if watching.exhausted and stopped is None:
            stopped = step
    assert stopped == stops_at


def test_a_metric_that_does_not_exist_is_refused() -> None:
    known = ["loss", "top1"]
    with pytest.raises(UserError, match=r" \(valid/loss, valid/top1\); set checkpoint.best=valid/loss$"):
        scores("checkpoint.best=valid/acc").check_known(lambda: known)
    with pytest.raises(UserError, match=r"early_stopping.metric=loss is not .* \(valid/loss, valid/top1\)"):
        scores("early_stopping.patience=2", "early_stopping.metric=loss").check_known(lambda: known)
    scores("checkpoint.best=valid/top1").check_known(lambda: known)


@pytest.mark.parametrize(
    ("metric", "before", "after", "worse"),
    [
        ("valid/loss", 0.1, 0.3, "worse than before training (loss 0.1000 at step 0)"),
        ("valid/top1", 0.3, 0.2, "worse than before training (top1 0.3000 at step 0)"),
        ("valid/loss", 0.1, math.nan, "worse than before training (loss 0.1000 at step 0)"),
        ("valid/loss", 0.3, 0.1, ""),
        ("valid/loss", math.nan, 0.1, ""),
        ("valid/loss", 0.1, None, ""),
    ],
)
def test_training_counts_from_where_it_began(metric: str, before: float, after: float | None, worse: str) -> None:
    first, copy = scores(f"checkpoint.best={metric}"), scores(f"checkpoint.best={metric}")
    first.add_first({"loss": before, "top1": before})
    if after is not None:
        first.add(1, {"loss": after, "top1": after})
    copy.load_state_dict(first.state_dict())  # as a resumed run does
    assert copy.worse_than_before == worse


@pytest.mark.parametrize("before", [(), ("early_stopping.patience=1",)], ids=["none", "of another metric"])
def test_early_stopping_that_is_new_begins_to_wait(before: tuple[str, ...]) -> None:
    first, second = scores(*before), scores("early_stopping.patience=1", "early_stopping.metric=valid/top1")
    for step in (1, 2):
        first.add(step, {"loss": 1.0, "top1": 0.5})
    assert first.exhausted == bool(before)
    second.load_state_dict(first.state_dict())
    assert not second.exhausted
    second.add(3, {"loss": 1.0, "top1": 0.6})
    assert not second.exhausted
