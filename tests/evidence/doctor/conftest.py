from __future__ import annotations

from typing import Any

import pytest
import torchvision
from torchvision.models import regnet

from recipes import bert, t5
from recipes.gpt2 import SHAPES, Shape


def tiny_regnet(num_classes: int, **_: Any) -> regnet.RegNet:
    """Two blocks of grouped convolutions and batch norm."""
    blocks = regnet.BlockParams([1, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2])
    return regnet.RegNet(blocks, num_classes, stem_width=16)


tiny_regnet.__module__ = regnet.__name__  # recipe.arch takes what torchvision.models has


@pytest.fixture(autouse=True)
def smallest_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """recipe.size=tiny of gpt2, recipe.arch=tiny_regnet of resnet, and smaller nanos of bert and t5."""
    monkeypatch.setitem(SHAPES, "tiny", Shape(2, 2, 32, 16))
    monkeypatch.setitem(torchvision.models._api.BUILTIN_MODELS, "tiny_regnet", tiny_regnet)
    monkeypatch.setitem(bert.SHAPES, "nano", bert.Shape(1, 32, 2, 64))
    monkeypatch.setitem(t5.SHAPES, "nano", t5.Shape(1, 32, 2, 16, 64, 64))
