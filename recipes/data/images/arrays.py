"""Image data in memory: ``data=digits`` and ``data=idx``."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from recipes.data.images.pixels import ArrayImages, check_fraction, check_path, held_out, scale
from recipes.data.images.source import ImageDatasets, ImageSource
from trainer.errors import UserError

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049


@dataclass
class Digits(ImageSource):
    """Scikit-learn's handwritten digits: 1,797 images of 8 × 8, part of the installation."""

    kind: ClassVar[str] = "digits"
    valid_fraction: float = 0.2
    """Fraction of each class held out for validation; the same images every time."""

    def __post_init__(self) -> None:
        check_fraction(self.valid_fraction)

    def images(self, image_size: int | None) -> ImageDatasets:
        """Return the digits, scaled up once to ``image_size`` (by default 32)."""
        # As its load_digits does; to import scikit-learn takes a second.
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        table = np.loadtxt(str(file), delimiter=",")
        size, labels = image_size or 32, table[:, -1].astype(np.int64)
        pixels = torch.from_numpy(np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8))
        images = scale(pixels, size).numpy()
        valid = held_out(labels, self.valid_fraction)
        return _opened(self, "data=digits", [(images[rows], labels[rows]) for rows in (~valid, valid)], size, 8)


@dataclass
class Idx(ImageSource):
    """Files in MNIST's format, compressed by gzip or not, held in memory."""

    kind: ClassVar[str] = "idx"
    path: str = ""
    """Folder with ``train-images-idx3-ubyte`` and the other files, under MNIST's names."""
    images_file: str | None = None
    """Image file in ``path``, if it has another name; part of it is held out for validation."""
    labels_file: str | None = None
    """Label file for ``images_file``."""
    valid_fraction: float = 0.1
    """Fraction of each class held out for validation, if there is only one pair of files."""

    def __post_init__(self) -> None:
        check_fraction(self.valid_fraction)
        check_path(self.path, "the folder of the MNIST-format files")
        if (self.images_file is None) != (self.labels_file is None):
            raise UserError("data.images_file and data.labels_file must be set together: set both or neither")

    def images(self, image_size: int | None) -> ImageDatasets:
        """Read the files; in their own size, or scaled when they are fetched.

        Raises:
            UserError: no such files, a file of another format, fewer than two classes.
        """
        parts = [_read_pair(*names) for names in self._files()]
        if len(parts) == 1:
            ((images, labels),) = parts
            valid = held_out(labels, self.valid_fraction)
            parts = [(images[rows], labels[rows]) for rows in (~valid, valid)]
        sides = parts[0][0].shape[2:]
        return _opened(self, f"data.path={self.path}", parts, image_size or max(sides), min(sides))

    def _files(self) -> list[tuple[Path, Path]]:
        """Return the pairs of images and labels: to train on, and to validate on where there are two."""
        folder = Path(self.path).expanduser()
        if self.images_file is not None and self.labels_file is not None:
            return [(folder / self.images_file, folder / self.labels_file)]
        pairs = []
        for part in ("train", "t10k"):
            images = sorted(folder.glob(f"{part}-images[-.]idx3-ubyte*"))
            labels = sorted(folder.glob(f"{part}-labels[-.]idx1-ubyte*"))
            if images and not labels:
                raise UserError(f"data.path={self.path} has {images[0].name} but not {part}-labels-idx1-ubyte[.gz]")
            if images:
                pairs.append((images[0], labels[0]))
        if not pairs:
            raise UserError(
                f"data.path={self.path} has no train-images-idx3-ubyte[.gz] or t10k-images-idx3-ubyte[.gz]; "
                "name other files with data.images_file and data.labels_file"
            )
        return pairs


def _read_pair(images_file: Path, labels_file: Path) -> tuple[np.ndarray, np.ndarray]:
    images = _read_idx(images_file, IMAGES_MAGIC, "images")
    labels = _read_idx(labels_file, LABELS_MAGIC, "labels")
    if len(images) != len(labels):
        raise UserError(f"{images_file} has {len(images)} images, but {labels_file} has {len(labels)} labels")
    return images[:, None], labels.astype(np.int64)


def _read_idx(path: Path, magic: int, what: str) -> np.ndarray:
    """Read a file of bytes: magic number and dimensions as big-endian 32-bit words, then the data.

    (torchvision's reader does not read compressed files, and its errors do not explain what is wrong.)
    """
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    dimensions = magic & 0xFF
    start = 4 + 4 * dimensions
    found = int.from_bytes(content[:4], "big")
    if len(content) < start or found != magic:
        raise UserError(f"{path} is not an MNIST-format file of {what}: expected magic number {magic}, found {found}")
    shape = [int(length) for length in np.frombuffer(content, ">u4", dimensions, 4)]
    if len(content) - start != np.prod(shape):
        raise UserError(f"{path} is damaged: its header has shape {shape}, but {len(content) - start} bytes follow")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _opened(
    source: ImageSource, where: str, parts: list[tuple[np.ndarray, np.ndarray]], size: int, shorter_side: int
) -> ImageDatasets:
    """Return the images and labels to train on, and those to validate on."""
    classes = [str(label) for label in range(max(labels.max(initial=0) for _, labels in parts) + 1)]
    some = parts[0][0][:10_000]  # enough for three digits, without a float copy of a whole data set
    mean, std = float(some.mean() / 255), max(float(some.std() / 255), 1 / 255)
    datasets = dict(zip(("training", "validation"), (ArrayImages(*part) for part in parts), strict=True))
    return source.opened(source.kind, where, datasets, classes, size, shorter_side, mean=(mean,) * 3, std=(std,) * 3)
