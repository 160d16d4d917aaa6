"""Split text into training and validation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SHORT = 500
"""Characters. Rows of a dataset with a median below this may be lines of longer texts."""

READINGS = ("auto", "lines", "documents")
"""What the rows of a dataset are; auto: what they look like, see ``joint_of``."""

_TITLE = re.compile(r"= [^=].* =")  # of an article of wikitext; sections have "= = … = ="
_HEADING = re.compile(r"= .* =")  # of either


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, in any selection."""

    sizes: np.ndarray
    """One integer per document, in any unit: used to split off a fair share."""
    read: Callable[[Sequence[int]], Iterator[str]]
    """Yields the texts of these documents, in the order given."""
    identity: Any
    """JSON that changes whenever the text does."""
    joint: str | None = None
    """What belongs between two of them where they are no documents but lines of one text; None: they are documents."""
    note: str = ""
    """How they are read, for the start block."""
    megabytes: float = 0.0
    """Of all documents, about; to show progress."""


@dataclass(frozen=True)
class Split:
    """Some documents of a corpus, whole or the same share of each."""

    corpus: Corpus
    rows: Sequence[int]
    start: float = 0.0
    end: float = 1.0
    origin: str = ""
    """Where it comes from, for the start block, such as ``whole documents``."""

    @classmethod
    def whole(cls, corpus: Corpus, origin: str = "") -> Split:
        """Return all documents."""
        return cls(corpus, range(len(corpus.sizes)), origin=origin)

    @property
    def megabytes(self) -> float:
        """Of the selected text, about."""
        share = self.corpus.sizes[list(self.rows)].sum() / max(1, self.corpus.sizes.sum())
        return float(share * (self.end - self.start) * self.corpus.megabytes)

    @property
    def identity(self) -> Any:
        """JSON that changes whenever the selected text does."""
        rows = hashlib.sha256(np.asarray(self.rows, dtype=np.int64).tobytes()).hexdigest()
        return [self.corpus.identity, rows, self.start, self.end]

    def __iter__(self) -> Iterator[str | Iterator[str]]:
        """Yield the texts that are not empty; of lines the one text that they are, line by line: it may be large."""
        if self.corpus.joint is not None:
            yield self._lines()
            return
        for text in self.corpus.read(self.rows):
            part = text[int(len(text) * self.start) : int(len(text) * self.end)]
            if part:
                yield part

    def _lines(self) -> Iterator[str]:
        if (self.start, self.end) == (0.0, 1.0):
            yield from self._joined()
            return
        length = sum(map(len, self._joined()))
        first, last = int(length * self.start), int(length * self.end)
        for line in self._joined():
            yield line[max(0, first) : max(0, last)]
            first, last = first - len(line), last - len(line)

    def _joined(self) -> Iterator[str]:
        """Yield the lines, each with what belongs before it: a line end where the one before has none of its own."""
        before = ""
        for row in self.corpus.read(self.rows):
            yield (before if row or self.corpus.joint else "") + row
            if self.corpus.joint:
                before = self.corpus.joint
            elif row:
                before = "" if row.endswith("\n") else "\n"


def split(corpus: Corpus, fraction: float) -> tuple[Split, Split]:
    """Divide into training and validation, always in the same way.

    Of many documents, whole ones are set aside, so that none is known in part. Where they are too few or
    too unequal for that (one file, for instance), the last part of each is, as in nanoGPT.
    """
    budget = fraction * corpus.sizes.sum()
    valid, filled = [], 0
    for row in np.random.default_rng(0).permutation(len(corpus.sizes)).tolist():
        size = int(corpus.sizes[row])
        if size <= budget / 4 and filled + size <= budget:
            valid.append(row)
            filled += size
    everything = range(len(corpus.sizes))
    if filled < budget / 2:
        train = Split(corpus, everything, 0.0, 1 - fraction)
        return train, Split(corpus, everything, 1 - fraction, 1.0, f"the last {fraction:.3g} of each document")
    chosen = set(valid)
    train = Split(corpus, [row for row in everything if row not in chosen])
    return train, Split(corpus, sorted(valid), origin="whole documents")


def joint_of(rows: Sequence[str | None], reading: str = READINGS[0]) -> str | None:
    """Return what belongs between the rows of a dataset where they are lines of longer texts; None: they are documents.

    Lines are short, hold no line end but at their own end, and show that they were cut out of a text, as in wikitext,
    whose files are the rows one after the other: some are blank lines or headings, and nearly all end with the line's
    own end. Where the line ends were taken away, there must be both blank lines and headings: tweets may have either.
    All others are documents, also where some end with a line end and some do not.

    Args:
        rows: some of them, of all parts of the dataset; None: a missing value, which is no blank line.
        reading: one of ``READINGS``; other than ``auto`` it says what the rows are.
    """
    filled = [row for row in rows if row and row.strip()]
    ended = sum(row.endswith("\n") for row in filled) / max(1, len(filled))
    if reading != "auto":
        return None if reading == "documents" else "" if ended > 0.5 else "\n"
    inner = sum("\n" in row.strip() for row in filled)
    if not _are_short([row or "" for row in rows]) or 100 * inner >= len(filled):
        return None
    blank = sum(row is not None and not row.strip() for row in rows)
    headings = sum(_HEADING.fullmatch(row.strip()) is not None for row in filled)
    several = max(3, len(rows) / 100)
    if ended >= 0.95:
        return "" if blank + headings >= several else None
    return "\n" if ended <= 0.05 and min(blank, headings) >= several else None


def spread(count: int) -> list[int]:
    """Return at most a thousand of ``count`` rows, spread evenly over all of them."""
    return np.linspace(0, count - 1, min(count, 1000)).astype(int).tolist()


def _are_short(rows: Sequence[str]) -> bool:
    return sorted(map(len, rows))[len(rows) // 2] < SHORT


def split_rows(corpus: Corpus, fraction: float, reading: str = READINGS[0]) -> tuple[Split, Split]:
    """Divide the rows of a dataset, which may be documents or no more than lines of them, as in wikitext.

    Long rows are documents, see ``split``. Short ones may be lines, and lines of a text that is otherwise trained on
    do not represent unseen text: the last ones are set aside, from the beginning of an article if one can be seen.
    A ``reading`` other than ``auto`` says which they are.
    """
    count = len(corpus.sizes)
    first = count - round(count * fraction)
    documents = corpus.joint is None and (reading == "documents" or not _are_short(list(corpus.read(spread(count)))))
    if documents or not 0 < first < count:
        return split(corpus, fraction)
    half = range(first, first + (count - first + 1) // 2)
    titles = (row for row, text in zip(half, corpus.read(half), strict=True) if _TITLE.fullmatch(text.strip()))
    first = next(titles, first)
    why = ": they are short, and may be lines of longer texts" if corpus.joint is None else ""
    origin = f"the last {count - first:,} of {count:,} rows{why}"
    return Split(corpus, range(first)), Split(corpus, range(first, count), origin=origin)
