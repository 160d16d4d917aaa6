from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from recipes.data.images.arrays import Digits
from tests.helpers import CONF, CPU, GPU, SHIPPED, NoData, SmallConvNet, compose
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.recipe import Recipe

RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("experiment", [path.stem for path in SHIPPED if path.parent.name == "experiment"])
def test_every_experiment_becomes_a_config_and_can_be_overridden(experiment: str) -> None:
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    if experiment == "shakespeare_fast":
        text += (CONF / "experiment" / "shakespeare_cpu.yaml").read_text()  # which it changes
    own_data = [f"data.path={CONF}"] if "data: text" in text or "data: imagefolder" in text else []
    composed = compose(f"experiment={experiment}", *own_data, "steps=3", "schedule.warmup_steps=auto", "seed=5")
    assert (composed.steps, composed.seed) == (3, 5)
    assert plan_of(composed, GPU).steps == 3


def test_a_recipe_that_lacks_a_method_is_told_which() -> None:
    class Half(SmallConvNet):
        count_targets = Recipe.count_targets

    with pytest.raises(UserError, match=r"Half .* has no count_targets; write it, as recipes/bignet.py does"):
        Config(Half(), NoData())


def test_data_is_refused_by_a_recipe_that_has_no_use_for_it() -> None:
    class Reads(SmallConvNet):
        reads_data = True

    Reads().check_reads(Digits(), ["data=digits"])
    with pytest.raises(UserError, match=r"cannot read data=digits .*; leave data=digits data.labels=3 out"):
        SmallConvNet().check_reads(Digits(), ["data=digits", "data.labels=3"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_auto_becomes_numbers_that_fit_together(recipe: str, hardware: Hardware) -> None:
    named = {"causal_lm": ["recipe.model_type=qwen3"], "text_classifier": ["recipe.model_type=bert", "data=synthetic"]}
    plan = plan_of(compose(f"recipe={recipe}", *named.get(recipe, [])), hardware)
    composed = plan.config
    for key in ("steps", "batch_size", "micro_batch_size", "eval_every", "eval_samples"):
        assert isinstance(getattr(composed, key), int)
        assert key in [choice.key for choice in plan.decisions]
    assert plan.batching.batch_size == plan.batching.accumulation * plan.batching.micro_batch_size
    assert composed.name == f"{recipe}-fp32-s0"
    assert "auto" not in [value for key, value in flatten(composed).items() if key.startswith("recipe.size")]


@pytest.mark.parametrize("off", ["eval_every=0", "eval_every=off", "eval_every=never", "eval_samples=0"])
def test_who_wants_no_evaluation_is_told_how_to_have_one_alone(off: str) -> None:
    with pytest.raises(UserError, match="for no other, of one sample; set ") as caught:
        compose("recipe=gpt2", "steps=5000", off)
    plan = plan_of(compose("recipe=gpt2", "steps=5000", *str(caught.value).partition(" set ")[2].split()), CPU)
    assert (plan.evaluations, plan.eval_samples, plan.evaluates(5000)) == (1, 1, True)


def test_flatten_names_the_choice_that_was_made() -> None:
    flat = flatten(compose("recipe=gpt2", "optimizer=sgd", "clip=value", "scaler=auto", "data=synthetic"))
    expected = {"recipe": "gpt2", "data": "synthetic", "clip": "value", "optimizer": "SGD", "optimizer.name": "SGD"}
    expected |= {"optimizer.options": {"momentum": 0.9, "nesterov": True}, "precision.mode": "fp32", "seed": 0}
    assert expected.items() <= flat.items()
    assert json.loads(json.dumps(flat)) == flat


@dataclass
class Sorted(Recipe):
    name: ClassVar[str] = "sorted"
    kind: str = "plain"


@dataclass
class OfSorted:
    recipe: Sorted = field(default_factory=Sorted)


def test_an_option_called_kind_does_not_hide_the_name_of_its_recipe() -> None:
    assert flatten(OfSorted()) == {"recipe": "sorted", "recipe.kind": "plain"}
