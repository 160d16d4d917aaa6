"""``data=hub``: text, chats, labelled texts or images of the hub, or of local files that ``datasets`` opens."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from recipes.data.columns import Labels, column_of, has_text, text_columns
from recipes.data.images.pixels import DecodedImages, held_out
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.data.text.chats import TRAIN_ON, WANTED, Chats, chat_columns, open_chats, split_rows, used_columns
from recipes.data.text.corpus import TokenizedText
from recipes.data.text.documents import Text, split
from recipes.data.text.files import NAMES, PART_OF, not_read
from recipes.data.text.labelled import Encoding, LabelledDatasets, LabelledRows, LabelledSource, check_parts, opened
from recipes.data.text.pretrained import local_path, opening
from recipes.data.text.rows import ROWS, empty_line, text_of
from recipes.data.text.stream import Streams, open_or_stream
from recipes.data.text.tokenizers import OWN_BPE
from recipes.data.text.tokens import TokenData, open_or_build
from trainer.errors import UserError, check_choice, first_line, no_effect

BUILDERS = {
    ".arrow": "arrow",
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".tar": "webdataset",
}
TEXT, LABELLED, IMAGES = "text", "labelled texts", "images"
USES = {
    "text_column": (TEXT, LABELLED),
    "pair_column": (LABELLED,),
    "image_column": (IMAGES,),
    "label_column": (LABELLED, IMAGES),
    "rows": (TEXT,),
    "train_on": (TEXT,),
    "packing": (TEXT,),
    "max_tokens": (TEXT,),
    "on_error": (IMAGES,),
}
"""What a recipe may use the rows as, and the options that only some of these uses have."""


@dataclass
class Hub(TokenizedText, ImageSource, LabelledSource):
    """A dataset by its hub id, or a local folder or file: text, chats, images, or labelled texts."""

    kind: ClassVar[str] = "hub"
    name: str = ""
    """A hub id such as ``roneneldan/TinyStories``, perhaps with ``@`` and a revision; a folder; or a parquet, Arrow,
    JSON, CSV or text file."""
    subset: str | None = None
    """Configuration of the dataset, if it has several."""
    train_split: str = "train"
    """Split to train on."""
    valid_split: str | None = None
    """Split to validate on; null: the one called validation, valid or val. Without one, or where this names the
    training split, ``valid_fraction`` of the training split is held out."""
    test: str | None = None
    """Test split, evaluated once, at the end, with the best weights."""
    text_column: str | None = None
    """Column of text; null: chats, where there are columns of them, else the only one."""
    pair_column: str | None = None
    """Column of second texts, for a classifier of pairs."""
    image_column: str | None = None
    """Column of images; null: the only one."""
    label_column: Any = None
    """Column of labels, of any type; null: the only one whose type is ClassLabel, else ``label``. For a text that may
    have several labels a column of lists, or columns of 0 and 1: [toxic, insult]."""
    rows: str = "auto"
    """What the rows of a text dataset are: ``lines`` of one text, which are joined, or ``documents``; auto: lines where
    each ends with its line end and some are blank, as in wikitext."""
    train_on: str = "assistant"
    """Which tokens of chats are predicted: those of the ``assistant``, or ``all``."""
    packing: bool = False
    """Put several short chats into one window, which do not attend to each other."""
    max_tokens: float | None = None
    """Of text, stream so many tokens for training, once, and keep only them: of a dataset that is larger than the disk;
    null: all of it is downloaded."""
    on_error: str = "error"
    """What to do about an image that cannot be decoded. error: save a checkpoint and stop; skip: count it and take the
    next image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise UserError("missing required option: data.name; set a dataset of the hub or a folder, such as ag_news")
        check_choice("data.rows", self.rows, ROWS)
        check_choice("data.train_on", self.train_on, TRAIN_ON)
        if self.max_tokens is not None and not (self.max_tokens >= 1 and self.max_tokens % 1 == 0):
            raise UserError(f"data.max_tokens={self.max_tokens} must be a whole number of tokens, such as 10e9")
        if self.max_tokens is not None and self.tokenizer == "chars":
            problem = "data.tokenizer=chars needs all of the text, and data.max_tokens reads its beginning"
            raise UserError(problem, "data.tokenizer=bytes", "data.tokenizer=bpe")
        self._local_path()

    def title(self) -> str:
        """Return the hub id or path."""
        return self.name

    def tokens(self, tokenizer: str | None) -> TokenData:
        """Tokenise the column of text, or the chats, or open them from the cache.

        Raises:
            UserError: there are neither, a row of the chats is none, or an option has no effect on them.
        """
        self._refuse_options_beside(TEXT)
        if self.max_tokens is not None:
            return self._streamed(tokenizer, int(self.max_tokens))
        features = self._split("train_split", self.train_split).features
        columns = used_columns(self.name, features, self.text_column)
        if not columns:
            self._refuse_chat_options(f"the rows of data.name={self.name} are no chats ({WANTED})")
            return super().tokens(tokenizer)
        if self.rows != "auto":
            raise no_effect(f"data.rows={self.rows}", f"data.name={self.name} has chats ({', '.join(columns)})")
        parts = {part: self._chats(key, choice, columns) for part, (key, choice) in self._parts().items()}
        if "valid" in parts:
            parts["valid"] = replace(parts["valid"], origin=f"the dataset's split {self._valid_split()}")
        elif not self.whole:
            train, valid = split_rows(parts.pop("train"), self.valid_fraction)
            parts = {"train": train, "valid": valid, **parts}
        choice = self.chosen_tokenizer(tokenizer)
        return open_chats(self.cache_folder, self.name, parts, choice, self.train_on, self.packing)

    def _chats(self, key: str, choice: str, columns: tuple[str, ...]) -> Chats:
        dataset = self._split(key, choice)
        if lacks := [name for name in columns if name not in dataset.features]:
            raise UserError(f"data.{key}={choice}: this split has no column {lacks[0]}")
        source = [self.name, choice, columns, dataset._fingerprint]
        rows = np.arange(len(dataset))
        return Chats(dataset.select_columns(list(columns)), f"data.name={self.name}: split {choice}", source, rows)

    def _refuse_options_beside(self, use: str) -> None:
        """Raise UserError for an option that is set, and that this use of the rows has none for."""
        for option in fields(self):
            key, value, uses = f"data.{option.name}", getattr(self, option.name), USES.get(option.name, (use,))
            if use not in uses and value != option.default:
                shown = str(value).lower() if isinstance(value, bool) else value
                raise no_effect(f"{key}={shown}", f"it is for {uses[0]}, and these are {use}", mistake=key)

    def _refuse_chat_options(self, why: str) -> None:
        for mistake, is_set in {"data.train_on=all": self.train_on == "all", "data.packing=true": self.packing}.items():
            if is_set:
                raise no_effect(mistake, why)

    def _streamed(self, tokenizer: str | None, tokens: int) -> TokenData:
        """Return the tokens of the beginning of the text, which is streamed."""
        self._refuse_chat_options("data.max_tokens reads documents, and no chats")
        options = [self.subset, self.train_split, self.valid_split, self.test, self.text_column, self.valid_fraction]
        settings, choice = [*options, self.rows], self.chosen_tokenizer(tokenizer)
        return open_or_stream(self.cache_folder, self.name, settings, choice, tokens, self._streams)

    def _streams(self) -> Streams:
        """Return the splits as they are streamed.

        Raises:
            UserError: no such dataset, split or column, or its rows are no documents.
        """
        from datasets import Dataset

        parts = self._parts()
        splits = {part: self._split(key, choice) for part, (key, choice) in parts.items()}
        head = Dataset.from_list(list(splits["train"].take(1000)), features=splits["train"].features)
        if not len(head):
            raise UserError(f"data.train_split={self.train_split}: this split of {self.name} has no rows")
        if chats := used_columns(self.name, head.features, self.text_column):
            problem = f"data.name={self.name} has chats ({', '.join(chats)}), which are read whole"
            raise UserError(f"{problem}, without data.max_tokens", "", mistake="data.max_tokens")
        column = column_of(self.name, head, "text", self.text_column, has_text)
        if empty_line(head, column, self.rows) is not None:
            problem = f"data.name={self.name}: {column} has lines of one text, and data.max_tokens reads documents"
            raise UserError(problem, "data.rows=documents")
        streams = {part: split.select_columns([column]) for part, split in splits.items()}
        origin, fraction = f"{self.valid_fraction:.3g} of the documents, by their number", self.valid_fraction
        if "valid" in parts:
            origin, fraction = f"the dataset's split {self._valid_split()}", 0.0
        return Streams(streams, column, self.name, origin, fraction)

    def splits(self) -> tuple[Text, Text]:
        """Return the column of text, of the dataset's own splits or of one that is divided (see ``split``)."""
        train, valid = self._text("train_split", self.train_split), self._valid_split()
        if valid is None:
            return split(train, self.valid_fraction)
        return train, replace(self._text("valid_split", valid), origin=f"the dataset's split {valid}")

    def test_split(self) -> Text | None:
        """Return the column of text of the split ``test`` names."""
        return None if self.test is None else self._text("test", self.test)

    def images(self, image_size: int | None) -> ImageDatasets:
        """Open the images; for None as large as the first one's shorter side, at most 224 pixels.

        Raises:
            UserError: no such dataset, split or column; fewer than two classes; an image without a label.
        """
        self._refuse_options_beside(IMAGES)
        train = self._split("train_split", self.train_split)
        self._image_column(train)
        labels = Labels(self.name, train, self.label_column)
        rows, origin = self._labelled(labels)
        parts = {NAMES[part]: self._images(some) for part, some in rows.items()}
        size, side = image_size or min(*parts["training"].decoded(0)[0].size, 224), parts["training"].shorter_side()
        title, where = f"{self.name} ({origin})", f"data.name={self.name}"
        return self.opened(title, where, parts, labels.classes, size, side, decodes=True)

    def labelled(self, encoding: Encoding) -> LabelledDatasets:
        self._refuse_options_beside(LABELLED)
        train = self._split("train_split", self.train_split)
        labels = Labels(self.name, train, self.label_column)
        columns = text_columns(self.name, train, labels.columns, self.text_column, self.pair_column)
        for key, name in self._parts().values():
            features = self._split(key, name).features
            if lacking := [column for column in columns if not has_text(features.get(column))]:
                raise UserError(f"data.{key}={name}: this split has no texts in a column {lacking[0]}")
        parts, origin = self._labelled(labels)
        check_parts(f"data.name={self.name}", parts, labels.classes)
        choice = self.chosen_tokenizer(encoding.pretrained)
        if (tokenizer := choice.known) is None:
            if choice.name != OWN_BPE:
                problem = f"data.tokenizer={choice.name} knows the characters of these texts alone; classify by another"
                raise UserError(problem, "data.tokenizer=bytes", "data.tokenizer=bpe")
            texts = parts["train"].documents([self.name, self.train_split], columns)
            *_, tokenizer = open_or_build(self.cache_folder, self.kind, {"train": texts}, choice)
        return opened(self.name, origin, parts, columns, labels.classes, tokenizer, encoding)

    def _labelled(self, labels: Labels) -> tuple[dict[str, LabelledRows], str]:
        """Return the rows of each part with their labels, and what the validation part is.

        Raises:
            UserError: there is no such split, or a row without a label.
        """
        parts = {}
        for part, (key, choice) in self._parts().items():
            remedy = f"data.valid_split={self.train_split}" if part == "valid" else ""
            split = self._split(key, choice)
            parts[part] = LabelledRows(split, labels.of(split, key, choice, remedy), np.arange(len(split)))
        if "valid" in parts:
            return parts, f"the dataset's split {self._valid_split()}"
        train = parts.pop("train")
        several = train.labels.ndim > 1
        chosen = held_out(np.zeros(len(train.rows)) if several else train.labels.numpy(), self.valid_fraction)
        halves = {"train": train.part(np.flatnonzero(~chosen)), "valid": train.part(np.flatnonzero(chosen))}
        return halves | parts, f"{self.valid_fraction:.3g} of {'all' if several else 'each class'}"

    def _parts(self) -> dict[str, tuple[str, str]]:
        """Return the option and the split of each part: ``train``, and those that have one, ``valid`` and ``test``."""
        named = {"train_split": self.train_split, "valid_split": self._valid_split(), "test": self.test}
        return {key.removesuffix("_split"): (key, name) for key, name in named.items() if name is not None}

    def _valid_split(self) -> str | None:
        """Return the split to validate on; None: a part of the training split is."""
        if self.valid_split is not None:
            return None if self.valid_split == self.train_split else self.valid_split
        names = [name for name in self._splits if PART_OF.get(name) == "valid"]
        others = [name for name in names if name not in (self.train_split, self.test)]
        return next((name for name in others if self._has_rows(name)), None)

    def _has_rows(self, name: str) -> bool:
        """Return whether a split is there, and not empty as far as that is known before it is streamed."""
        return name in self._splits and (self.max_tokens is not None or len(self._splits[name]) > 0)

    def _text(self, key: str, choice: str) -> Text:
        """Return the column of text of a split. Whether its rows are lines is that of the training split's."""
        dataset, column = self._split(key, choice), self._text_column(key, choice)
        return text_of(dataset, column, [self.name, choice], self._empty_line, self.rows)

    @cached_property
    def _empty_line(self) -> str | None:
        """What a row without text stands for, see ``empty_line``."""
        column = self._text_column("train_split", self.train_split)
        return empty_line(self._split("train_split", self.train_split), column, self.rows)

    def _text_column(self, key: str, choice: str) -> str:
        return column_of(self.name, self._split(key, choice), "text", self.text_column, has_text)

    def _image_column(self, dataset: Any) -> str:
        from datasets import Image

        def fits(feature: Any) -> bool:
            return isinstance(feature, Image) or "binary" in str(feature)  # or their bytes, as pandas writes them

        return column_of(self.name, dataset, "image", self.image_column, fits)

    def _images(self, some: LabelledRows) -> HubImages:
        from datasets import Image

        column = self._image_column(some.dataset)
        encoded = some.dataset.select_columns([column]).cast_column(column, Image(decode=False))
        return HubImages(f"data.name={self.name}", encoded, column, some.labels, some.rows, self.on_error)

    def _local_path(self) -> Path | None:
        """Return the file or folder that ``name`` means, or None for a hub id."""
        path = local_path(self.name, f"data.name={self.name}", "give a hub id, or one that exists")
        if path and path.is_file() and path.suffix.lower() not in BUILDERS:
            if error := not_read(f"data.name={self.name}", path):
                raise error
            problem = f"data.name={self.name}: the name of a file must end with {', '.join(BUILDERS)}"
            raise UserError(f"{problem}; other text is read by data=text data.path=…")
        return path

    @cached_property
    def _splits(self) -> Mapping[str, Any]:
        """The splits by name. What is local is converted below ``cache_dir``, the hub's in its own cache.

        Raises:
            UserError: there is no such dataset or subset, it cannot be read, or there is no network.
        """
        import datasets
        from pyarrow import ArrowInvalid

        path = self._local_path()
        file = path if path and path.is_file() else None
        if file and not file.stat().st_size:
            raise UserError(f"data.name={self.name}: the file is empty")
        table = self._table(file) if file and BUILDERS[file.suffix.lower()] == "csv" else {}
        remedy = "repair it" if path else "give an id that opens, or a local file or folder"
        before = datasets.config.HF_HUB_OFFLINE
        with opening(self.name, f"data.name={self.name}", "cannot be opened", remedy) as place:
            arguments: dict[str, Any] = {
                "path": BUILDERS[file.suffix.lower()] if file else place["pretrained_model_name_or_path"],
                "name": self.subset,
                "data_files": file and str(file),
                "cache_dir": str(self.cache_folder / "datasets") if path else None,
                "revision": place["revision"],
                **table,
            }
            datasets.config.HF_HUB_OFFLINE = before or place["local_files_only"]
            try:
                builder = datasets.load_dataset_builder(**arguments)
                if builder.info.builder_name == "text":  # a file is a document, where the default makes every line one
                    builder = datasets.load_dataset_builder(**arguments, sample_by="document")
                if self.max_tokens is not None:
                    return dict(builder.as_streaming_dataset())
                builder.download_and_prepare()
                if not builder.info.dataset_size:
                    raise UserError(f"data.name={self.name} has no rows")
                splits: Mapping[str, Any] = builder.as_dataset()
            except (datasets.exceptions.DatasetGenerationError, UnicodeDecodeError) as error:
                cause = error.__cause__ or error
                if file and isinstance(cause, UnicodeDecodeError):
                    raise UserError(f"data.name={self.name} is not UTF-8 ({cause}); write it anew in it") from error
                if table and isinstance(cause, ArrowInvalid) and not self.text_column:
                    why = f"a column has text after thousands of rows without any ({first_line(cause)})"
                    raise UserError(f"data.name={self.name}: {why}; name the text's: data.text_column=…") from error
                raise cause from None
            finally:
                datasets.config.HF_HUB_OFFLINE = before
        return splits

    def _table(self, file: Path) -> dict[str, Any]:
        """Return how a CSV file is read: its columns of text as such, else their type is that of the first rows.

        Raises:
            UserError: it has one column, of several names.
        """
        separator = "\t" if file.suffix.lower() == ".tsv" else ","
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
            names = next(csv.reader(opened, delimiter=separator), [])
        if len(names) == 1 and any(sign in names[0] for sign in ",;|\t"):
            what = f"its first line {names[0][:60]!r} is one column"
            raise UserError(f"data.name={self.name}: {what}; write commas between columns, or tabs into a file .tsv")
        texts = (self.text_column,) if self.text_column else chat_columns(names)
        return {"sep": separator} | ({"converters": dict.fromkeys(texts, str)} if texts else {})

    def _split(self, key: str, choice: str) -> Any:
        """Return the split that ``key`` names.

        Raises:
            UserError: it is not there, it is empty, or it is the test split with another role.
        """
        if choice not in self._splits:
            problem = f"data.{key}={choice}: {self.name} has the splits {', '.join(self._splits)}"
            raise UserError(problem, *(f"data.{key}={name}" for name in self._splits))
        if not self._has_rows(choice):
            raise UserError(f"data.{key}={choice}: this split of {self.name} has no rows")
        if key != "test" and choice == self.test:
            role = "training" if key == "train_split" else "validation"
            raise UserError(f"data.test={choice} is the {role} split; set it to one that is used for nothing else")
        return self._splits[choice]


class HubImages(DecodedImages):
    """Some rows of a dataset."""

    def __init__(self, where: str, encoded: Any, column: str, labels: Tensor, rows: np.ndarray, on_error: str) -> None:
        super().__init__(labels, on_error)
        self.where, self.encoded, self.column, self.rows = where, encoded, column, rows

    def stored(self, index: int) -> tuple[Any, str]:
        row = int(self.rows[index])
        stored = self.encoded[row][self.column] or {"path": None, "bytes": b""}  # of a row without an image
        file = stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])
        return file, f"{self.where}: the image of row {row}"
