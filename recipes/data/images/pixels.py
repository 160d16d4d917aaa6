"""What all image data shares: cutting squares, arrays of images in memory, and splitting off a validation set."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.data.images import mixing
from recipes.data.images.augment import ImageAugment, View
from trainer.data.contract import Batch, SampleId
from trainer.errors import UserError, check_choice

if TYPE_CHECKING:
    from PIL import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training images, red, green, blue, in units of 0 to 1."""
REMEDY = "repair it, or let the next image take its place with data.on_error=skip"


def square(image: Image.Image, size: int, view: View) -> np.ndarray:
    """Cut a view out of an RGB image and scale it: uint8, 3 × ``size`` × ``size``.

    The whole of a square image of that size comes back as it is.
    """
    from PIL import Image

    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = view.box or (left, top, left + side, top + side)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)
    pixels = _moved(pixels, view)
    return np.ascontiguousarray(view.policy(pixels) if view.policy else pixels)


def _moved(pixels: np.ndarray, view: View) -> np.ndarray:
    """Mirror and shift a square of C × S × S, by whole pixels."""
    if view.flip:
        pixels = pixels[:, :, ::-1]
    size = pixels.shape[-1]
    right, down = (round(part * size) for part in view.shift)
    if not right and not down:
        return pixels
    rows, columns = np.arange(size) - down, np.arange(size) - right
    return pixels[:, rows.clip(0, size - 1)[:, None], columns.clip(0, size - 1)]


def as_seen(image: Image.Image) -> Image.Image:
    """Return an opened image as a person sees it, in 8-bit RGB: upright, on white where it is transparent.

    Raises:
        ValueError: what its numbers mean is not known.
    """
    from PIL import Image, ImageOps

    with suppress(Exception):  # damaged EXIF
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F" or image.mode.startswith("I"):
        grey, white = np.asarray(image), 1 if image.mode == "F" else 65535
        if not 0 <= grey.min() <= grey.max() <= white:  # as NaN is not
            raise ValueError(f"its values are {grey.min():g} to {grey.max():g}, not 0 to {white}")
        image = Image.fromarray((np.rint(grey * 255) if white == 1 else grey >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


class Images:
    """Labelled images as squares, augmented."""

    labels: Tensor
    """int64, one for each image; of several labels to an image bool, images × classes."""
    image_size: int
    stored_side: int | None = None
    """Of a typical image as it is stored, in pixels; None: they are synthetic."""
    augment: ImageAugment = ImageAugment()
    """What is done to the images as they are fetched, see ``ImageAugment.applied``."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``image`` (uint8, B × 3 × image_size × image_size), ``label`` (int64, B; or float32, B × classes) and
        ``mixing.draw``'s.

        Raises:
            UserError: which image cannot be decoded.
        """
        images, rows = self.squares(samples)
        label = self.labels[rows] if self.labels.ndim == 1 else self.labels[rows].to(torch.float32)
        return {"image": images, "label": label} | mixing.draw(self.augment, samples, self.image_size)

    def squares(self, samples: Sequence[SampleId]) -> tuple[Tensor, Tensor]:
        """Return the images, and the numbers of their labels."""
        raise NotImplementedError

    @property
    def uses_global_generator(self) -> bool:
        """Whether ``batch`` uses torch's global generator, so that no thread beside the training may call it."""
        return self.augment.uses_global_generator


class ArrayImages(Images):
    """A dataset of images in memory: uint8, N × (1 or 3) × H × W, and their int64 labels."""

    pins = False

    def __init__(self, images: np.ndarray, labels: np.ndarray, length: int | None = None) -> None:
        self.images = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels)
        self.length = len(labels) if length is None else length
        """May exceed the number of images, which are then repeated."""

    def __len__(self) -> int:
        return self.length

    def squares(self, samples: Sequence[SampleId]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor([sample.index for sample in samples]) % len(self.labels)
        # Torch keeps page-locked blocks and gives none away while the device copies from it; new memory would take
        # several times as long to fill.
        shape = (len(rows), 3, self.image_size, self.image_size)
        squares = torch.empty(shape, dtype=torch.uint8, pin_memory=self.pins)
        views = []
        if self.augment.kind != ImageAugment.kind:
            height, width = self.images.shape[-2:]
            views = [self.augment.view(width, height, sample.seed, self.image_size) for sample in samples]
        if any(view.box or view.policy for view in views):
            from PIL import Image

            for target, row, view in zip(squares.numpy(), rows, views, strict=True):
                picture = Image.fromarray(self.images[row].expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
                target[:] = square(picture, self.image_size, view)
            return squares, rows
        if self.images.shape[1:] == shape[1:]:
            whole = torch.index_select(self.images, 0, rows, out=squares)
        else:
            whole = scale(self.images.index_select(0, rows), self.image_size)
        for image, view in zip(whole.numpy(), views, strict=False):
            if (moved := _moved(image, view)) is not image:
                image[:] = moved
        return squares.copy_(whole), rows


class DecodedImages(Images):
    """A dataset of images that are decoded when they are fetched. Subclasses define ``stored``.

    Args:
        labels: as ``Images`` has them.
        on_error: ``error``; or ``skip``: the next image takes the place of one that cannot be decoded. That depends on
            the files alone, so every epoch, process and resumed run has the same samples.
    """

    def __init__(self, labels: Tensor, on_error: str) -> None:
        check_choice("data.on_error", on_error, ("error", "skip"))
        self.labels, self.on_error = labels, on_error
        self.unreadable = torch.zeros(len(labels), dtype=torch.bool)
        """Those found so far; loading processes share this memory."""

    def stored(self, index: int) -> tuple[Any, str]:
        """Return what Pillow opens, and what to call it."""
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        """Decode an image, see ``as_seen``.

        Raises:
            UserError: an image cannot be read; the message names it.
        """
        from PIL import Image, UnidentifiedImageError

        file, name = self.stored(index)
        try:
            with Image.open(file) as image:
                image.load()
                return as_seen(image)
        except Exception as error:  # each of Pillow's decoders has its own
            unknown = isinstance(error, UnidentifiedImageError) and isinstance(file, str)
            if unknown and np.fromfile(file, np.uint8, 23).tobytes() == b"version https://git-lfs":
                raise UserError(f"{name} is a pointer of Git LFS; get the images with git lfs pull") from error
            raise UserError(f"{name} cannot be decoded ({error}); {REMEDY}") from error

    def squares(self, samples: Sequence[SampleId]) -> tuple[Tensor, Tensor]:
        images, rows = [], []
        for sample in samples:
            image, row = self.decoded(sample.index)
            view = self.augment.view(*image.size, sample.seed, self.image_size)
            images.append(square(image, self.image_size, view))
            rows.append(row)
        return torch.from_numpy(np.stack(images)), torch.tensor(rows)

    def decoded(self, index: int) -> tuple[Image.Image, int]:
        """Decode an image, or with ``skip`` the next one that can be decoded; return which one it is, too."""
        for row in (number % len(self) for number in range(index, index + len(self))):
            if not self.unreadable[row]:
                try:
                    return self.image(row), row
                except UserError as error:
                    if self.on_error == "error":
                        raise
                    self.unreadable[row] = True
                    why = str(error).removesuffix(f"; {REMEDY}")
                    logging.getLogger("mantissa").warning("%s; the next image takes its place", why)
        raise UserError(f"not one of {len(self)} images can be decoded; set data to others")

    def shorter_side(self) -> int | None:
        """Return the median of the shorter sides of up to 100 images, in pixels."""
        from PIL import Image

        sides = []
        for index in range(0, len(self), -(-len(self) // 100)):
            with suppress(Exception), Image.open(self.stored(index)[0]) as image:  # what is damaged is seen later
                sides.append(min(image.size))
        return sorted(sides)[len(sides) // 2] if sides else None


def scale(images: Tensor, size: int) -> Tensor:
    """Scale uint8 images (N × C × H × W) to squares, bilinearly; those of that size come back as they are."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


def held_out(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the samples to validate on: every so many-th of each class.

    A class of two samples or more has at least one on each side; one of a single sample is trained on.

    Args:
        labels: int, one for each sample.
        fraction: of each class, above 0 and below 1; rounded down.
    """
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        marks = np.floor(np.arange(len(members) + 1) * fraction)
        mask[members] = marks[1:] > marks[:-1]
        if len(members) > 1 and not mask[members].any():
            mask[members[-1]] = True
    return mask
