"""Image data in memory: ``data=digits``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import distribution
from typing import ClassVar

import numpy as np
import torch

from recipes.data.images.pixels import ArrayImages, held_out, scale
from recipes.data.images.source import ImageDatasets, ImageSource
from trainer.errors import check_range


@dataclass
class Digits(ImageSource):
    """Scikit-learn's handwritten digits: 1,797 images of 8 × 8, part of the installation."""

    kind: ClassVar[str] = "digits"
    valid_fraction: float = 0.2
    """Fraction of each class held out for validation; the same images every time."""

    def __post_init__(self) -> None:
        check_range("data.valid_fraction", self.valid_fraction, "(0, 1)")

    def images(self, image_size: int | None) -> ImageDatasets:
        """Return the digits, scaled up once to ``image_size`` (by default 32)."""
        # As its load_digits does; to import scikit-learn takes a second.
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        table = np.loadtxt(str(file), delimiter=",")
        size, labels = image_size or 32, table[:, -1].astype(np.int64)
        pixels = torch.from_numpy(np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8))
        images = scale(pixels, size).numpy()
        held = held_out(labels, self.valid_fraction)
        parts = {
            "training": ArrayImages(images[~held], labels[~held]),
            "validation": ArrayImages(images[held], labels[held]),
        }
        mean, std = float(images[~held].mean() / 255), float(images[~held].std() / 255)
        classes = [str(digit) for digit in range(10)]
        return self.opened(self.kind, "data=digits", parts, classes, size, 8, mean=(mean,) * 3, std=(std,) * 3)
