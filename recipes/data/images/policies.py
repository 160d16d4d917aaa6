"""Changes of an image by torchvision's policies, drawn from the sample's seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

MAGNITUDES = 31
"""Strengths of torchvision's RandAugment, from 0 on."""


def rand_augment(operations: int, magnitude: int, seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return a square of pixels (uint8, 3 × S × S) after ``operations`` random changes of strength ``magnitude``."""
    return _changed(_rand_augment(operations, magnitude), seed, pixels)


def trivial_augment(seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return a square of pixels (uint8, 3 × S × S) after one random change of random strength."""
    return _changed(_trivial_augment(), seed, pixels)


# Bilinear, as in torchvision's reference training (references/classification/presets.py).


@cache
def _rand_augment(operations: int, magnitude: int) -> Callable[[Any], Any]:
    from torchvision.transforms import InterpolationMode, v2

    bilinear = InterpolationMode.BILINEAR
    return v2.RandAugment(operations, magnitude, num_magnitude_bins=MAGNITUDES, interpolation=bilinear)


@cache
def _trivial_augment() -> Callable[[Any], Any]:
    from torchvision.transforms import InterpolationMode, v2

    return v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)


def _changed(transform: Callable[[Any], Any], seed: int, pixels: np.ndarray) -> np.ndarray:
    from PIL import Image

    # torchvision draws from torch's global generator, which belongs to the training: see ``uses_global_generator``.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        changed = transform(Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))))
    finally:
        generator.set_state(state)
    return np.asarray(changed).transpose(2, 0, 1)
