"""``data=hub``: text, chats or images of the Hugging Face hub, or of local files that ``datasets`` opens."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from mantissa.display import shortened
from recipes.data.images.pixels import DecodedImages, held_out
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.data.text.chats import FORMS, OPTIONAL, TRAIN_ON, WANTED, Chats, chat_columns, open_chats, split_rows
from recipes.data.text.chats import Options as ChatOptions
from recipes.data.text.corpus import TokenizedText
from recipes.data.text.documents import Rows, Text, split
from recipes.data.text.files import encoding_of, is_text, not_read, typed
from recipes.data.text.labelled import Encoding, LabelledDatasets, LabelledSource, Part, check_parts, opened
from recipes.data.text.pretrained import local_path, open_tokenizer, opening
from recipes.data.text.stream import Streams, open_or_stream
from recipes.data.text.tokenizers import OWN_BPE
from recipes.data.text.tokens import TokenData, open_or_build
from trainer.errors import UserError, check_choice, first_line

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
_SNIFFED = 1 << 16
"""Characters of a table by which its form is found."""
_LEAST = 1000
"""Characters of a column that is worth naming as the text: of fewer nothing is left to validate on."""
_BYTES_AT_ONCE = 1 << 24
"""What is read of a table at a time, about: its rows may be books."""
ROWS = ("auto", "lines", "documents")
"""What the rows of a text dataset are; auto: see ``are_lines``."""
_WANTED = {
    "text": 'a row has one text, a string (no tokens, no numbers), in a column of its own, as {"text": "…"} has',
    "pair": "the second text of a pair is a string, in a column that is neither the first's nor the label's",
    "image": "name a folder of images with a metadata.csv that has the columns file_name and label",
    "label": "a row has one label, a word or a number, in a column of its own; a text may have several, in a column of "
    "lists or in columns of 0 and 1: data.label_column=[…,…]",
}
"""What rows have, by the kind of column that is sought."""


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
    """Split to validate on; null: validation or test, whichever exists. If neither does, or this names the training
    split, ``valid_fraction`` of the training split is held out. """
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
        if self.max_tokens is not None:
            return self._streamed(tokenizer, int(self.max_tokens))
        columns = self._chat_columns
        if not columns:
            self._refuse_chat_options()
            return super().tokens(tokenizer)
        if self.rows != "auto":
            mistake = f"data.rows={self.rows}"
            problem = f"{mistake} has no effect: data.name={self.name} has chats ({', '.join(columns)})"
            raise UserError(problem, "", mistake=mistake)
        train, valid = self._chats("train_split", self.train_split, columns), self._valid_split()
        if self.whole and valid is None:
            parts = {"train": train}
        elif valid is None:
            parts = dict(zip(("train", "valid"), split_rows(train, self.valid_fraction), strict=True))
        else:
            chats = self._chats("valid_split", valid, columns)
            parts = {"train": train, "valid": replace(chats, origin=f"the dataset's split {valid}")}
        if self.test is not None:
            parts["test"] = self._chats("test", self.test, columns)
        how = (self.known_tokenizer(tokenizer), self.tokenizer, self.vocab_size, self.train_on, self.packing)
        return open_chats(self.cache_folder, self.title(), parts, ChatOptions(*how))

    @cached_property
    def _chat_columns(self) -> tuple[str, ...]:
        """The columns that make the rows chats; empty: they are none, or a column of text is named.

        Raises:
            UserError: one column of a chat is named, or they are pairs of a better and a worse answer.
        """
        features = self._split("train_split", self.train_split).features
        columns = chat_columns(features)
        if self.text_column is None:
            if not columns and {"chosen", "rejected"} <= features.keys():
                raise UserError(
                    f"data.name={self.name} has pairs of answers, chosen and rejected, which are not trained on"
                )
            return columns
        chat = next((form for form in FORMS[2:] if all(name in features for name in form)), ())
        if self.text_column in (*chat, *OPTIONAL.get(chat[0] if chat else "", ())):
            mistake = typed("data.text_column", self.text_column)
            problem = f"data.text_column={self.text_column} is one column of chats ({', '.join(chat)})"
            raise UserError(f"{problem}, which are trained on as a whole", "", mistake=mistake)
        return ()

    def _chats(self, key: str, choice: str, columns: tuple[str, ...]) -> Chats:
        dataset = self._split(key, choice)
        if lacks := [name for name in columns if name not in dataset.features]:
            raise UserError(f"data.{key}={choice}: this split has no column {lacks[0]}")
        source = [self.name, choice, columns, dataset._fingerprint]
        rows = np.arange(len(dataset))
        return Chats(dataset.select_columns(list(columns)), f"data.name={self.name}: split {choice}", source, rows)

    def _refuse_chat_options(self) -> None:
        """Raise UserError for an option that is set, and that rows of text or images have no use for."""
        for mistake, is_set in {"data.train_on=all": self.train_on == "all", "data.packing=true": self.packing}.items():
            if is_set:
                problem = f"{mistake} has no effect: the rows of data.name={self.name} are no chats ({WANTED})"
                raise UserError(problem, "", mistake=mistake)

    def _streamed(self, tokenizer: str | None, tokens: int) -> TokenData:
        """Return the tokens of the beginning of the text, which is streamed."""
        options = [self.subset, self.train_split, self.valid_split, self.test, self.text_column, self.valid_fraction]
        settings, known = [*options, self.rows], self.known_tokenizer(tokenizer)
        return open_or_stream(self.cache_folder, self.name, settings, known, self.vocab_size, tokens, self._streams)

    def _streams(self) -> Streams:
        """Return the splits as they are streamed.

        Raises:
            UserError: no such dataset, split or column, or its rows are no documents.
        """
        from datasets import Dataset

        valid = self._valid_split()
        named = {"train": self.train_split, "valid": valid, "test": self.test}
        keys = {"train": "train_split", "valid": "valid_split", "test": "test"}
        splits = {part: self._split(keys[part], choice) for part, choice in named.items() if choice is not None}
        head = Dataset.from_list(list(splits["train"].take(1000)), features=splits["train"].features)
        if not len(head):
            raise UserError(f"data.train_split={self.train_split}: this split of {self.name} has no rows")
        if chats := [name for name in ("messages", "conversations") if name in head.features and not self.text_column]:
            problem = f"data.name={self.name} has chats ({chats[0]}), which are read whole, without data.max_tokens"
            raise UserError(problem, "", mistake="data.max_tokens")
        column = self._column(head, "text_column", _is_text)
        if self.rows == "lines" or (self.rows == "auto" and are_lines(head[column][:])):
            problem = f"data.name={self.name}: {column} has lines of one text, and data.max_tokens reads documents"
            raise UserError(problem, "data.rows=documents")
        streams = {part: split.select_columns([column]) for part, split in splits.items()}
        if valid is not None:
            return Streams(streams, column, self.name, f"the dataset's split {valid}", 0.0)
        origin = f"{self.valid_fraction:.3g} of the documents, by their number"
        return Streams(streams, column, self.name, origin, self.valid_fraction)

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
        if self.max_tokens is not None:
            mistake = f"data.max_tokens={self.max_tokens:g}"
            raise UserError(f"{mistake} is of text, and has no effect on images", "", mistake="data.max_tokens")
        train, valid = self._split("train_split", self.train_split), self._valid_split()
        self._refuse_chat_options()
        self._image_column(train)
        label = self._labels_column(train)
        classes = label if isinstance(label, list) else _classes(train, label)
        labels = self._labels("train_split", self.train_split, label, classes)
        parts, origin = {"training": self._images(train, labels)}, f"the dataset's split {valid}"
        if valid is None:
            several = labels.ndim > 1
            chosen = held_out(np.zeros(len(labels)) if several else labels, self.valid_fraction)
            origin = f"{self.valid_fraction:.3g} of {'all' if several else 'each class'}"
            parts["training"] = self._images(train, labels, np.flatnonzero(~chosen))
            parts["validation"] = self._images(train, labels, np.flatnonzero(chosen))
        for part, key, choice in (("validation", "valid_split", valid), ("test", "test", self.test)):
            if choice is not None:
                parts[part] = self._images(self._split(key, choice), self._labels(key, choice, label, classes))
        size = image_size or min(*parts["training"].decoded(0)[0].size, 224)
        return self.opened(
            f"{self.name} ({origin})",
            f"data.name={self.name}",
            parts,
            classes,
            size,
            parts["training"].shorter_side(),
            decodes=True,
        )

    def labelled(self, encoding: Encoding) -> LabelledDatasets:
        train, valid = self._split("train_split", self.train_split), self._valid_split()
        label = self._labels_column(train)
        columns = self._text_columns(train, label)
        classes = label if isinstance(label, list) else _classes(train, label)
        labels = torch.from_numpy(self._labels("train_split", self.train_split, label, classes))
        several = labels.dtype == torch.bool
        parts, origin = {"train": Part(train, labels, np.arange(len(train)))}, f"the dataset's split {valid}"
        if valid is None:
            chosen = held_out(np.zeros(len(train)) if several else labels.numpy(), self.valid_fraction)
            whole, origin = parts["train"], f"{self.valid_fraction:.3g} of {'all' if several else 'each class'}"
            parts = {"train": whole.part(np.flatnonzero(~chosen)), "valid": whole.part(np.flatnonzero(chosen))}
        for part, key, choice in (("valid", "valid_split", valid), ("test", "test", self.test)):
            if choice is None:
                continue
            split = self._split(key, choice)
            if lacking := [name for name in columns if not _is_text(split.features.get(name))]:
                raise UserError(f"data.{key}={choice}: this split has no texts in a column {lacking[0]}")
            labels = torch.from_numpy(self._labels(key, choice, label, classes))
            parts[part] = Part(split, labels, np.arange(len(split)))
        check_parts(f"data.name={self.name}", parts, classes)
        if encoding.pretrained:
            tokenizer = open_tokenizer(encoding.pretrained, f"init_from={encoding.pretrained}")
        elif self.tokenizer == OWN_BPE:
            texts = parts["train"].documents([self.name, self.train_split], columns)
            how = (None, OWN_BPE, self.vocab_size)
            *_, tokenizer = open_or_build(self.cache_folder, self.kind, {"train": texts}, *how)
        else:
            tokenizer = open_tokenizer(self.tokenizer, f"data.tokenizer={self.tokenizer}")
        return opened(self.name, origin, parts, columns, classes, tokenizer, encoding)

    def _valid_split(self) -> str | None:
        """Return the split to validate on; None: a part of the training split is."""
        if self.valid_split is not None:
            return None if self.valid_split == self.train_split else self.valid_split
        names = [name for name in ("validation", "test") if name not in (self.train_split, self.test)]
        return next((name for name in names if self._has_rows(name)), None)

    def _has_rows(self, name: str) -> bool:
        """Return whether a split is there, and not empty as far as that is known before it is streamed."""
        return name in self._splits and (self.max_tokens is not None or len(self._splits[name]) > 0)

    def _text(self, key: str, choice: str) -> Text:
        """Return the column of text of a split. Whether its rows are lines is that of the training split's."""
        empty, (name, column) = self._empty_line, self._text_column(key, choice)
        # The fingerprint follows the files' contents or, for local ones, their modification times.
        source = [self.name, choice, name, self._splits[choice]._fingerprint, empty]
        size = max(len(column), column.data.nbytes)
        first = f"column {name}, which begins with {(column[0][name] or '')[:30]!r}"
        if empty is not None:
            note = f"{first}; rows are lines: joined, without a token between them (data.rows={self.rows})"
            text = JoinedRows(column, name, empty)
            return Text(np.array([size]), lambda _: iter([text]), source, range(1), note=note)

        if none := column.data.column(name).null_count:
            first += f", {none:,} of {len(column):,} rows are empty or a word for it, such as NA, and left out"

        average = size // len(column)
        at_once = max(1, min(1000, _BYTES_AT_ONCE // average))

        def read(rows: Rows) -> Iterator[list[str]]:
            for first in range(0, len(rows), at_once):  # select() would copy the numbers of all rows
                texts = column[rows[first : first + at_once]][name]
                yield from ((text or "").splitlines(keepends=True) for text in texts)

        sizes = np.broadcast_to(np.int64(average), len(column))
        note = f"{first}; each row a document (data.rows={self.rows})"
        return Text(sizes, read, source, range(len(column)), note=note)

    @cached_property
    def _empty_line(self) -> str | None:
        """What a row without text stands for: a blank line, or nothing where rows bring line ends; None: rows are no
        lines, but documents.
        """
        name, column = self._text_column("train_split", self.train_split)
        some = np.linspace(0, len(column) - 1, min(len(column), 1000)).astype(int).tolist()
        rows = column[some][name]
        if self.rows == "documents" or (self.rows == "auto" and not are_lines(rows)):
            return None
        return "" if any((row or "").endswith("\n") for row in rows) else "\n"

    def _text_column(self, key: str, choice: str) -> tuple[str, Any]:
        """Return the name of the column of text, and the split with this column alone."""
        dataset = self._split(key, choice)
        name = self._column(dataset, "text_column", _is_text)
        return name, dataset.select_columns([name])

    def _image_column(self, dataset: Any) -> str:
        from datasets import Image

        # Or their bytes, as pandas writes them.
        return self._column(dataset, "image_column", lambda each: isinstance(each, Image) or "binary" in str(each))

    def _images(self, dataset: Any, labels: np.ndarray, rows: np.ndarray | None = None) -> HubImages:
        from datasets import Image

        name = self._image_column(dataset)
        encoded = dataset.select_columns([name]).cast_column(name, Image(decode=False))
        rows = np.arange(len(labels)) if rows is None else rows
        return HubImages(f"data.name={self.name}", encoded, name, labels, rows, self.on_error)

    def _local_path(self) -> Path | None:
        """Return the file or folder that ``name`` means, or None for a hub id."""
        path = local_path(self.name, f"data.name={self.name}", "give a hub id, or one that exists")
        if path and path.is_file() and path.suffix.lower() not in BUILDERS:
            if error := not_read(f"data.name={self.name}", path):
                raise error
            problem = f"data.name={self.name}: the name of a file must end with {', '.join(BUILDERS)}"
            remedies = [f"data=text {typed('data.path', self.name)}"] if is_text(path) else []
            raise UserError(problem, *remedies, mistake=typed("data.name", self.name))
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
        table = table_options(file) if file and BUILDERS[file.suffix.lower()] == "csv" else {}
        if file and table:  # else the type of a column is that of the first rows
            names = (self.text_column,) if self.text_column else chat_columns(header(file, table["sep"]))
            table |= {"converters": dict.fromkeys(names, str)} if names else {}
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
                    what = encoding_of(file) or "no text"
                    raise UserError(f"data.name={self.name} is {what}; write it anew in UTF-8") from error
                if table and isinstance(cause, ArrowInvalid) and not self.text_column:
                    why = f"a column has text after thousands of rows without any ({first_line(cause)})"
                    raise UserError(f"data.name={self.name}: {why}; name the text's: data.text_column=…") from error
                raise cause from None
            finally:
                datasets.config.HF_HUB_OFFLINE = before
        return splits

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

    def _column(self, dataset: Any, key: str, fits: Callable[[Any], bool]) -> str:
        """Return the column that ``key`` names, or the only one whose type ``fits``.

        Raises:
            UserError: no such column, none that fits, or several.
        """
        choice: str | None = getattr(self, key)
        features = dataset.features
        # Those with underscores are of webdataset itself: a sample's number and its file.
        fitting = [name for name, feature in features.items() if fits(feature) and not name.startswith("__")]
        kind = key.removesuffix("_column")
        if choice and choice in fitting:
            return choice
        items = {name: getattr(feature, "feature", None) for name, feature in features.items() if kind == "text"}
        texts = {"content", "context", "value"}  # of turns in a chat, of paragraphs
        lists = [name for name, item in items.items() if isinstance(item, dict) and texts & item.keys()]
        types = {name: getattr(feature, "dtype", None) or feature for name, feature in features.items()}
        # {"version": …, "data": [{…}, …]} is read as a single row.
        is_one_row = self.name.endswith(".json") and len(dataset) == 1
        is_nested = is_one_row and not all(isinstance(dtype, str) for dtype in types.values())
        if choice is None and len(fitting) == 1 and (not (lists or is_nested) or fitting == ["text"]):
            return fitting[0]
        if choice is None and kind == "label" and not fitting and _may_be_class(features.get("label")):
            return "label"
        are = "column is" if len(fitting) == 1 else "columns are"
        wrong = f"{len(fitting) or 'no'} {are}" if choice is None else f"{choice} is not a column"
        columns = shortened([f"{name} ({str(dtype)[:60]})" for name, dtype in types.items()], 20)
        parts = [f"data.name={self.name}: {wrong} of type {kind}; its columns are {columns}"]
        chats = chat_columns(features)
        whole = "chats: leave data.text_column out" if choice else "chats"
        parts += [f"{name} has {whole if name in chats else 'texts in lists'}" for name in lists]
        parts += [WANTED] * (kind == "text" and choice is None and not chats)
        parts += ["all is in one row: rows below a key are not read, write one row each"] * is_nested
        if kind == "text" and "input_ids" in features:
            what = f"{parts[0]}; input_ids are token ids"
            if self._local_path():
                remedy = f"data=tokens {typed('data.path', self.name)}"
                raise UserError(what, remedy, mistake=typed("data.name", self.name))
            raise UserError(f"{what}: download its parquet files, and read them with data=tokens data.path=…")
        # A text of a few words, such as a version, trains nothing.
        named = [name for name in fitting if kind != "text" or _characters(dataset, name) >= _LEAST]
        remedies = [typed(f"data.{key}", name) for name in named if not is_nested]
        remedies = remedies or (_label_columns(dataset) if kind == "label" else [])
        raise UserError("; ".join([*parts, _WANTED[kind]]), *remedies)

    def _labels_column(self, dataset: Any) -> str | list[str]:
        """Return the column of labels; or several, of 0 and 1.

        Raises:
            UserError: there is none, or it has numbers that are no classes.
        """
        if isinstance(self.label_column, Sequence) and not isinstance(self.label_column, str):
            for name in self.label_column:
                if not any(kind in str(getattr(dataset.features.get(name), "dtype", "")) for kind in ("int", "bool")):
                    columns = shortened([*dataset.features], 20)
                    raise UserError(f"data.label_column: {name} is no column of 0 and 1; the columns are {columns}")
            return [*self.label_column]
        features = {name: _item(feature) for name, feature in dataset.features.items()}
        named = next((name for name in ("label", "labels") if _may_be_class(features.get(name))), None)
        label = named if self.label_column is None and sum(map(_is_class, features.values())) != 1 else None
        fits = _is_class if self.label_column is None else _may_be_class
        label = label or self._column(dataset, "label_column", lambda feature: fits(_item(feature)))
        if "float" in features[label].dtype:
            raise UserError(
                f"data.label_column={label} has fractions, as for a regression, which is not trained here; write "
                "classes as words or whole numbers"
            )
        return label

    def _text_columns(self, dataset: Any, label: str | list[str]) -> list[str]:
        """Return the column of texts, or the two of pairs.

        Raises:
            UserError: there is none, or it is not clear which.
        """
        others = [name for name in dataset.features if name not in ([label] if isinstance(label, str) else label)]
        texts = [name for name in others if _is_text(dataset.features[name])]
        if self.text_column is None and len(texts) > 1:
            first, second, *_ = texts
            raise UserError(
                f"data.name={self.name} has {len(texts)} columns of texts, {shortened(texts, 20)}; name one, or the "
                "two of pairs",
                *(f"data.text_column={name}" for name in texts[:4]),
                f"data.text_column={first} data.pair_column={second}",
            )
        dataset = dataset.select_columns(others)
        columns = [self._column(dataset, "text_column", _is_text)]
        return columns + ([self._column(dataset, "pair_column", _is_text)] if self.pair_column else [])

    def _labels(self, key: str, choice: str, label: str | list[str], classes: list[str]) -> np.ndarray:
        """Return the labels of a split as int64 indices into ``classes``; where rows have several, bool N × classes.

        Raises:
            UserError: a row has none, or another one.
        """
        dataset = self._split(key, choice)
        for name in [label] if isinstance(label, str) else label:
            if name not in dataset.features:
                raise UserError(f"data.{key}={choice}: this split has no column {name}")
        if isinstance(label, list):
            numbers = np.stack([np.array(dataset[name][:], dtype=float) for name in label], axis=1)
            if (wrong := ~np.isin(numbers, (0, 1))).any():
                row, column = (int(place) for place in np.argwhere(wrong)[0])
                value = dataset[row][label[column]]
                raise UserError(f"data.{key}={choice}: row {row} has {value} in {label[column]}, which is not 0 or 1")
            return numbers.astype(bool)
        feature = dataset.features[label]
        keys = map(str, range(len(classes))) if _is_class(_item(feature)) else classes
        known = {key: number for number, key in enumerate(keys)}
        batches = dataset.select_columns([label]).iter(10_000)  # all at once would be many objects of Python
        values = (value for batch in batches for value in batch[label])
        several = _item(feature) is not feature
        rows = [[value] if value is None else value for value in values] if several else None
        flat = values if rows is None else (value for row in rows for value in row)
        numbers = np.fromiter((known.get(str(value), -1) for value in flat), np.int64)
        row_of = np.arange(len(numbers)) if rows is None else np.repeat(np.arange(len(rows)), [*map(len, rows)])
        if (numbers < 0).any():
            without = np.unique(row_of[numbers < 0])
            row, more = int(without[0]), f" ({len(without):,} of {len(dataset):,} rows)" * (len(without) > 1)
            problem = (
                f"data.{key}={choice}: row {row} has the label {dataset[row][label]!r}, none of the {len(classes)} "
                f"classes{more}"
            )
            if key == "train_split":
                raise UserError(f"{problem}; leave such rows out, or name another column of labels")
            remedies = [f"data.valid_split={self.train_split}"] if key == "valid_split" else [""]
            raise UserError(f"{problem}; name a split that has labels", *remedies, mistake=f"data.{key}={choice}")
        if rows is None:
            return numbers
        matrix = np.zeros((len(rows), len(classes)), dtype=bool)
        matrix[row_of, numbers] = True
        return matrix


def table_options(path: Path) -> dict[str, Any]:
    """Return how ``datasets`` reads a CSV file: its separator, and names for columns where it has none.

    The separator cuts all rows into the same number of columns, two or more; between tabs a quote that does not end
    is a letter. The first row is data where it has a number, or a value that its column has again.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = file.read(_SNIFFED).splitlines(keepends=True)
        whole = not file.read(1)
    for separator, quoted in ((",", True), ("\t", False), ("\t", True), (";", True), ("|", True)):
        rows = list(filter(None, csv.reader(lines, delimiter=separator, quoting=0 if quoted else 3)))
        names, *rows = (rows if whole else rows[:-1]) or [[]]
        letters = any(cell[:1] == '"' and cell.count('"') == 1 for row in rows for cell in row)
        if len(names) > 1 and all(len(row) == len(names) for row in rows) and (letters or quoted):
            break
    else:
        return {"sep": "\t"} if path.suffix == ".tsv" else {}
    cells = [(name, column) for name, *column in zip(names, *rows, strict=True) if name]
    has_names = not any(_is_number(name) or name in column for name, column in cells)
    columns = {} if has_names else {"column_names": [f"column_{number + 1}" for number in range(len(names))]}
    return {"sep": separator, **columns} | ({} if quoted else {"quoting": csv.QUOTE_NONE})


def header(path: Path, separator: str) -> dict[str, None]:
    """Return the names in the first row of a CSV file."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return dict.fromkeys(next(csv.reader(file, delimiter=separator), []))


def are_lines(rows: Sequence[str | None]) -> bool:
    """Return whether rows are lines of longer texts: nearly all end with their only line end, and some are blank.

    Joined, they are the text, as the files of wikitext are. All others are documents.
    """
    filled = [row for row in rows if row and row.strip()]
    lines = sum(row.find("\n") == len(row) - 1 for row in filled)
    blank = sum(row is not None and not row.strip() for row in rows)
    return lines >= 0.95 * len(filled) and blank >= max(3, len(rows) / 100)


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _characters(dataset: Any, name: str) -> int:
    import pyarrow.compute

    return pyarrow.compute.sum(pyarrow.compute.utf8_length(dataset.data.column(name))).as_py() or 0


def _is_number(text: str) -> bool:
    return text.strip().lstrip("+-").replace(".", "", 1).isdecimal()


def _is_class(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def _item(feature: Any) -> Any:
    """Return the type of a column, or of the items of its lists."""
    return getattr(feature, "feature", feature)


def _classes(dataset: Any, label: str) -> list[str]:
    """Return the names of the classes in a column of labels, or of lists of them.

    Raises:
        UserError: hardly a value comes twice.
    """
    import pyarrow.compute

    feature = dataset.features[label]
    if names := getattr(_item(feature), "names", None):
        return list(names)
    column = dataset.data.column(label)
    values = pyarrow.compute.unique(column if _item(feature) is feature else pyarrow.compute.list_flatten(column))
    classes = [str(value) for value in sorted(filter(_is_value, values.to_pylist()))]
    if 1 < len(classes) > len(dataset) / 2:
        found = f"{len(classes):,} values in {len(dataset):,} rows"
        raise UserError(f"data.label_column={label} has {found}, which are no classes", *_label_columns(dataset))
    return classes


def _is_value(label: Any) -> bool:
    return label is not None and (not isinstance(label, float) or math.isfinite(label))


def _label_columns(dataset: Any) -> list[str]:
    """Return the overrides that name a column whose values repeat, so that they may be classes."""
    names = [name for name, feature in dataset.features.items() if _may_be_class(feature) and not name.startswith("__")]
    counts = {name: len(dataset.unique(name)) for name in names}
    return [typed("data.label_column", name) for name, count in counts.items() if 2 <= count <= len(dataset) / 2]


def _may_be_class(feature: Any) -> bool:
    return any(name in str(getattr(feature, "dtype", "")) for name in ("int", "float", "bool", "string"))


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


@dataclass(frozen=True)
class JoinedRows:
    """Rows that are lines of one text, which can be read again."""

    column: Any
    """The dataset with the column of text alone."""
    name: str
    """The name of the column."""
    empty: str
    """What a row without text stands for."""

    def __iter__(self) -> Iterator[str]:
        """Yield the rows with their line ends."""
        for batch in self.column.iter(1000):
            for row in batch[self.name]:
                yield row if row and row.endswith("\n") else f"{row}\n" if row else self.empty
