"""``data=hub``: text or images of the Hugging Face hub, or of local files that ``datasets`` opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from recipes.data.hub_load import (
    chosen_split,
    class_names,
    class_numbers,
    column,
    is_class,
    is_image,
    is_text,
    load,
    local_path,
    may_be_class,
)
from recipes.data.images.pixels import DecodedImages, held_out, unreadable
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.data.text.corpus import TokenizedText
from recipes.data.text.split import Corpus, Split, split_rows
from trainer.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

VALIDATION = ("validation", "valid", "val", "dev", "test")
"""What datasets call the split to validate on, the best first."""


@dataclass
class Hub(TokenizedText, ImageSource):
    """A dataset by its hub id, or a local folder or file: text for gpt2, images for resnet."""

    kind: ClassVar[str] = "hub"
    name: str = ""
    """A hub id such as ``roneneldan/TinyStories``, a folder, or a parquet, JSON, CSV or text file."""
    subset: str | None = None
    """The configuration, where the dataset has several."""
    train_split: str = "train"
    valid_split: str | None = None
    """None: the first of ``VALIDATION`` that there is, else ``valid_fraction`` of the training split is set aside; it
    is, too, where the training split itself is named.
    """
    test: str | None = None
    """A split that is evaluated once, at the end, with the best weights."""
    text_column: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    """None: the only column of that type."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise UserError("missing required option: data.name; set a dataset of the hub or a folder, such as ag_news")
        local_path(self.name)

    def title(self) -> str:
        """Return the hub id or path."""
        return self.name

    def splits(self) -> tuple[Split, Split]:
        """Return the column of text, of the dataset's own splits or of one that is divided (see ``split_rows``)."""
        self.refuse_augment()
        data = self._load()
        train = self._corpus(data, "train_split", self.train_split)
        names = self._valid_splits(data)
        if not names:
            return split_rows(train, self.valid_fraction)
        valid = self._corpus(data, "valid_split", names[0])
        whole = Split(train, range(len(train.sizes)))
        return whole, Split(valid, range(len(valid.sizes)), origin=f"the dataset's split {names[0]}")

    def test_split(self) -> Split | None:
        """Return the column of text of the split ``test`` names."""
        if self.test is None:
            return None
        corpus = self._corpus(self._load(), "test", self.test)
        return Split(corpus, range(len(corpus.sizes)))

    def images(self, image_size: int | None) -> ImageDatasets:
        """Open the images; for None as large as the first one's shorter side, at most 224 pixels.

        Raises:
            UserError: no such dataset, split or column; fewer than two classes; an image without a label.
        """
        splits = self._load()
        train = chosen_split(splits, self.name, "train_split", self.train_split)
        declared = any(map(is_class, train.features.values()))
        label = column(train, self.name, "label_column", self.label_column, is_class if declared else may_be_class)
        classes = class_names(train, label)
        if len(classes) < 2:
            raise UserError(f"data.name={self.name} has images of one class only; two are needed")
        labels = class_numbers(train, label, classes, f"data.train_split={self.train_split}")
        train_set, valid_set, origin = self._image_splits(splits, train, label, classes, labels)
        if not len(valid_set):
            raise UserError(f"data.name={self.name} has too few images of each class for a validation set")
        size = image_size or min(*train_set.image(0).size, 224)
        test_set = None
        if self.test is not None:
            held = chosen_split(splits, self.name, "test", self.test)
            labels = class_numbers(held, label, classes, f"data.test={self.test}")
            test_set = self._images(held, labels, np.arange(len(labels)))
        augment = self.augment.choose(train_set.shorter_side())
        for each in filter(None, (train_set, valid_set, test_set)):
            each.image_size, each.augment = size, augment
        counts = f"{len(train_set):,} training and {len(valid_set):,} validation images ({origin})"
        text = f"{self.name}: {counts}, {len(classes)} classes, {size} × {size}"
        return ImageDatasets(
            train_set, valid_set, text, True, test=test_set, classes=classes, image_size=size, augment=augment
        )

    def _valid_splits(self, splits: Mapping[str, Any]) -> list[str]:
        """Return the splits that may be validated on, the best first; none: a part of the training split is."""
        if self.valid_split is not None:
            return [] if self.valid_split == self.train_split else [self.valid_split]
        taken = (self.train_split, self.test)
        return [name for name in VALIDATION if name in splits and name not in taken and len(splits[name])]

    def _image_splits(
        self, splits: Mapping[str, Any], train: Any, label: str, classes: list[str], labels: np.ndarray
    ) -> tuple[HubImages, HubImages, str]:
        """Return what to train on, what to validate on, and where that comes from."""
        for name in self._valid_splits(splits):
            valid = chosen_split(splits, self.name, "valid_split", name)
            try:
                valid_labels = class_numbers(valid, label, classes, f"data.valid_split={name}")
            except UserError:
                if self.valid_split is None:
                    continue  # many published test splits have no labels
                raise
            every = np.arange(len(labels)), np.arange(len(valid_labels))
            train_set, valid_set = self._images(train, labels, every[0]), self._images(valid, valid_labels, every[1])
            return train_set, valid_set, f"the dataset's split {name}"
        chosen = held_out(labels, self.valid_fraction)
        train_set, valid_set = (self._images(train, labels, np.flatnonzero(rows)) for rows in (~chosen, chosen))
        return train_set, valid_set, f"{self.valid_fraction:.3g} of each class"

    def _load(self) -> Mapping[str, Any]:
        return load(self.name, self.subset, self.cache_dir)

    def _corpus(self, splits: Mapping[str, Any], key: str, choice: str) -> Corpus:
        dataset = chosen_split(splits, self.name, key, choice)
        name = column(dataset, self.name, "text_column", self.text_column, is_text)
        texts = dataset.select_columns([name])

        def read(rows: Sequence[int]) -> Iterator[str]:
            for batch in texts.select(rows).iter(1000):
                yield from (text or "" for text in batch[name])

        # The fingerprint follows the files' contents or, for local ones, their modification times.
        return Corpus(np.ones(len(texts), dtype=np.int64), read, [self.name, choice, name, dataset._fingerprint])

    def _images(self, dataset: Any, labels: np.ndarray, rows: np.ndarray) -> HubImages:
        from datasets import Image

        name = column(dataset, self.name, "image_column", self.image_column, is_image)
        encoded = dataset.select_columns([name]).cast_column(name, Image(decode=False))
        return HubImages(f"data.name={self.name}", encoded, name, labels, rows)


class HubImages(DecodedImages):
    """Some rows of a dataset."""

    def __init__(self, where: str, encoded: Any, column: str, labels: np.ndarray, rows: np.ndarray) -> None:
        self.where = where
        self.encoded = encoded
        self.column = column
        self.labels = torch.from_numpy(labels[rows])
        self.rows = rows

    @contextmanager
    def open(self, index: int) -> Iterator[Image.Image]:
        from PIL import Image

        row = int(self.rows[index])
        stored = self.encoded[row][self.column]
        damage: tuple[type[Exception], ...] = (*unreadable(), TypeError)  # the last: a row without an image
        try:
            with Image.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])) as image:
                yield image
        except damage as error:
            raise UserError(f"{self.where}: the image of row {row} cannot be decoded ({error})") from error
