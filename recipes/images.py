"""Image data for classification: handwritten digits, folders of images, MNIST-format files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

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
    return min(width, height * 4 / 3), min(
        height, width * 4 / 3
    )  # a very long image: its largest allowed box


def _rgb(image: Image.Image) -> Image.Image:
    """Return the image as 8-bit RGB; 16-bit greys are scaled, where Pillow's own conversion would clip them."""
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns and guesses
    return image.convert("RGB")
