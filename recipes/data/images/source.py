"""What a source of labelled images gives to the image recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mantissa.display import shortened
from recipes.data.images.augment import ImageAugment
from recipes.data.images.pixels import IMAGENET_MEAN, IMAGENET_STD, Images
from trainer.data.contract import Datasets
from trainer.errors import UserError
from trainer.files import add_run_facts
from trainer.recipe import DataSource


@dataclass(kw_only=True)
class ImageDatasets(Datasets):
    """Labelled images. Batches hold ``image`` (uint8, B × 3 × H × W) and ``label`` (int64, B; of several labels to an
    image float32, B × classes, 0 or 1); in training also what ``mixing.draw`` returns.
    """

    classes: list[str]
    image_size: int
    """Height and width, in pixels."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    """Mean and standard deviation of the three channels, after division by 255; the recipe normalises on the device."""
    weights_note: str = ""
    """What becomes of pretrained weights on these data, in words."""

    @property
    def multi_label(self) -> bool:
        """Whether an image has any number of labels, not one."""
        return getattr(getattr(self.train, "labels", None), "ndim", 1) > 1

    @property
    def augment(self) -> ImageAugment:
        """What is done to the images as they are fetched, and which part of them is evaluated."""
        augment: ImageAugment = self.train.augment  # type: ignore[attr-defined]
        return augment

    def facts(self) -> dict[str, str]:
        return super().facts() | {"classes": f"{len(self.classes):,} ({shortened(self.classes)})"}

    def keep(self, folder: Path) -> None:
        """Write what the weights depend on to run.json: a run that stops early exports nothing."""
        names = ("classes", "image_size", "mean", "std")
        add_run_facts(folder, images={name: getattr(self, name) for name in names})


@dataclass
class ImageSource(DataSource):
    """Data that can be read as labelled images."""

    has_images: ClassVar[bool] = True

    def images(self, image_size: int | None) -> ImageDatasets:
        """Open the images as squares of ``image_size`` pixels (None: the source's own natural size).

        Raises:
            UserError: no images, fewer than two classes, an unreadable file.
        """
        raise NotImplementedError

    def opened(
        self,
        title: str,
        where: str,
        parts: Mapping[str, Images],
        classes: list[str],
        image_size: int,
        shorter_side: int | None,
        **about: Any,
    ) -> ImageDatasets:
        """Return datasets of images, all of one size.

        Args:
            title: begins the description.
            where: the option that names the data, for messages.
            parts: ``training``, ``validation``, and perhaps ``test``.
            classes: the names.
            image_size: height and width of the squares, in pixels.
            shorter_side: of a typical image as it is stored, in pixels; None: the images are synthetic.
            about: further fields of ``ImageDatasets``.

        Raises:
            UserError: there are too few images of each class, or of one class only.
        """
        labels = parts["training"].labels
        present = labels.unique() if labels.ndim == 1 else labels.any(0).nonzero().flatten()
        if len(present) < 2:
            names = "".join(f" ({classes[number]})" for number in present)
            raise UserError(
                f"{where} has training images of {'one class only' if names else 'no class'}{names}; two are needed"
            )
        if not len(parts["validation"]):
            raise UserError(f"{where} has too few images of each class: none can be kept for validation")
        for part in parts.values():
            part.image_size, part.stored_side = image_size, shorter_side
        *first, last = (f"{len(part):,} {name}" for name, part in parts.items())
        return ImageDatasets(
            parts["training"],
            parts["validation"],
            f"{title}: {', '.join(first)} and {last} images, "
            f"{len(classes)} classes ({shortened(classes)}), {image_size} × {image_size}",
            test=parts.get("test"),
            classes=classes,
            image_size=image_size,
            **about,
        )
