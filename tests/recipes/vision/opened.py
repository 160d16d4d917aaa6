"""An exported folder of an image classifier, opened again by its own files: the model, and what images go through."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_model
from torch import Tensor, nn

from recipes.data.images.augment import ImageAugment, ImageNet
from recipes.data.images.pixels import square
from recipes.vision import architectures
from recipes.vision.pretrained import read_config


class Classifier(NamedTuple):
    model: nn.Module
    """In evaluation mode, fp32. Takes what ``transform`` returns, B × 3 × S × S; returns B × outputs."""
    config: dict[str, Any]
    """The folder's ``config.json``."""

    def transform(self, image: Image.Image) -> Tensor:
        """From an image of any size and mode to the input of the model as in evaluation: fp32, 3 × S × S."""
        size, part = int(self.config["image_size"]), float(self.config["evaluated_part"])
        augment = ImageAugment() if part == 1 else ImageNet(evaluated=part)
        mean, std = (np.array(self.config[name], np.float32).reshape(3, 1, 1) for name in ("mean", "std"))
        pixels = square(image, size, augment.view(*image.size, None, size))
        return torch.from_numpy((pixels.astype(np.float32) / 255 - mean) / std)


def open_classifier(folder: Path) -> Classifier:
    config = read_config(folder)
    model = architectures.build(config["arch"], config["image_size"], config["arch_options"]["num_classes"])
    load_model(model, str(folder / "model.safetensors"))
    return Classifier(model.float().eval(), config)
