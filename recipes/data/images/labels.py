"""A table of the names and labels of images, beside their folder: a CSV or TSV file, or JSON lines."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.display import counted, shortened
from recipes.data.text.files import encoding_of, typed
from trainer.errors import UserError, nearest

log = logging.getLogger("mantissa")

TABLES = (".csv", ".tsv", ".jsonl")
WANTED = (
    "a table has one line an image: its name in one column, and in another its label (data.label_column), several "
    "labels (with data.label_separator), or a column of 0 and 1 for each label"
)
_LABEL = ("label", "labels", "class")
_OFF, _ON = ("0", "0.0", "false"), ("1", "1.0", "true")
"""What the columns of one label each say, in lower case."""
_LOOKED_AT = 1000
"""Values of a column among which a name of an image is looked for."""


@dataclass(frozen=True)
class Labelled:
    """Images that have a line in a table, in the order of its lines."""

    files: list[str]
    classes: list[str]
    labels: Tensor
    """int64, one for each image; of several labels bool, images × classes."""
    splits: list[str] | None
    """What the column ``split`` says of each image; None: there is no such column."""
    note: str
    """How the table was read, in words."""


def read(
    path: Path,
    given: str,
    folder: str,
    images: Sequence[str],
    file: str | None = None,
    label: str | list[str] | None = None,
    separator: str | None = None,
) -> Labelled:
    """Read the labels of images.

    The column of names is the one with a value that names an image; of several such ones that with no value twice. The
    labels are in the only other column, in the only one that is called label, labels or class, or in all others, where
    these have only 0 and 1.

    Args:
        path: of the table.
        given: the option that names it, for messages.
        folder: of the images.
        images: those in the folder.
        file: column of names; None: see above.
        label: column of labels, or columns of one label each; None: see above.
        separator: of several labels in one cell; None: it has one, or is a list.

    Raises:
        UserError: the table cannot be read, its columns cannot be told apart, a name has no image or several, an image
            has two lines that disagree, or the labels are no classes.
    """
    table = _Table(given, *(_json_lines if path.suffix.lower() == ".jsonl" else _separated)(path, given))
    find = _Names(folder, path.parent, images)
    column = table.file_column(find, file)
    if find(column):  # the first line is no heading
        column = table.without_heading(column)
    split = next((name for name in table.columns if name.lower() == "split" and name != column), None)
    label = table.label_columns({column, split}, label)
    if isinstance(label, list):
        if separator is not None:
            problem = "data.label_separator has no effect on columns of 0 and 1"
            raise UserError(f"{given}: {problem}", "", mistake="data.label_separator")
        labels, classes = table.flags(label), label
    else:
        labels, classes = table.labels(label, separator)
    rows, files = table.rows_of(column, find, labels, folder)
    of_labels = label if isinstance(label, list) else [label]
    unused = [name for name in table.columns if name not in (column, split, *of_labels)]
    twice, without, labels = len(labels) - len(rows), len(images) - len(rows), labels[rows]
    empty = int((~labels.any(1)).sum()) if labels.ndim > 1 else 0
    notes = [
        f"names in column {column}, labels in {shortened(of_labels)}",
        f"not used: {shortened(unused)}" * bool(unused),
        f"{counted(twice, 'line')} twice" * bool(twice),
        f"{counted(without, 'image')} without a line left out" * bool(without),
        f"{counted(empty, 'image')} without a label" * bool(empty),
    ]
    splits = None if split is None else [table.columns[split][row] for row in rows]
    return Labelled(files, classes, labels, splits, ", ".join(filter(None, notes)))


class _Table:
    """Columns of a table: text, or lists of texts. Without a name of its own a column is called ``column_2``.

    Args:
        given: the option that names it, for messages.
        heading: the names of the columns.
        rows: the cells, each of a row.
        lines: the number of each row's line in the file.
    """

    def __init__(self, given: str, heading: list[str], rows: Sequence[Sequence[Any]], lines: list[int]) -> None:
        self.given, self.heading, self.lines = given, heading, lines
        if not lines:
            raise UserError(f"{given} has no rows; {WANTED}")
        own = [name if name and heading.count(name) == 1 else "" for name in heading]
        names = [name or f"column_{number}" for number, name in enumerate(own, 1)]
        self.columns: dict[str, list[Any]] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

    def without_heading(self, column: str) -> str:
        """Make a row of the heading; return the new name of a column."""
        place = [*self.columns].index(column)
        cells = zip(self.heading, self.columns.values(), strict=True)
        self.columns = {f"column_{number}": [name, *rest] for number, (name, rest) in enumerate(cells, 1)}
        self.lines = [1, *self.lines]
        return f"column_{place + 1}"

    def error(self, problem: str, key: str = "", names: Iterable[str] = ()) -> UserError:
        """Return what is wrong; ``names`` are columns that the option ``key`` may have."""
        return UserError(f"{self.given}: {problem}", *(typed(key, name) for name in names))

    def known(self, key: str, name: str) -> str:
        """Return the name of a column. Raises UserError where there is none."""
        if name not in self.columns:
            near = nearest(name, self.columns)
            raise self.error(f"{key}={name} is not one of its columns{near} ({shortened([*self.columns], 20)})")
        return name

    def file_column(self, find: _Names, chosen: str | None) -> str:
        """Return the column of names."""
        if chosen is not None:
            return self.known("data.file_column", chosen)
        named = [
            name
            for name, cells in self.columns.items()
            if any(map(find, islice({cell: None for cell in cells if isinstance(cell, str)}, _LOOKED_AT)))
        ]
        single = [name for name in named if len({*map(str, self.columns[name])}) == len(self.lines)]
        if len(named) > 1 and len(single) != 1:
            problem = f"the columns {shortened(named)} all have names of images"
            raise self.error(problem, "data.file_column", named)
        if not named:
            first = ", ".join(f"{name} ({str(cells[0])[:30]})" for name, cells in self.columns.items())
            columns = f"columns with their first value: {first:.400}"
            raise self.error(f"no column has a name of an image in data.path ({find.some}); {columns}; {WANTED}")
        return named[0] if len(named) == 1 else single[0]

    def label_columns(self, others: set[str | None], chosen: str | list[str] | None) -> str | list[str]:
        """Return the column of labels, or those that are one label each."""
        if isinstance(chosen, str):
            return self.known("data.label_column", chosen)
        if chosen is not None:
            return [self.known("data.label_column", name) for name in chosen]
        names = [name for name in self.columns if name not in others]
        called = [name for name in names if name.lower() in _LABEL]
        if len(names) == 1 or len(called) == 1:
            return (called or names)[0]
        if len(names) > 1 and not called and not self.no_flag(names):
            return names
        columns = f"its other columns are {shortened(names, 20)}" if names else "it has no other column"
        problem = f"no column is known to have the labels; {columns}; {WANTED}"
        raise self.error(problem, "data.label_column", self.repeating(names))

    def repeating(self, names: Iterable[str]) -> list[str]:
        """Return the columns whose values repeat, so that they may be classes."""
        names = [name for name in names if name.lower() != "split"]
        texts = [name for name in names if all(isinstance(cell, str) and cell for cell in self.columns[name])]
        return [name for name in texts if 2 <= len(set(self.columns[name])) <= len(self.lines) / 2]

    def no_flag(self, names: Iterable[str]) -> str:
        """Return where columns have something else than 0 and 1, in words."""
        for name in names:
            cells = [*map(str, self.columns[name])]
            if wrong := {cell for cell in set(cells) if cell.lower() not in _OFF + _ON}:
                line, cell = next(pair for pair in zip(self.lines, cells, strict=True) if pair[1] in wrong)
                return f"line {line} has {cell[:60]!r} in column {name}"
        return ""

    def flags(self, names: list[str]) -> Tensor:
        """Return the labels of columns that are one label each, bool, rows × columns."""
        if where := self.no_flag(names):
            raise self.error(f"{where}; a column of one label has 0 and 1 alone")
        on = {cell for name in names for cell in set(self.columns[name]) if cell.lower() in _ON}
        return torch.tensor([[cell in on for cell in self.columns[name]] for name in names]).T

    def labels(self, name: str, separator: str | None) -> tuple[Tensor, list[str]]:
        """Return the labels of a column, and the classes."""
        cells = self.columns[name]
        absent = separator is not None
        if separator:
            absent = not any(separator in cell for cell in cells if isinstance(cell, str))
            cells = cells if absent else [_parts(cell, separator) if isinstance(cell, str) else cell for cell in cells]
        several = any(isinstance(cell, list) for cell in cells)
        rows = [cell if isinstance(cell, list) else (cell,) if cell else () for cell in cells]
        counts = Counter(label for labels in rows for label in labels)
        classes = sorted(counts, key=_number_or_text)
        signs = () if several else ("|", ";", ",", " ")
        parts = {sign: {part for cell in counts for part in _parts(cell, sign)} for sign in signs}
        fewer = {typed("data.label_separator", sign): len(of) for sign, of in parts.items() if len(of) < len(classes)}
        no_classes = 1 < len(classes) > counts.total() / 2
        if absent:
            problem = f"no cell of column {name} has the data.label_separator {separator!r}"
            whole = [""] * (not no_classes)
            raise UserError(f"{self.given}: {problem}", *fewer, *whole, mistake="data.label_separator")
        if no_classes:
            problem = f"column {name} has {len(classes):,} values in {len(rows):,} rows, which are no classes"
            others = [typed("data.label_column", other) for other in self.repeating(self.columns) if other != name]
            columns = f"; the columns are {shortened([*self.columns], 20)}; {WANTED}" * (not (fewer or others))
            raise UserError(f"{self.given}: {problem}{columns}", *fewer, *others)
        for option, count in [*fewer.items()][:1]:
            message = "%s: column %s has %d labels; with %s there would be %d, and several to an image"
            log.warning(message, self.given, name, len(classes), option, count)
        place = {label: index for index, label in enumerate(classes)}
        if empty := [str(self.lines[row]) for row, labels in enumerate(rows) if not (labels or several)]:
            problem = f"{len(empty):,} of {counted(len(rows), 'line')} without a label in column {name}"
            raise self.error(f"{problem} ({shortened(empty)}); leave such lines out")
        for line, labels in zip(self.lines, rows, strict=True):
            if len(set(labels)) < len(labels):
                problem = f"line {line} has a label twice in column {name} ({', '.join(labels):.60})"
                raise self.error(f"{problem}; write the names of the labels that the image has")
        if not several:
            return torch.tensor([place[label] for label in cells]), classes
        hot = torch.zeros(len(rows), len(classes), dtype=torch.bool)
        places = [(row, place[label]) for row, labels in enumerate(rows) for label in labels]
        hot[torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)] = True
        return hot, classes

    def rows_of(self, column: str, find: _Names, labels: Tensor, folder: str) -> tuple[list[int], list[str]]:
        """Return one row for each image that is named, and the images."""
        rows: dict[str, int] = {}
        missing: list[str] = []
        for row, name in enumerate(self.columns[column]):
            found = find(name) if isinstance(name, str) else []
            if len(found) > 1:
                several = f"{len(found)} images, such as {found[0]} and {found[1]}"
                raise self.error(f"line {self.lines[row]}: {name} names {several}; write it with folder and ending")
            if not found:
                missing.append(f"{str(name)[:60]} (line {self.lines[row]})")
            elif (first := rows.setdefault(found[0], row)) != row and not torch.equal(labels[first], labels[row]):
                lines = f"lines {self.lines[first]} and {self.lines[row]}"
                raise self.error(f"{lines} give {found[0]} different labels; leave one out")
        if missing:
            images = "images" if len(missing) > 1 else "image"
            counts = f"{len(missing):,} of {len(self.lines):,} lines name {images} not in {folder} ({find.some})"
            why = f"{shortened(missing, 3)}; leave such lines out, or set data.path to the folder that has all of them"
            raise self.error(f"{counts}: {why}")
        return [*rows.values()], [*rows]


class _Names:
    """Finds images by the names that a table has for them: with or without an ending, from the folder of the images or
    of the table on; or, without a folder, by that name alone.
    """

    def __init__(self, folder: str, beside: Path, images: Sequence[str]) -> None:
        root = os.path.abspath(folder)
        self.places = dict.fromkeys([root, os.path.abspath(beside)])
        self.some = "which has " + shortened([image[len(folder) :].lstrip("/") for image in images[:4]], 3)
        self.whole: dict[str, list[str]] = {}
        self.short: dict[str, list[str]] = {}
        for image in images:
            path = _composed(f"{root}/{image[len(folder) :].lstrip('/')}")
            stem = path[: path.rindex(".")]
            keys = dict.fromkeys((stem, path[path.rindex("/") + 1 :], stem[path.rindex("/") + 1 :]), self.short)
            alone = [image]  # one list for all keys, as long as they have one image: there are many
            for key, known in (*keys.items(), (path, self.whole)):
                if len(found := known.setdefault(key, alone)) > 1:
                    found.append(image)
                elif found is not alone:
                    known[key] = found + alone

    def __call__(self, name: str) -> list[str]:
        """Return the images of a name: none, one, or several."""
        name = _composed(name)
        paths = [name if name.startswith("/") else f"{place}/{name}" for place in self.places]
        if "./" in name:
            paths = [os.path.normpath(path) for path in paths]
        tried = (known.get(path) for path in paths for known in (self.whole, self.short))
        return next(filter(None, tried), self.short.get(name, []))


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)  # an umlaut is one character or two, by the system that wrote the name


def _parts(cell: str, separator: str) -> list[str]:
    return [part.strip() for part in cell.split(separator) if part.strip()]


def _number_or_text(label: str) -> tuple[float, str]:
    """Sort numbers by value, and before texts."""
    is_number = label.removeprefix("-").replace(".", "", 1).isdecimal()
    return float(label) if is_number else math.inf, label


def _separated(path: Path, given: str) -> tuple[list[str], Sequence[Sequence[Any]], list[int]]:
    """Return the heading, the rows, and the numbers of their lines, of a CSV or TSV file.

    Its separator is the first of comma, semicolon and tab, in a .tsv file tab, that cuts all lines into the same number
    of columns, two or more.
    """
    text, problem = _text(path, given), ""
    separators: Sequence[str]
    separators, called = (",", ";", "\t"), "comma, semicolon or tab"
    if path.suffix.lower() == ".tsv":
        separators, called = ("\t",), "tab"
    for separator in separators:
        reader = csv.reader(StringIO(text), delimiter=separator, strict=True)
        try:
            # Tuples, which the garbage collector, unlike lists, does not visit again and again.
            rows = [(reader.line_num, tuple(map(str.strip, row))) for row in reader if row]
        except csv.Error as error:
            problem = problem or f"line {reader.line_num}: {error}, as where a quote does not end"
            continue
        width = len(rows[0][1]) if rows else 0
        odd = [f"line {line} has {counted(len(row), 'column')}" for line, row in rows if len(row) != width]
        if width > 1 and not odd:
            return [*rows[0][1]], [row for _, row in rows[1:]], [line for line, _ in rows[1:]]
        problem = problem or (f"{odd[0]}, the first one has {width}; repair it" if width > 1 else "")
    first = text.strip().partition("\n")[0].strip()[:60]
    columns = f"it has one column: its first line, {first!r}, has no {called}" if first else "it is empty"
    raise UserError(f"{given}: {problem or f'{columns}; {WANTED}'}")


def _json_lines(path: Path, given: str) -> tuple[list[str], Sequence[Sequence[Any]], list[int]]:
    """Return the same of a file with a JSON object in each line."""
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, line in enumerate(_text(path, given).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                shown = f"line {number} is {line.strip()[:60]!r}"
                raise UserError(
                    f'{given}: {shown}, and is to be an object such as {{"file_name": "1.jpg", "label": "a"}}'
                )
            rows.append(row)
            lines.append(number)
    names = [*dict.fromkeys(name for row in rows for name in row)]
    return names, [[_cell(row.get(name)) for name in names] for row in rows], lines


def _cell(value: Any) -> str | list[str]:
    return [str(part) for part in value] if isinstance(value, list) else "" if value is None else str(value)


def _text(path: Path, given: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{given} is {encoding_of(path) or 'no text'}; write it anew in UTF-8") from error
    except OSError as error:
        raise UserError(f"{given} cannot be read ({error.strerror})") from error
