"""The space of a search as it is typed."""

from __future__ import annotations

import shlex

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from evidence.search.space import check_space, overrides_of, parse_space
from evidence.search.study import suggest
from tests.helpers import compose
from trainer.errors import UserError

BIGNET = ["recipe=bignet", "recipe.width=8", "steps=2", "tracking=local"]


def test_a_space_is_read_in_hydras_grammar() -> None:
    typed = {
        "optimizer.lr": "tag(log,interval(1e-4,1e-2))",
        "clip.max_norm": "interval(1,2)",
        "recipe.layers": "int(interval(1,8))",
        "steps": "tag(log, int(interval(10, 100)))",
        "recipe.width": "range(8,32,8)",
        "recipe.dropout": "range(0,0.5,0.25)",
        "recipe.heads": "range(1,8,3)",
        "batch_size": "choice(16, 32)",
        "optimizer.betas": "choice([0.9,0.95],[0.9,0.999])",
    }
    space, others = parse_space(["recipe=gpt2", *(f"space.{key}={text}" for key, text in typed.items()), "trials=3"])
    assert others == ["recipe=gpt2", "trials=3"]
    assert space == {
        "optimizer.lr": FloatDistribution(1e-4, 1e-2, log=True),
        "clip.max_norm": FloatDistribution(1, 2),
        "recipe.layers": IntDistribution(1, 8),
        "steps": IntDistribution(10, 100, log=True),
        "recipe.width": IntDistribution(8, 32, step=8),
        "recipe.dropout": FloatDistribution(0, 0.5, step=0.25),
        "recipe.heads": IntDistribution(1, 7, step=3),
        "batch_size": CategoricalDistribution(("16", "32")),
        "optimizer.betas": CategoricalDistribution(("[0.9,0.95]", "[0.9,0.999]")),
    }
    study = optuna.create_study()
    study.optimize(lambda trial: [suggest(trial, *dimension) for dimension in space.items()] and 0.0, n_trials=1)
    assert study.trials[0].distributions == space
    proposed = {"optimizer.lr": 0.000123456, "a": 3, "b": "[1,2]"}
    assert overrides_of(proposed) == ["optimizer.lr=0.0001235", "a=3", "b=[1,2]"]


@pytest.mark.parametrize(
    "text",
    [
        *("1e-4", "16,32", "int(1,8)", "log(1e-4,1e-2)", "interval(2,1)", "tag(log,interval(0,1))", "choice(16"),
        *("shuffle(range(1,4))", "shuffle(choice(1,2))", "range(0.1,1.0)"),
    ],
)
def test_what_is_no_space_is_answered_with_one_that_is(text: str) -> None:
    with pytest.raises(UserError, match="is not a search space") as refused:
        parse_space([f"space.batch_size={text}"])
    example = str(refused.value).split('"')[1]
    assert parse_space([example])[0] == {"optimizer.lr": FloatDistribution(1e-4, 1e-2, log=True)}


def test_a_whole_number_is_searched_among_whole_numbers() -> None:
    with pytest.raises(UserError) as refused:
        parse_space(["space.batch_size=tag(log,interval(4,16))"])
    space, _ = parse_space(shlex.split(refused.value.remedies[0]))
    assert space == {"batch_size": IntDistribution(4, 16, log=True)}


def test_every_choice_and_both_ends_are_composed() -> None:
    space, others = parse_space([*BIGNET, "space.recipe.layers=range(1,3)", "space.precision=choice(bf16,fp32,pf32)"])
    with pytest.raises(UserError, match=r"precision=pf32 is not a choice") as refused:
        check_space(space, others)
    assert not refused.value.remedies  # precision=fp32 would set what is searched
    del space["precision"]
    assert check_space(space, others).recipe == compose(*BIGNET, "recipe.layers=1").recipe
