"""``data.labels``: a CSV file with the names and labels of the images in a folder."""

from __future__ import annotations

import csv
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mantissa.display import counted, shortened
from trainer.errors import UserError

TABLE = """\
    file_name,label      or several labels:  file_name,dog,grass
    a/1.jpg,cat                              a/1.jpg,1,0
    2.jpg,dog                                2.jpg,0,1"""
WANTED = (
    "a table is a CSV file in UTF-8 with a line for each image: its path from data.path on, and its label, or a column "
    f"of 0 and 1 for each label; a column split may say train, val or test:\n{TABLE}"
)
FILE, LABEL, SPLIT = "file_name", "label", "split"


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
    """What of the table is used, in words."""


def read(path: Path, given: str, folder: str, images: Sequence[str]) -> Labelled:
    """Read the labels of images.

    Args:
        path: of the table.
        given: the option that names it, for messages.
        folder: of the images.
        images: those in the folder.

    Raises:
        UserError: the table is not as ``WANTED`` says, or a name has no image, or two lines.
    """
    columns, lines = _columns(path, given)
    known = {_composed(os.path.relpath(image, folder)): image for image in images}
    names = [_composed(os.path.normpath(name)) for name in columns[FILE]]
    if missing := [f"{name} (line {line})" for name, line in zip(names, lines, strict=True) if name not in known]:
        has = shortened([*known], 3)
        some = f"{len(missing):,} of {counted(len(names), 'line')} name no image in {folder} (which has {has})"
        raise UserError(f"{given}: {some}: {shortened(missing, 3)}; leave such lines out, or set data.path=…")
    first: dict[str, int] = {}
    for name, line in zip(names, lines, strict=True):
        if (before := first.setdefault(name, line)) != line:
            raise UserError(f"{given}: lines {before} and {line} are both of {name}; leave one out")
    labels, classes = _labels(columns, lines, given)
    used = [LABEL] if labels.ndim == 1 else classes
    unused = [name for name in columns if name not in (FILE, SPLIT, *used)]
    left_out, empty = len(images) - len(names), int((~labels.any(1)).sum()) if labels.ndim > 1 else 0
    notes = [
        f"labels in {shortened(used)}",
        f"not used: {shortened(unused)}" * bool(unused),
        f"{counted(left_out, 'image')} without a line left out" * bool(left_out),
        f"{counted(empty, 'image')} without a label" * bool(empty),
    ]
    splits = list(columns[SPLIT]) if SPLIT in columns else None
    return Labelled([known[name] for name in names], classes, labels, splits, ", ".join(filter(None, notes)))


def _columns(path: Path, given: str) -> tuple[dict[str, tuple[str, ...]], list[int]]:
    """Return the columns by their names, and the number of each row's line."""
    rows: list[tuple[int, list[str]]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True, skipinitialspace=True)
            lines = ((reader.line_num, [cell.strip() for cell in row]) for row in reader if row)
            _, heading = next(lines, (0, []))
            rows += lines
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{given} cannot be read as a table ({error}); {WANTED}") from error
    except OSError as error:
        raise UserError(f"{given} cannot be read ({error.strerror})") from error
    if not rows or FILE not in heading or len({*heading} - {SPLIT}) < 2 or len({*heading}) < len(heading):
        has = f"the columns {shortened(heading, 20)} and {counted(len(rows), 'row')}" if heading else "nothing in it"
        raise UserError(f"{given} has {has}; {WANTED}")
    for line, row in rows:
        if len(row) != len(heading):
            raise UserError(f"{given}: line {line} has {counted(len(row), 'column')}, the first one has {len(heading)}")
    return dict(zip(heading, zip(*(row for _, row in rows), strict=True), strict=True)), [line for line, _ in rows]


def _labels(columns: dict[str, tuple[str, ...]], lines: list[int], given: str) -> tuple[Tensor, list[str]]:
    """Return the labels, see ``Labelled``, and the classes."""
    if LABEL in columns:
        cells = columns[LABEL]
        if empty := [str(line) for cell, line in zip(cells, lines, strict=True) if not cell]:
            raise UserError(
                f"{given}: {counted(len(empty), 'line')} without a label ({shortened(empty)}); leave it out"
            )
        classes = sorted({*cells})
        if 1 < len(classes) > len(cells) / 2:
            raise UserError(f"{given}: label has {len(classes):,} values in {len(cells):,} rows, which are no classes")
        number = {name: place for place, name in enumerate(classes)}
        return torch.tensor([number[cell] for cell in cells]), classes
    classes = [name for name in columns if name not in (FILE, SPLIT)]
    for name in classes:
        for cell, line in zip(columns[name], lines, strict=True):
            if cell not in ("0", "1"):
                raise UserError(f"{given}: line {line} has {cell[:60]!r} in column {name}; {WANTED}")
    return torch.tensor([[cell == "1" for cell in columns[name]] for name in classes]).T, classes


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)  # an umlaut is one character or two, by the system that wrote the name
