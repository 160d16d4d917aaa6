"""The ``augment`` config group: what training changes about an image at random, and which part of it is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from trainer.errors import check_number, check_range, no_effect
from trainer.recipe import Augment, Context, DataSource, Decision, Recipe

SMALL = 64
"""Pixels. Images with a shorter side below this are not cropped unless the user requests it: the object fills most of
the image, and digits must not be mirrored.
"""
_MAGNITUDES = 31
"""Strengths of torchvision's RandAugment, from 0 on."""


class View(NamedTuple):
    """What becomes of one image: a part of it is scaled to a square, which is mirrored, shifted, and then changed by
    the policy.
    """

    box: tuple[float, float, float, float] | None = None
    """Left, upper, right and lower edge in pixels. None: the whole image, or the middle square of an oblong one."""
    flip: bool = False
    """Whether the image is mirrored horizontally."""
    shift: tuple[float, float] = (0.0, 0.0)
    """Shift to the right and downwards, as fractions of the square's side. Its edge pixels fill what is left empty."""
    policy: Callable[[np.ndarray], np.ndarray] | None = None
    """Changes the square (uint8, 3 × S × S) in other ways, such as its contrast."""


@dataclass
class ImageAugment(Augment):
    """The ``augment`` config group; this base is ``augment=none``: the whole image, in training and in evaluation.

    A choice is a pure function of the sample's seed. It does not know the pixels: ``pixels.py`` cuts them, and
    ``mixing.py`` mixes them on the device. Every choice has these options; evaluation has none of them.
    """

    kind: ClassVar[str] = "none"
    uses_global_generator: ClassVar[bool] = False
    """Whether the policy of its views draws from torch's global generator."""
    eval_crop = 1.0
    """The side of the middle square that evaluation takes, as a fraction of the image's shorter side."""
    mixup: float = field(default=0.0, kw_only=True)
    """Mixup: blend pairs of images and their labels, with a weight from Beta(mixup, mixup) (Zhang et al. 2018); 0: off.
    Usual: 0.2 (torchvision's references), 0.8 for ViTs (timm)."""
    cutmix: float = field(default=0.0, kw_only=True)
    """CutMix: exchange a box between pairs of images, and mix labels by its area, from Beta(cutmix, cutmix) (Yun et al.
    2019, who use 1); 0: off. With ``mixup``, each pair gets one of the two, with equal probability."""

    def __post_init__(self) -> None:
        check_range("augment.mixup", self.mixup, "[0, inf)")
        check_range("augment.cutmix", self.cutmix, "[0, inf)")

    @property
    def micro_batch_multiple(self) -> int:
        """Return the number that ``micro_batch_size`` has to be a multiple of: pairs of images are mixed."""
        return 2 if self.on_device else 1

    @property
    def on_device(self) -> list[str]:
        """The options that are set and that the recipe's loss carries out on the device, as typed.

        They mix images in pairs: neighbours in the stream of samples, the first of an even position.
        """
        options = ("mixup", "cutmix")
        return [f"augment.{name}={value}" for name in options if (value := getattr(self, name))]

    def check(self, recipe: Recipe, data: DataSource) -> None:
        """Refuse data without images, and to mix the images of a recipe whose loss does not."""
        if (typed := self.effect()) and not data.has_images:
            raise no_effect(typed, f"data={data.kind} has no images")
        if (options := self.on_device) and not recipe.mixes_images:
            raise no_effect(options[0], f"recipe={recipe.name} does not mix images")

    def effect(self) -> str | None:
        """Return what a recipe without images must refuse, as typed; None: nothing."""
        typed = [] if self.kind in (ImageAugment.kind, AutomaticAugment.kind) else [f"augment={self.kind}"]
        return " ".join(typed + self.on_device) or None

    def resolve(self, context: Context) -> tuple[ImageAugment, list[Decision]]:
        """Refuse data that could be read as images, but was not."""
        if context.datasets is not None and not _images(context.datasets) and (typed := self.effect()):
            raise no_effect(typed, "this recipe reads no images")
        return self, []

    def applied(self, datasets: Any) -> Any:
        copies = {part: copy(part) for part in _images(datasets)}  # they share the images
        for part in copies.values():
            part.augment = self
        names = [name for name in ("train", "valid", "test") if hasattr(getattr(datasets, name), "augment")]
        return replace(datasets, **{name: copies[getattr(datasets, name)] for name in names}) if names else datasets

    def view(self, width: int, height: int, seed: int | None, size: int) -> View:
        """Return what becomes of an image of ``width`` × ``height`` pixels.

        Args:
            width: of the stored image.
            height: of the stored image.
            seed: of the sample, from which alone everything random is drawn; None: evaluation.
            size: of the side of the square that the model takes, in pixels.
        """
        return View()


@dataclass
class Light(ImageAugment):
    """``augment=light``: training shifts the image a little, with ``flip`` mirrors it; evaluation takes it whole."""

    kind: ClassVar[str] = "light"
    shift: float = 0.125
    """Maximum shift in each direction, as a fraction of the side: 4 pixels of 32, as is usual for CIFAR-10."""
    flip: bool = False
    """Flip half of the images horizontally. Right for most photos, wrong for digits and letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("augment.shift", self.shift, "[0, 0.5]")

    def view(self, width: int, height: int, seed: int | None, size: int) -> View:
        """Draw a shift, evenly in both directions, and perhaps a flip."""
        if seed is None:
            return View()
        random = np.random.default_rng(seed)
        right, down = random.uniform(-self.shift, self.shift, 2).tolist()
        return View(flip=self.flip and random.random() < 0.5, shift=(right, down))


@dataclass
class ImageNet(ImageAugment):
    """``augment=imagenet``: the random crops and flips of Szegedy et al. 2015; evaluation on the middle of the image.

    Sides of the crop are between 3:4 and 4:3.
    """

    kind: ClassVar[str] = "imagenet"
    min_area: float = 0.08
    """Smallest random crop, as a fraction of the image's area; the largest is the whole image. 1: no crops, for small
    images."""
    flip: bool = True
    """Flip half of the images horizontally."""
    eval_crop: float = 0.875
    """Centre crop of evaluation, as a fraction of the shorter side: 224 of 256, as published. A square image of the
    model's own size is not cropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("augment.min_area", self.min_area, "(0, 1]")
        check_range("augment.eval_crop", self.eval_crop, "(0, 1]")

    def view(self, width: int, height: int, seed: int | None, size: int) -> View:
        """Draw a crop and a flip; without a seed, return the middle square."""
        if seed is None:
            if self.eval_crop == 1 or width == height == size:  # it already has the size of the model
                return View()
            side = min(width, height) * self.eval_crop
            return View(_placed(width, height, side, side, 0.5, 0.5))
        random = np.random.default_rng(seed)
        box_width, box_height = self._random_box(width, height, random)
        flip, x, y = random.random() < 0.5, random.random(), random.random()
        return View(_placed(width, height, box_width, box_height, x, y), self.flip and flip)

    def _random_box(self, width: int, height: int, random: np.random.Generator) -> tuple[float, float]:
        for _ in range(10):
            area = width * height * random.uniform(self.min_area, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if box_width <= width and box_height <= height:
                return box_width, box_height
        # A very long image, where no try fits: the largest box of an allowed shape.
        return min(width, height * 4 / 3), min(height, width * 4 / 3)


@dataclass
class RandAugment(ImageNet):
    """``augment=randaugment``: as ``imagenet``, then ``operations`` random changes of one strength (Cubuk et al. 2020).

    torchvision's RandAugment does the work: shears, shifts, rotations, brightness, colour, contrast, and others.
    """

    kind: ClassVar[str] = "randaugment"
    uses_global_generator: ClassVar[bool] = True
    operations: int = 2
    """Number of changes applied to an image in sequence; 2 as in torchvision's references and timm's rand-m9."""
    magnitude: int = 9
    """Strength of all changes, from 0 to 30, as in torchvision; timm's m9 is on a scale of 0 to 10, so 27 here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("augment.operations", self.operations)
        check_range("augment.magnitude", self.magnitude, f"[0, {_MAGNITUDES - 1}]")

    def view(self, width: int, height: int, seed: int | None, size: int) -> View:
        """Draw a crop and a flip, and let the same seed draw the changes."""
        options = {"num_ops": self.operations, "magnitude": self.magnitude, "num_magnitude_bins": _MAGNITUDES}
        return _changed_by("RandAugment", super().view(width, height, seed, size), seed, **options)


@dataclass
class TrivialAugment(ImageNet):
    """``augment=trivialaugment``: as ``imagenet``, then one random change of random strength (Müller and Hutter 2021).

    torchvision's TrivialAugmentWide does the work. It has no strength to be tuned.
    """

    kind: ClassVar[str] = "trivialaugment"
    uses_global_generator: ClassVar[bool] = True

    def view(self, width: int, height: int, seed: int | None, size: int) -> View:
        """Draw a crop and a flip, and let the same seed draw the change."""
        return _changed_by("TrivialAugmentWide", super().view(width, height, seed, size), seed)


@dataclass
class AutomaticAugment(ImageAugment):
    """``augment=auto``: ``none`` for images below 64 pixels and synthetic ones, ``imagenet`` for all others."""

    kind: ClassVar[str] = "auto"

    def resolve(self, context: Context) -> tuple[ImageAugment, list[Decision]]:
        """Return the choice for images of this size; ``none`` where there are no images."""
        for choice in (ImageAugment, ImageNet):
            if context.recorded.get("augment") == choice.kind:
                return choice(mixup=self.mixup, cutmix=self.cutmix), []
        if context.datasets is None:
            return self, []
        super().resolve(context)  # which refuses to mix what is no image
        images = _images(context.datasets)
        if not images:
            return ImageAugment(), []
        side = images[0].stored_side
        if side is None or side < SMALL:
            why = f"images stored with less than {SMALL} pixels a side, or synthetic, are not cropped; "
            why += "augment=light shifts them in training"
            return ImageAugment(mixup=self.mixup, cutmix=self.cutmix), [Decision("augment", ImageAugment.kind, why)]
        why = f"images stored with {SMALL} pixels a side or more: random crops of 8 to 100 %, flips, "
        why += "evaluation on the middle 87.5 %; augment=none turns this off"
        return ImageNet(mixup=self.mixup, cutmix=self.cutmix), [Decision("augment", ImageNet.kind, why)]


def _images(datasets: Any) -> list[Any]:
    """Return the parts of open data that are images, as ``pixels.Images`` has them."""
    return [part for part in (datasets.train, datasets.valid, datasets.test) if hasattr(part, "augment")]


def _changed_by(policy: str, view: View, seed: int | None, **options: int) -> View:
    """Return the view with the changes of torchvision's policy that this seed draws; in evaluation the view itself."""
    return view if seed is None else view._replace(policy=partial(_changed, policy, options, seed))


def _changed(policy: str, options: dict[str, int], seed: int, pixels: np.ndarray) -> np.ndarray:
    """Return a square of pixels (uint8, 3 × S × S) after the random changes that this seed draws.

    They are bilinear, as in torchvision's references/classification/presets.py.
    """
    from PIL import Image
    from torchvision.transforms import InterpolationMode, v2

    transform = getattr(v2, policy)(interpolation=InterpolationMode.BILINEAR, **options)
    # torchvision draws from torch's global generator, which belongs to the training: see ``uses_global_generator``.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        picture = transform(Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))))
    return np.asarray(picture).transpose(2, 0, 1)


def _placed(
    width: int, height: int, box_width: float, box_height: float, x: float, y: float
) -> tuple[float, float, float, float]:
    """Return a box within the image; ``x`` and ``y`` from 0 to 1 say where between its edges."""
    left, top = x * (width - box_width), y * (height - box_height)
    # Rounding may move the far edge slightly outside the image, which Pillow refuses.
    return left, top, min(left + box_width, width), min(top + box_height, height)
