from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.helpers import CONF, CPU, SHIPPED, compose
from trainer.config import registration as config
from trainer.config.registration import flatten
from trainer.config.source import real
from trainer.hardware import Hardware
from trainer.optim.update import ClipNorm
from trainer.precision.scaler import AutoScaler

H100 = Hardware(torch.device("cuda", 0), "H100", 2**36, 8, (9, 0))
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("experiment", [path.stem for path in SHIPPED if path.parent.name == "experiment"])
def test_every_experiment_becomes_a_config_and_can_be_overridden(experiment: str) -> None:
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    own_data = [f"data.path={CONF}"] if "data: text" in text or "data: imagefolder" in text else []
    composed = compose(f"experiment={experiment}", *own_data, "steps=3", "schedule.warmup_steps=auto", "seed=5")
    assert (composed.steps, composed.seed) == (3, 5)
    assert composed.resolve(H100).plan.steps == 3


def test_yaml_repeats_no_other_default_than_the_class() -> None:
    """A number that is in the YAML and in the class must not differ: the class's documentation would be wrong."""
    left = {
        group: [name for name in classes if (CONF / group / f"{name}.yaml").exists()]
        for group, classes in config.groups().items()
        if group not in ("data", "recipe", "optimizer", "precision")
    }
    differ, looked_at = [], 0
    while any(left.values()):  # composing takes long: one choice of every group at once
        chosen = {group: names.pop() for group, names in left.items() if names}
        own = [f"{group}={name}" for group, name in chosen.items()]
        typed = compose(*own, "precision=fp16", "scaler.force=true", "recipe=resnet")
        for group, name in chosen.items():
            part, cls = getattr(typed, group), config.groups()[group][name]
            assert type(part) is real(cls)
            looked_at += 1
            for entry in dataclasses.fields(cls):
                default = entry.default if entry.default is not dataclasses.MISSING else None
                if entry.name != "force" and getattr(part, entry.name) != default:
                    differ.append(f"{group}={name}: {entry.name}")
    assert differ == []
    assert looked_at > 20


def test_overrides_arrive_with_their_types() -> None:
    composed = compose(
        *("recipe=gpt2", "precision=bf16", "clip.max_norm=2", "steps=7"),
        *("optimizer.options.betas=[0.8,0.9]", "precision.fp32_modules=[lm_head]"),
    )
    assert composed.clip == ClipNorm(2.0)
    assert isinstance(composed.clip.max_norm, float)  # type: ignore[attr-defined]
    assert composed.steps == 7
    assert composed.optimizer.options["betas"] == [0.8, 0.9]
    assert composed.precision.fp32_modules == ["lm_head"]
    assert isinstance(composed.scaler, AutoScaler)


def test_resolving_changes_nothing_and_no_two_configs_share_state() -> None:
    one, other = compose("recipe=gpt2"), compose("recipe=gpt2")
    before = flatten(one)
    assert one.resolve(CPU).config.recipe.size == "mini"
    assert flatten(one) == flatten(other) == before
    one.optimizer.options["eps"] = 1.0
    assert "eps" not in other.optimizer.options


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hardware", [CPU, H100], ids=["cpu", "gpu"])
def test_auto_becomes_numbers_that_fit_together(recipe: str, hardware: Hardware) -> None:
    composed, plan, chosen, _ = compose(f"recipe={recipe}").resolve(hardware)
    for key in ("steps", "batch_size", "micro_batch_size", "eval_every", "eval_samples"):
        assert isinstance(getattr(composed, key), int)
        assert key in [choice.key for choice in chosen]
    assert plan.steps == composed.steps
    assert plan.batching.batch_size == plan.batching.accumulation * plan.batching.micro_batch_size
    assert composed.run_name == f"{recipe}-fp32-s0"
    assert "auto" not in [value for key, value in flatten(composed).items() if key.startswith("recipe.size")]


def test_what_the_user_set_is_kept() -> None:
    composed = compose("recipe=gpt2", "steps=40", "batch_size=6", "eval_every=7", "run_name=mine", "seed=3")
    composed, plan, chosen, _ = composed.resolve(CPU)
    assert (plan.steps, plan.batching.batch_size, plan.eval_every) == (40, 6, 7)
    assert plan.batching.micro_batch_size == 6
    assert {choice.key for choice in chosen} >= {"micro_batch_size", "eval_samples"}
    assert not {choice.key for choice in chosen} & {"steps", "batch_size", "eval_every"}
    assert composed.run_name == "mine"


@pytest.mark.parametrize("batch_size", [1, 17, 100])
def test_an_auto_microbatch_divides_any_batch(batch_size: int) -> None:
    for hardware in (CPU, H100):
        plan = compose("recipe=gpt2", f"batch_size={batch_size}").resolve(hardware).plan
        assert batch_size % plan.batching.micro_batch_size == 0


@pytest.mark.parametrize(("steps", "eval_every"), [(1, 1), (25, 25), (300, 30), (2000, 200)])
def test_auto_evaluation_comes_ten_times_a_run_or_less_often(steps: int, eval_every: int) -> None:
    assert compose("recipe=bignet", f"steps={steps}").resolve(CPU).plan.eval_every == eval_every


def test_flatten_names_the_choice_that_was_made() -> None:
    flat = flatten(compose("recipe=gpt2", "optimizer=sgd", "clip=value", "scaler=auto", "data=synthetic"))
    expected = {"recipe": "gpt2", "data": "synthetic", "clip": "value", "optimizer": "SGD", "optimizer.name": "SGD"}
    expected |= {"optimizer.options": {"momentum": 0.9, "nesterov": True}, "precision.mode": "fp32", "seed": 0}
    assert expected.items() <= flat.items()
    assert json.loads(json.dumps(flat)) == flat
