"""An exported folder of an image classifier, opened again: the model, its classes, and what images go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from recipes.data.images.augment import Augment, ImageNet
from recipes.data.images.pixels import square
from recipes.vision import architectures
from recipes.vision.pretrained import read_config

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Classifier:
    """A trained classifier, in evaluation mode, fp32, on the CPU."""

    model: nn.Module
    """Takes what ``transform`` returns, B × 3 × S × S; returns B × outputs."""
    classes: list[str]
    """Their names, in the order of the outputs. The model may have more outputs."""
    transform: Callable[[Image.Image], Tensor]
    """From an image of any size and mode to the input of the model as in evaluation: fp32, 3 × S × S."""
    config: dict[str, Any]
    """The folder's ``config.json``."""


def open_classifier(folder: Path) -> Classifier:
    """Open the ``best/`` of a run of ``recipe=resnet``, by its own files only."""
    config = read_config(folder)
    model = architectures.build(config["arch"], config["image_size"], config["arch_options"]["num_classes"])
    load_model(model, str(folder / "model.safetensors"))
    return Classifier(model.float().eval(), config["classes"], _transform(config), config)


def _transform(config: dict[str, Any]) -> Callable[[Image.Image], Tensor]:
    size, part = int(config["image_size"]), float(config.get("evaluated_part", 1.0))
    augment = Augment() if part == 1 else ImageNet(evaluated=part)
    mean, std = (np.array(config[name], np.float32).reshape(3, 1, 1) for name in ("mean", "std"))

    def transform(image: Image.Image) -> Tensor:
        pixels = square(image, size, augment.view(*image.size, None, size))
        return torch.from_numpy((pixels.astype(np.float32) / 255 - mean) / std)

    return transform
