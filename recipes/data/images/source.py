"""What a source of labelled images gives to the image recipes."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.data.images.augment import Augment, AutomaticAugment
from recipes.data.images.pixels import IMAGENET_MEAN, IMAGENET_STD
from trainer.data.contract import Datasets
from trainer.errors import UserError
from trainer.recipe import DataSource


@dataclass(kw_only=True)
class ImageDatasets(Datasets):
    """Labelled images. Batches hold ``image`` (uint8, B × 3 × H × W) and ``label`` (int64, B)."""

    classes: list[str]
    image_size: int
    """Height and width, in pixels."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    """Of the three channels, after division by 255; the recipe normalises on the device."""
    augment: Augment = field(default_factory=Augment)
    """What is done to the images as they are fetched, and which part of them is evaluated."""


@dataclass
class ImageSource(DataSource):
    """Data that can be read as labelled images."""

    augment = Augment()  # no annotation, so no field: it is an option of the root, which sets it here
    """The ``augment`` group; what ``auto`` means is known once the images are open."""

    def choose_augment(self, shorter_side: int | None) -> Augment:
        """Settle ``augment`` for images of this size (see ``Augment.choose``), and return it."""
        self.augment = self.augment.choose(shorter_side)
        return self.augment

    def refuse_augment(self) -> None:
        """Raise UserError if images were to be augmented: the data is read as something else."""
        if self.augment.kind not in (Augment.kind, AutomaticAugment.kind):
            raise UserError(f"augment={self.augment.kind} has no effect: this recipe reads no images; leave it out")

    def images(self, image_size: int | None) -> ImageDatasets:
        """Open the images as squares of ``image_size`` pixels (None: the source's own natural size).

        Raises:
            UserError: no images, fewer than two classes, an unreadable file.

        """
        raise NotImplementedError
