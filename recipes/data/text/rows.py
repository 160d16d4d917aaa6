"""Rows of a dataset of ``datasets`` as text: documents, or lines of one text, which are joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mantissa.display import shortened
from recipes.data.text.documents import Rows, Text

ROWS = ("auto", "lines", "documents")
"""What the rows of a text dataset are; auto: see ``are_lines``."""
_BYTES_AT_ONCE = 1 << 24
"""What is read of a table at a time, about: its rows may be books."""


def are_lines(rows: Sequence[str | None]) -> bool:
    """Return whether rows are lines of longer texts: nearly all end with their only line end, and some are blank.

    Joined, they are the text, as the files of wikitext are. All others are documents.
    """
    filled = [row for row in rows if row and row.strip()]
    lines = sum(row.find("\n") == len(row) - 1 for row in filled)
    blank = sum(row is not None and not row.strip() for row in rows)
    return lines >= 0.95 * len(filled) and blank >= max(3, len(rows) / 100)


def empty_line(dataset: Any, column: str, how: str) -> str | None:
    """Return what a row without text stands for: a blank line, or nothing where rows bring line ends; None: rows are
    no lines, but documents.

    Args:
        dataset: a split, of which a thousand rows are looked at.
        column: of text.
        how: one of ``ROWS``.
    """
    some = np.linspace(0, len(dataset) - 1, min(len(dataset), 1000)).astype(int).tolist()
    rows = dataset.select_columns([column])[some][column]
    if how == "documents" or (how == "auto" and not are_lines(rows)):
        return None
    return "" if any((row or "").endswith("\n") for row in rows) else "\n"


def text_of(dataset: Any, column: str, source: list[Any], empty: str | None, how: str) -> Text:
    """Return the text in a column of a split.

    Args:
        dataset: the split.
        column: its name.
        source: names the split.
        empty: see ``empty_line``.
        how: one of ``ROWS``, for the start block.
    """
    # The fingerprint follows the files' contents or, for local ones, their modification times.
    source, unused = [*source, column, dataset._fingerprint, empty], [n for n in dataset.features if n != column]
    dataset = dataset.select_columns([column])
    size = max(len(dataset), dataset.data.nbytes)
    first = f"column {column}, which begins with {(dataset[0][column] or '')[:30]!r}"
    first += f", not used: {shortened(unused, 5)}" * bool(unused)
    if empty is not None:
        note = f"{first}; rows are lines: joined, without a token between them (data.rows={how})"
        text = JoinedRows(dataset, column, empty)
        return Text(np.array([size]), lambda _: iter([text]), source, range(1), note=note)
    if none := dataset.data.column(column).null_count:
        first += f", {none:,} of {len(dataset):,} rows are empty or a word for it, such as NA, and left out"
    average = size // len(dataset)
    at_once = max(1, min(1000, _BYTES_AT_ONCE // average))

    def read(rows: Rows) -> Iterator[list[str]]:
        for first in range(0, len(rows), at_once):  # select() would copy the numbers of all rows
            texts = dataset[rows[first : first + at_once]][column]
            yield from ((text or "").splitlines(keepends=True) for text in texts)

    sizes = np.broadcast_to(np.int64(average), len(dataset))
    note = f"{first}; each row a document (data.rows={how})"
    return Text(sizes, read, source, range(len(dataset)), note=note)


@dataclass(frozen=True)
class JoinedRows:
    """Rows that are lines of one text, which can be read again."""

    dataset: Any
    """The dataset with the column of text alone."""
    column: str
    """The name of the column."""
    empty: str
    """What a row without text stands for."""

    def __iter__(self) -> Iterator[str]:
        """Yield the rows with their line ends."""
        for batch in self.dataset.iter(1000):
            for row in batch[self.column]:
                yield row if row and row.endswith("\n") else f"{row}\n" if row else self.empty
