"""Changes of an image by torchvision's policies, drawn from the sample's seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

MAGNITUDES = 31
"""Strengths of torchvision's RandAugment, from 0 on."""


@cache
def transform(policy: str, **options: int) -> Callable[[Any], Any]:
    """Return the policy of torchvision with this name, bilinear as in its references/classification/presets.py."""
    from torchvision.transforms import InterpolationMode, v2

    made: Callable[[Any], Any] = getattr(v2, policy)(interpolation=InterpolationMode.BILINEAR, **options)
    return made


def changed(transform: Callable[[Any], Any], seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return a square of pixels (uint8, 3 × S × S) after the random changes that this seed draws."""
    from PIL import Image

    # torchvision draws from torch's global generator, which belongs to the training: see ``uses_global_generator``.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        picture = transform(Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))))
    return np.asarray(picture).transpose(2, 0, 1)
