"""``recipe.arch=timm/…``, and exported classifiers that are opened again."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from recipes.data.images.arrays import Digits
from recipes.resnet import ResNet
from tests.helpers import context, fit, same_bits, trainer_of
from trainer.errors import UserError
from trainer.trainer import Trainer

TIMM = ("recipe=resnet", "recipe.arch=timm/test_resnet", "batch_size=4", "steps=2")


@pytest.fixture(scope="module")
def trained() -> Trainer:
    trainer = trainer_of(*TIMM)
    fit(trainer)
    return trainer


def test_a_model_of_timm_trains_with_the_classes_and_the_size_of_the_data(trained: Trainer) -> None:
    assert type(trained.model).__module__.startswith("timm.")
    assert trained.recipe.summary_fields(trained.model, trained.datasets)["size"] == "timm/test_resnet"
    assert trained.model.get_classifier().out_features == 10  # type: ignore[operator]
    assert trained.model.conv1[0].weight.shape[1] == 3  # type: ignore[index,union-attr]
    vit = ResNet(arch="timm/test_vit", image_size=48)
    model: Any = vit.build_model(vit.datasets(Digits(), 0))
    assert model.patch_embed.img_size == (48, 48)
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 10)


def test_its_blocks_are_recomputed_without_a_change(trained: Trainer) -> None:
    names = [type(block).__name__ for block in trained.recipe.blocks(trained.model)]
    assert names == ["BasicBlock", "BasicBlock", "Bottleneck", "BasicBlock"]
    again = trainer_of(*TIMM, "activation_checkpointing=blocks")
    fit(again)
    assert same_bits(trained.model.state_dict(), again.model.state_dict())


def test_without_timm_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'timm"):
        ResNet(arch="timm/resnet18").resolve(context(Digits()))
