"""The space of a search as it is typed."""

from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from evidence.search.space import check_space, overrides_of, parse_space
from tests.helpers import compose
from trainer.errors import UserError

BIGNET = ["recipe=bignet", "recipe.width=8", "steps=2", "tracking=local"]


def test_a_space_is_read_from_the_command_line() -> None:
    line = [
        *(
            "recipe=gpt2",
            "space.optimizer.lr=log(1e-4,1e-2)",
            "space.batch_size=choice(16, 32)",
            "space.clip.max_norm=uniform(0.5,2)",
        ),
        *("space.recipe.layers=int(1,8)", "space.optimizer.betas=choice([0.9,0.95],[0.9,0.999])", "trials=3"),
    ]
    space, others = parse_space(line)
    assert others == ["recipe=gpt2", "trials=3"]
    assert space == {
        "optimizer.lr": FloatDistribution(1e-4, 1e-2, log=True),
        "batch_size": CategoricalDistribution(("16", "32")),
        "clip.max_norm": FloatDistribution(0.5, 2.0),
        "recipe.layers": IntDistribution(1, 8),
        "optimizer.betas": CategoricalDistribution(("[0.9,0.95]", "[0.9,0.999]")),
    }
    proposed = {"optimizer.lr": 0.000123456, "a": 3, "b": "[1,2]"}
    assert overrides_of(proposed) == ["optimizer.lr=0.0001235", "a=3", "b=[1,2]"]


def test_every_choice_and_both_ends_are_composed() -> None:
    space, others = parse_space([*BIGNET, "space.recipe.layers=int(1,3)", "space.precision=choice(bf16,fp32,fp33)"])
    with pytest.raises(UserError, match=r"precision=fp33 is not a choice"):
        check_space(space, others)
    del space["precision"]
    assert check_space(space, others).recipe == compose(*BIGNET, "recipe.layers=1").recipe
