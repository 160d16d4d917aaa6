from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import BIGNET, GPT2, fit, trainer_of
from trainer.errors import UserError
from trainer.optim.groups import LR_FACTOR
from trainer.optim.optimizer import Optimizer
from trainer.trainer import Trainer

EIGHT_LAYERS = (*BIGNET, "recipe.layers=8")


def of_parameters(trainer: Trainer, key: str) -> dict[str, Any]:
    """A group's value by the names of its parameters."""
    names = {id(parameter): name for name, parameter in (trainer.masters or trainer.model).named_parameters()}
    groups = trainer.optimizer.param_groups
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("mode", ["fp32", "bf16_master"])
def test_of_several_patterns_the_last_one_decides(mode: str) -> None:
    groups = "{h.0: {lr: 0.1, weight_decay: 0.5}, attn: {lr: 2}, h.0.mlp: {weight_decay: 0}}"
    trainer = trainer_of(*GPT2, f"precision={mode}", f"optimizer.groups={groups}")
    factors, decays = of_parameters(trainer, LR_FACTOR), of_parameters(trainer, "weight_decay")
    expected = {
        "wte.weight": (1.0, 0.1),
        "h.0.ln_1.weight": (0.1, 0.0),  # a norm is not decayed
        "h.0.attn.c_attn.weight": (2, 0.5),
        "h.0.attn.c_attn.bias": (2, 0.0),
        "h.0.mlp.c_fc.weight": (0.1, 0),
        "h.1.attn.c_attn.weight": (2, 0.1),
        "h.1.mlp.c_fc.weight": (1.0, 0.1),
    }
    names = {name: f"gpt2.transformer.{name}" for name in expected}
    assert {name: (factors[full], decays[full]) for name, full in names.items()} == expected


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (GPT2, {"wte.weight": 5, "wpe.weight": 5, "h.0.ln_1.bias": 4, "h.3.mlp.c_fc.weight": 1, "ln_f.weight": 0}),
        (
            ("recipe=t5", "recipe.size=nano", "data=synthetic", "data.vocab_size=90"),
            {
                "shared.weight": 5,
                "encoder.block.0.layer.0.SelfAttention.q.weight": 4,
                "encoder.final_layer_norm.weight": 3,  # as the encoder's last block
                "decoder.block.1.layer.2.layer_norm.weight": 1,
                "decoder.final_layer_norm.weight": 0,
            },
        ),
        (
            ("recipe=resnet", "recipe.arch=resnet18"),
            {"conv1.weight": 9, "bn1.bias": 9, "layer1.0.conv1.weight": 8, "layer4.1.bn2.bias": 1, "fc.weight": 0},
        ),
    ],
    ids=["gpt2", "t5", "resnet18"],
)
def test_layer_decay_counts_blocks_from_the_head_down(recipe: tuple[str, ...], expected: dict[str, int]) -> None:
    trainer = trainer_of(*recipe, "optimizer.layer_decay=0.5")
    found = of_parameters(trainer, LR_FACTOR)
    for end, depth in expected.items():
        name = end if end in found else next(name for name in found if name.endswith(f".{end}"))
        assert found[name] == 0.5**depth, name


def test_the_schedule_multiplies_every_groups_rate_and_the_highest_is_logged() -> None:
    line = (*EIGHT_LAYERS, "optimizer.groups={0.?: {lr: 0.25}, bias: {lr: 2}}", "optimizer.lr=0.5", "steps=4")
    trainer = trainer_of(*line, "schedule=linear", "schedule.warmup_steps=2", "optimizer=sgd")
    assert [record.lr for record in fit(trainer)] == [0.5, 1.0, 1.0, 0.5]  # twice optimizer.lr times the factor
    rates = of_parameters(trainer, "lr")
    assert (rates["0.0.weight"], rates["0.0.bias"], rates["1.0.weight"]) == (0.0625, 0.5, 0.25)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Optimizer(groups={"0.wieght": {"lr": 2.0}}), r"'0.wieght' matches no module, and no parameter; similar: 0.w"),
        (Optimizer(groups={"1": {"weight_decay": 0.1}}), r"'1' sets the weight decay of parameters that have none"),
        (Optimizer("Rprop", groups={"0": {"weight_decay": 0.1}}), r"torch.optim.Rprop has no weight decay"),
        (Optimizer(layer_decay=0.5), r"optimizer.layer_decay: this recipe's model has no repeated blocks"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(optimizer: Optimizer, message: str) -> None:
    with pytest.raises(UserError, match=message):
        optimizer.build(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), torch.device("cpu"))


def test_a_pattern_of_what_is_frozen_is_refused_and_a_part_of_it_is_not() -> None:
    with pytest.raises(UserError, match=r"all that '0.\?' matches is frozen"):
        trainer_of(*EIGHT_LAYERS, "freeze=['0.?']", "optimizer.groups={0.?: {lr: 2}}")
    trainer = trainer_of(*EIGHT_LAYERS, "freeze=['0.?']", "optimizer.groups={bias: {lr: 2}}")
    assert len([factor for factor in of_parameters(trainer, LR_FACTOR).values() if factor == 2]) == 4
