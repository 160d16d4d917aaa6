"""``data=hub``: text or images of the Hugging Face hub, or of local files that ``datasets`` opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from recipes.data.images.pixels import DecodedImages, held_out
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.data.text.corpus import READINGS, Corpus, Split, TokenizedText, joint_of, split
from recipes.data.text.tokenizers import hub_reachable
from trainer.data.overlap import check_no_overlap
from trainer.errors import UserError, first_line

VALIDATION = ("validation", "valid", "val", "dev", "test")
"""What datasets call the split to validate on, the best first."""
BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


@dataclass
class Hub(TokenizedText, ImageSource):
    """A dataset by its hub id, or a local folder or file: text for gpt2, images for resnet."""

    kind: ClassVar[str] = "hub"
    name: str = ""
    """A hub id such as ``roneneldan/TinyStories``, a folder, or a parquet, JSON, CSV or text file."""
    subset: str | None = None
    """Configuration of the dataset, if it has several."""
    train_split: str = "train"
    """Split to train on."""
    valid_split: str | None = None
    """Split to validate on; null: validation or test, whichever exists. If neither does, or this names the training
    split, ``valid_fraction`` of the training split is held out. """
    test: str | None = None
    """Test split, evaluated once, at the end, with the best weights."""
    text_column: str | None = None
    """Column of text; null: the only one."""
    image_column: str | None = None
    """Column of images; null: the only one."""
    label_column: str | None = None
    """Column of labels; null: the only one."""
    rows: str = "auto"
    """What the rows of a text dataset are: ``lines`` of one text, which are joined, or ``documents``; auto: what they
    look like."""
    on_error: str = "error"
    """What to do about an image that cannot be decoded. error: save a checkpoint and stop; skip: count it and take the
    next image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise UserError("missing required option: data.name; set a dataset of the hub or a folder, such as ag_news")
        if self.rows not in READINGS:
            raise UserError(f"data.rows={self.rows} is unknown; use data.rows={'|'.join(READINGS)}")
        self._local_path()

    def title(self) -> str:
        """Return the hub id or path."""
        return self.name

    def splits(self) -> tuple[Split, Split]:
        """Return the column of text, of the dataset's own splits or of one that is divided (see ``split``)."""
        self.refuse_augment()
        train = self._corpus("train_split", self.train_split)
        names = self._valid_splits(self._splits)
        if not names:
            return split(train, self.valid_fraction)
        valid = self._corpus("valid_split", names[0])
        return Split.whole(train), Split.whole(valid, f"the dataset's split {names[0]}")

    def test_split(self) -> Split | None:
        """Return the column of text of the split ``test`` names."""
        return None if self.test is None else Split.whole(self._corpus("test", self.test))

    def images(self, image_size: int | None) -> ImageDatasets:
        """Open the images; for None as large as the first one's shorter side, at most 224 pixels.

        Raises:
            UserError: no such dataset, split or column; fewer than two classes; an image without a label.
        """
        splits = self._splits
        train = self._split(splits, "train_split", self.train_split)
        declared = any(map(_is_class, train.features.values()))
        label = self._column(train, "label_column", self.label_column, _is_class if declared else _may_be_class)
        if declared:
            classes = list(train.features[label].names)
        else:
            classes = [str(value) for value in sorted(value for value in train.unique(label) if value is not None)]
        labels = self._labels(train, label, classes, f"data.train_split={self.train_split}")
        train_set, valid_set, origin = self._image_splits(splits, train, label, classes, labels)
        parts = {"training": train_set, "validation": valid_set}
        if self.test is not None:
            held = self._split(splits, "test", self.test)
            parts["test"] = self._images(held, self._labels(held, label, classes, f"data.test={self.test}"))
        size = image_size or min(*train_set.decoded(0)[0].size, 224)
        return self.opened(
            f"{self.name} ({origin})",
            f"data.name={self.name}",
            parts,
            classes,
            size,
            train_set.shorter_side(),
            decodes=True,
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
        if names := self._valid_splits(splits):
            valid = self._split(splits, "valid_split", names[0])
            valid_labels = self._labels(valid, label, classes, f"data.valid_split={names[0]}")
            return self._images(train, labels), self._images(valid, valid_labels), f"the dataset's split {names[0]}"
        chosen = held_out(labels, self.valid_fraction)
        train_set, valid_set = (self._images(train, labels, np.flatnonzero(rows)) for rows in (~chosen, chosen))
        return train_set, valid_set, f"{self.valid_fraction:.3g} of each class"

    def _corpus(self, key: str, choice: str) -> Corpus:
        """Return the column of text of a split. Whether its rows are lines is that of the training split's."""
        joint = self._joint
        note = "each row a document" if joint is None else "rows are lines: joined, without a token between them"
        name, texts = self._texts(key, choice)

        def read(rows: Sequence[int]) -> Iterator[list[str]]:
            for batch in texts.select(rows).iter(1000):
                yield from ([text or ""] for text in batch[name])

        # The fingerprint follows the files' contents or, for local ones, their modification times.
        identity = [self.name, choice, name, self._splits[choice]._fingerprint]
        sizes = np.full(len(texts), max(1, texts.data.nbytes // len(texts)))
        return Corpus(sizes, read, identity, joint, f"{note} (data.rows={self.rows})")

    @cached_property
    def _joint(self) -> str | None:
        name, texts = self._texts("train_split", self.train_split)
        some = np.linspace(0, len(texts) - 1, min(len(texts), 1000)).astype(int).tolist()
        return joint_of(texts[some][name], self.rows)

    def _texts(self, key: str, choice: str) -> tuple[str, Any]:
        """Return the name of the column of text, and the split with this column alone."""
        dataset = self._split(self._splits, key, choice)
        name = self._column(dataset, "text_column", self.text_column, _is_text)
        return name, dataset.select_columns([name])

    def _images(self, dataset: Any, labels: np.ndarray, rows: np.ndarray | None = None) -> HubImages:
        from datasets import Image

        name = self._column(
            dataset, "image_column", self.image_column, lambda feature: type(feature).__name__ == "Image"
        )
        encoded = dataset.select_columns([name]).cast_column(name, Image(decode=False))
        rows = np.arange(len(labels)) if rows is None else rows
        return HubImages(f"data.name={self.name}", encoded, name, labels, rows, self.on_error)

    def _local_path(self) -> Path | None:
        """Return the file or folder that ``name`` means, or None for a hub id."""
        path = Path(self.name).expanduser()
        if path.is_file() and path.suffix not in BUILDERS:
            raise UserError(
                f"data.name={self.name}: the name of a file must end with {', '.join(BUILDERS)}; "
                f"any file of text opens with data=text data.path={self.name}"
            )
        if path.exists():
            return path
        if self.name.startswith(("/", ".", "~")) or self.name.count("/") > 1:
            raise UserError(f"data.name={self.name}: there is no such file or folder")
        return None

    @cached_property
    def _splits(self) -> Mapping[str, Any]:
        """The splits by name. What is local is converted below ``cache_dir``, the hub's in its own cache.

        Raises:
            UserError: there is no such dataset or subset, it cannot be read, or there is no network.
        """
        import datasets

        path = self._local_path()
        arguments: dict[str, Any] = {"path": self.name, "name": self.subset}
        if path:
            arguments |= {"path": str(path), "cache_dir": str(self.cache_folder / "datasets")}
            if path.is_file():
                arguments |= {"path": BUILDERS[path.suffix], "data_files": str(path)}
        offline = path is None and not hub_reachable()
        before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, offline  # else it retries for minutes
        try:
            builder = datasets.load_dataset_builder(**arguments)
            if builder.info.builder_name == "text":  # a file is a document, where the default makes every line one
                builder = datasets.load_dataset_builder(**arguments, sample_by="document")
            builder.download_and_prepare()
            splits: Mapping[str, Any] = builder.as_dataset()
            files: Mapping[str, Any] = builder.config.data_files or {}
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            if offline:
                raise UserError(
                    f"data.name={self.name} is not in the local cache and the Hugging Face hub cannot be reached; "
                    "data=python_docs or data=text data.path=<file> (gpt2) and data=digits (resnet) need no network"
                ) from None
            raise UserError(f"data.name={self.name} cannot be opened: {first_line(error.__cause__ or error)}") from None
        finally:
            datasets.config.HF_HUB_OFFLINE = before
        if self.test is not None:
            self._check_test(splits, files)
        return splits

    def _check_test(self, splits: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        """Raise UserError where ``test`` names a split with another role, or one of the same local files."""
        local = {name: [str(file) for file in own if Path(file).is_file()] for name, own in files.items()}
        used = (self.train_split, *self._valid_splits(splits)[:1])
        for role, other in zip(("training", "validation"), used, strict=False):
            if self.test == other:
                raise UserError(f"data.test={other} is the {role} split; set it to one that is used for nothing else")
            check_no_overlap(f"data.test={self.test}", local.get(str(self.test), []), local.get(other, []), role)

    def _split(self, splits: Mapping[str, Any], key: str, choice: str) -> Any:
        """Return the split that ``key`` names. Raises UserError if it is not there, or empty."""
        if choice not in splits:
            raise UserError(f"data.{key}={choice}: {self.name} has the splits {', '.join(splits)}")
        if not len(splits[choice]):
            raise UserError(f"data.{key}={choice}: this split of {self.name} has no rows")
        return splits[choice]

    def _column(self, dataset: Any, key: str, choice: str | None, fits: Callable[[Any], bool]) -> str:
        """Return the column that ``key`` names, or the only one whose feature ``fits``.

        Raises:
            UserError: no such column, none that fits, or several.
        """
        fitting = [name for name, feature in dataset.features.items() if fits(feature)]
        wanted, every = key.removesuffix("_column"), ", ".join(dataset.features)
        if choice is not None and choice not in fitting:
            why = f"is not of type {wanted}" if choice in dataset.features else "does not exist"
            raise UserError(f"data.{key}={choice}: this column {why}; use {' or '.join(fitting) or every}")
        if not fitting:
            raise UserError(f"data.name={self.name} has no column of type {wanted}; its columns are {every}")
        if choice is None and len(fitting) > 1:
            columns = "|".join(fitting)
            raise UserError(f"data.name={self.name} has several columns of type {wanted}; set data.{key}={columns}")
        return choice or fitting[0]

    def _labels(self, dataset: Any, label: str, classes: list[str], where: str) -> np.ndarray:
        """Return the column as int64 indices into ``classes``. Raises UserError for a row that has none."""
        if label not in dataset.features:
            raise UserError(f"{where}: this split has no column {label}")
        values = dataset[label][:]
        keys = map(str, range(len(classes))) if _is_class(dataset.features[label]) else classes
        known = {key: number for number, key in enumerate(keys)}
        numbers = np.array([known.get(str(value), -1) for value in values], dtype=np.int64)
        if (numbers < 0).any():
            row = int(numbers.argmin())
            raise UserError(
                f"{where}: row {row} has the label {values[row]!r}, none of the {len(classes)} classes; "
                "name a split that has labels, or data.valid_split=train for a part of the training split"
            )
        return numbers


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_class(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def _may_be_class(feature: Any) -> bool:
    return _is_class(feature) or _is_text(feature) or "int" in str(getattr(feature, "dtype", ""))


class HubImages(DecodedImages):
    """Some rows of a dataset."""

    def __init__(
        self, where: str, encoded: Any, column: str, labels: np.ndarray, rows: np.ndarray, on_error: str
    ) -> None:
        super().__init__(torch.from_numpy(labels[rows]), on_error)
        self.where, self.encoded, self.column, self.rows = where, encoded, column, rows

    def stored(self, index: int) -> tuple[Any, str]:
        row = int(self.rows[index])
        stored = self.encoded[row][self.column] or {"path": None, "bytes": b""}  # of a row without an image
        file = stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])
        return file, f"{self.where}: the image of row {row}"
