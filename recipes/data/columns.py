"""Which columns of a dataset of ``datasets`` hold texts, images and labels, and the labels as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.display import shortened
from recipes.data.text.chats import WANTED
from trainer.errors import UserError

_WANTED = {
    "text": 'a row has one text, a string, in a column of its own, as {"text": "…"} has, or a chat, for '
    f"recipe=causal_lm: {WANTED}",
    "pair": "the second text of a pair is a string, in a column that is neither the first's nor the label's",
    "image": "name a folder of images with a metadata.csv that has the columns file_name and label; texts with labels "
    "are for recipe=text_classifier",
    "label": "a row has one label, a word or a whole number, in a column of its own, or several, in a column of lists "
    "or in columns of 0 and 1",
}
"""What rows have, by the kind of column that is sought."""


def column_of(name: str, dataset: Any, kind: str, choice: str | None, fits: Callable[[Any], bool]) -> str:
    """Return the column that ``choice`` names, or the only one whose type ``fits``.

    Args:
        name: ``data.name``, for messages.
        dataset: a split.
        kind: text, pair, image or label: what stands before ``_column`` in the option.
        choice: the option's value; None: none is named.
        fits: tells by the type of a column whether it may be this one.

    Raises:
        UserError: no such column, none that fits, or several.
    """
    features = dataset.features
    # Those with underscores are of webdataset itself: a sample's number and its file.
    fitting = [column for column, feature in features.items() if fits(feature) and not column.startswith("__")]
    if choice and choice in fitting:
        return choice
    types = {column: getattr(feature, "dtype", None) or feature for column, feature in features.items()}
    # The texts may be in these, as those of chats are; the only string beside them is rather a number of the row.
    is_nested = kind == "text" and not all(isinstance(dtype, str) for dtype in types.values())
    if choice is None and len(fitting) == 1 and (not is_nested or fitting == ["text"]):
        return fitting[0]
    are = "column is" if len(fitting) == 1 else "columns are"
    wrong = f"{len(fitting) or 'no'} {are}" if choice is None else f"{choice} is not a column"
    columns = shortened([f"{column} ({str(dtype)[:60]})" for column, dtype in types.items()], 20)
    ids = "; input_ids are token ids, which data=tokens reads" if kind == "text" and "input_ids" in features else ""
    raise UserError(
        f"data.name={name}: {wrong} of type {kind}; its columns are {columns}; {_WANTED[kind]}{ids}",
        *(f"data.{kind}_column={column}" for column in fitting[:4]),
    )


def text_columns(name: str, dataset: Any, labels: Sequence[str], first: str | None, second: str | None) -> list[str]:
    """Return the column of labelled texts, or the two of pairs.

    Args:
        name: ``data.name``, for messages.
        dataset: a split.
        labels: its columns of labels.
        first: ``data.text_column``.
        second: ``data.pair_column``.

    Raises:
        UserError: there is none, or it is not clear which.
    """
    others = [column for column in dataset.features if column not in labels]
    texts = [column for column in others if has_text(dataset.features[column])]
    if first is None and len(texts) > 1:
        raise UserError(
            f"data.name={name} has {len(texts)} columns of texts, {shortened(texts, 20)}; name one, or the two of "
            "pairs",
            *(f"data.text_column={column}" for column in texts[:4]),
            f"data.text_column={texts[0]} data.pair_column={texts[1]}",
        )
    dataset = dataset.select_columns(others)
    columns = [column_of(name, dataset, "text", first, has_text)]
    return columns + ([column_of(name, dataset, "pair", second, has_text)] if second else [])


class Labels:
    """The labels of a dataset: in one column, whose rows have one or a list of them, or in columns of 0 and 1.

    Args:
        name: ``data.name``, for messages.
        train: the training split, which has all classes.
        choice: ``data.label_column``.

    Raises:
        UserError: there is no such column, or it has numbers that are no classes.
    """

    def __init__(self, name: str, train: Any, choice: Any) -> None:
        self._train, self.are_flags = train, isinstance(choice, Sequence) and not isinstance(choice, str)
        if self.are_flags:
            self.columns = [*choice]
            flags = [name for name, feature in train.features.items() if _may_be_flag(feature)]
            if wrong := [name for name in choice if name not in flags]:
                columns = shortened([*train.features], 20)
                raise UserError(f"data.label_column: {wrong[0]} is no column of 0 and 1; the columns are {columns}")
            return
        features = {column: _item(feature) for column, feature in train.features.items()}
        named = next((column for column in ("label", "labels") if _may_be_class(features.get(column))), None)
        label = named if choice is None and sum(map(_is_class, features.values())) != 1 else None
        fits = _is_class if choice is None else _may_be_class
        label = label or column_of(name, train, "label", choice, lambda feature: fits(_item(feature)))
        # Whole numbers with gaps are read as fractions, too: of these the gaps are named.
        values = _values(train, label).to_numpy() if "float" in features[label].dtype else np.array([])
        if len(values) and (np.isfinite(values).all() or (values % 1 > 0).any()):
            raise UserError(
                f"data.label_column={label} has fractions, as for a regression, which is not trained here; write "
                "classes as words or whole numbers"
            )
        self.columns = [label]

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes.

        Raises:
            UserError: hardly a value comes twice.
        """
        import pyarrow.compute

        if self.are_flags:
            return self.columns
        (label,), train = self.columns, self._train
        feature = train.features[label]
        if names := getattr(_item(feature), "names", None):
            return list(names)
        values = pyarrow.compute.unique(_values(train, label))
        classes = [str(value) for value in sorted(filter(_is_value, values.to_pylist()))]
        if 1 < len(classes) > len(train) / 2:
            found = f"{len(classes):,} values in {len(train):,} rows, which are no classes"
            raise UserError(f"data.label_column={label} has {found}; name a column whose values come in several rows")
        return classes

    def of(self, split: Any, key: str, choice: str, remedy: str) -> Tensor:
        """Return the labels of a split as int64 indices into ``classes``; where rows have several, bool N × classes.

        Args:
            split: the rows.
            key: the option that names the split, without ``data.``, for messages.
            choice: its value.
            remedy: to the split, where a row of another one than that to train on has no label or an unknown one.

        Raises:
            UserError: a row has none, or another one.
        """
        for column in self.columns:
            if column not in split.features:
                raise UserError(f"data.{key}={choice}: this split has no column {column}")
        if self.are_flags:
            numbers = np.stack([np.array(split[column][:], dtype=float) for column in self.columns], axis=1)
            if (wrong := ~np.isin(numbers, (0, 1))).any():
                row, place = (int(index) for index in np.argwhere(wrong)[0])
                value, column = split[row][self.columns[place]], self.columns[place]
                raise UserError(f"data.{key}={choice}: row {row} has {value} in {column}, which is not 0 or 1")
            return torch.from_numpy(numbers.astype(bool))
        (label,), classes = self.columns, self.classes
        feature = split.features[label]
        keys = map(str, range(len(classes))) if _is_class(_item(feature)) else classes
        known = {key: number for number, key in enumerate(keys)}
        batches = split.select_columns([label]).iter(10_000)  # all at once would be many objects of Python
        values = (value for batch in batches for value in batch[label])
        several = _item(feature) is not feature
        rows = [[value] if value is None else value for value in values] if several else None
        flat = values if rows is None else (value for row in rows for value in row)
        numbers = np.fromiter((known.get(str(value), -1) for value in flat), np.int64)
        row_of = np.arange(len(numbers)) if rows is None else np.repeat(np.arange(len(rows)), [*map(len, rows)])
        if (numbers < 0).any():
            without = np.unique(row_of[numbers < 0])
            row, more = int(without[0]), f" ({len(without):,} of {len(split):,} rows)" * (len(without) > 1)
            value = split[row][label]
            is_gap = not _is_value(value) or value == -1  # as datasets of the hub write it
            what = "no label" if is_gap else f"the label {value!r}, which no row of the training split has"
            problem = f"data.{key}={choice}: row {row} has {what}{more}; leave such rows out"
            if key == "train_split":
                raise UserError(f"{problem}, or name another column of labels")
            raise UserError(f"{problem}, or name another split", remedy, mistake=f"data.{key}={choice}")
        if rows is None:
            return torch.from_numpy(numbers)
        matrix = np.zeros((len(rows), len(classes)), dtype=bool)
        matrix[row_of, numbers] = True
        return torch.from_numpy(matrix)


def has_text(feature: Any) -> bool:
    """Return whether a column of this type has texts."""
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_class(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def _item(feature: Any) -> Any:
    """Return the type of a column, or of the items of its lists."""
    return getattr(feature, "feature", feature)


def _is_value(label: Any) -> bool:
    return label is not None and (not isinstance(label, float) or math.isfinite(label))


def _values(dataset: Any, column: str) -> Any:
    """Return the values of a column, or those in its lists, as pyarrow has them."""
    import pyarrow.compute

    values, feature = dataset.data.column(column), dataset.features[column]
    return values if _item(feature) is feature else pyarrow.compute.list_flatten(values)


def _may_be_flag(feature: Any) -> bool:
    return any(name in str(getattr(feature, "dtype", "")) for name in ("int", "bool"))


def _may_be_class(feature: Any) -> bool:
    return any(name in str(getattr(feature, "dtype", "")) for name in ("int", "float", "bool", "string"))
