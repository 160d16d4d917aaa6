"""The space of a search as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from evidence.search.search import main as search
from evidence.search.space import check_space, overrides_of, parse_space
from tests.helpers import compose
from trainer.errors import UserError

BIGNET = ["recipe=bignet", "recipe.width=8", "steps=2", "tracking=local"]
LR = "space.optimizer.lr=log(1e-4,1e-2)"


def test_a_space_is_read_from_the_command_line() -> None:
    line = [
        *("recipe=gpt2", LR, "space.batch_size=choice(16, 32)", "space.clip.max_norm=uniform(0.5,2)"),
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


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], r"there is nothing to search; give a space, such as"),
        (["space.optimizer.lr=logg(1,2)"], r"is no space; write space.optimizer.lr=log\(1e-4,1e-2\)"),
        (["space.optimizer.lr=log(low,1)"], r"could not convert string to float: 'low'"),
        (["space.optimizer.lr=log(1)"], r"must have two numbers"),
        (["space.output_dir=choice(a,b)"], r"output_dir is not an option of the training"),
        ([LR, "optimizer.lr=1"], r"optimizer.lr is searched and set \(optimizer.lr=1\); remove one of them"),
        ([LR, "resume=auto"], r"resume=auto has no effect: the search sets it"),
        ([LR, "precision=fp32,bf16"], r"search them with space.precision=choice\(fp32,bf16\)"),
        ([LR, "study=a/b"], r"study=a/b must be the name of a folder"),
        (["space.optimizer.lr=uniform(-1,1)"], r"optimizer.lr=-1.0 must be a number above 0"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(typed: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        search([*BIGNET, *typed, f"output_dir={tmp_path}/runs"])
    assert not list(tmp_path.iterdir())


def test_every_choice_and_both_ends_are_composed() -> None:
    space, others = parse_space([*BIGNET, "space.recipe.layers=int(1,3)", "space.precision=choice(bf16,fp32,fp33)"])
    with pytest.raises(UserError, match=r"precision=fp33 is not a choice"):
        check_space(space, others)
    del space["precision"]
    assert check_space(space, others).recipe == compose(*BIGNET, "recipe.layers=1").recipe
