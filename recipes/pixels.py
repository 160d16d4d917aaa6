"""What all image data shares: crops, arrays of images in memory, and splitting off a validation set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import UserError
from trainer.recipe import Batch, SampleId

if TYPE_CHECKING:
    from PIL import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Of ImageNet's training images, red, green, blue, in units of 0 to 1."""


def crop(image: Image.Image, size: int, seed: int | None) -> np.ndarray:
    """Cut a square out of an image and scale it: uint8, 3 × ``size`` × ``size``.

    With a seed: the random crop of Szegedy et al. 2015 (8 to 100 % of the area, sides 3:4 to 4:3) and a
    horizontal flip every second time, a pure function of the seed. Without: the middle 224/256 of the
    shorter side, as ImageNet models are evaluated.
    """
    from PIL import Image

    image = _rgb(image)
    width, height = image.size
    if seed is None:
        side = min(width, height) * 224 / 256
        flip, box_width, box_height, x, y = False, side, side, 0.5, 0.5
    else:
        random = np.random.default_rng(seed)
        box_width, box_height = _random_box(width, height, random)
        flip, x, y = random.random() < 0.5, random.random(), random.random()
    left, top = x * (width - box_width), y * (height - box_height)
    # Rounding may carry the far edge a hair outside the image, which Pillow refuses.
    right, bottom = min(left + box_width, width), min(top + box_height, height)
    scaled = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    pixels = np.asarray(scaled).transpose(2, 0, 1)
    return np.ascontiguousarray(pixels[:, :, ::-1] if flip else pixels)


def _random_box(width: int, height: int, random: np.random.Generator) -> tuple[float, float]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if box_width <= width and box_height <= height:
            return box_width, box_height
    # A very long image, where no try fits: the largest box of an allowed shape.
    return min(width, height * 4 / 3), min(height, width * 4 / 3)


def _rgb(image: Image.Image) -> Image.Image:
    """Return 8-bit RGB; 16-bit greys are scaled, where Pillow's own conversion would clip them."""
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
        image = Image.fromarray(grey.astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns and guesses
    return image.convert("RGB")


class ArrayImages:
    """A dataset of images in memory: uint8, N × (1 or 3) × H × W, and their int64 labels."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, image_size: int, length: int | None = None) -> None:
        self.images = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels)
        self.image_size = image_size
        self.length = len(labels) if length is None else length
        """May exceed the number of images, which are then repeated."""

    def __len__(self) -> int:
        return self.length

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``image`` (uint8, B × 3 × image_size × image_size) and ``label`` (int64, B)."""
        rows = torch.tensor([sample.index for sample in samples]) % len(self.labels)
        images = scale(self.images[rows], self.image_size)
        return {"image": images.expand(-1, 3, -1, -1).contiguous(), "label": self.labels[rows]}


def scale(images: Tensor, size: int) -> Tensor:
    """Scale uint8 images (N × C × H × W) to squares, bilinearly; those of that size come back as they are."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


def grey_statistics(images: np.ndarray) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return mean and standard deviation of uint8 images after division by 255, the same for each channel."""
    some = images[:10_000]  # enough for three digits, without a float copy of a whole data set
    mean, deviation = float(some.mean() / 255), max(float(some.std() / 255), 1 / 255)
    return (mean, mean, mean), (deviation, deviation, deviation)


def held_out(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the samples to validate on: every so many-th of each class, so no class is missed."""
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        marks = np.floor(np.arange(len(members) + 1) * fraction)
        mask[members] = marks[1:] > marks[:-1]
    return mask


def check_fraction(fraction: float) -> None:
    """Refuse a ``data.valid_fraction`` that leaves one side empty."""
    if not 0 < fraction < 1:
        raise UserError(f"data.valid_fraction={fraction} must lie between 0 and 1, such as 0.1")


def check_path(path: str, what: str) -> None:
    """Refuse a ``data.path`` that is not a folder."""
    from pathlib import Path

    if not path:
        raise UserError(f"data.path is missing: name {what}, as in data.path=/folder")
    if not Path(path).expanduser().is_dir():
        raise UserError(f"data.path={path} is not a folder; name {what}")
