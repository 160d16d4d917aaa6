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

_TITLE = re.compile(r"= [^=].* =")  # of an article of wikitext; sections have "= = … = ="


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
    def identity(self) -> Any:
        """JSON that changes whenever the selected text does."""
        rows = hashlib.sha256(np.asarray(self.rows, dtype=np.int64).tobytes()).hexdigest()
        return [self.corpus.identity, rows, self.start, self.end]

    def __iter__(self) -> Iterator[str]:
        """Yield the texts that are not empty; of lines, the one text that they are."""
        texts = self.corpus.read(self.rows)
        for text in texts if self.corpus.joint is None else [self.corpus.joint.join(texts)]:
            part = text[int(len(text) * self.start) : int(len(text) * self.end)]
            if part:
                yield part


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


def joint_of(rows: Sequence[str | None]) -> str | None:
    """Return what belongs between the rows of a dataset where they are lines of longer texts; None: they are documents.

    Lines are short, hold no line end but at their own end, and show that they were cut out of a text: most of them end
    with the line's own end (as in wikitext, whose files are the rows one after the other), or some are blank lines or
    titles of articles, and the line ends were taken away. Short documents without any of it stay documents.

    Args:
        rows: some of them, of all parts of the dataset; None: a missing value, which is no blank line.
    """
    filled = [row for row in rows if row and row.strip()]
    if not filled or not _are_short([row or "" for row in rows]) or any("\n" in row.strip() for row in filled):
        return None
    if 2 * sum(row.endswith("\n") for row in filled) > len(filled):
        return ""
    blank = sum(row is not None and not row.strip() for row in rows)
    return "\n" if 20 * blank >= len(rows) or any(_TITLE.fullmatch(row.strip()) for row in filled) else None


def spread(count: int) -> list[int]:
    """Return at most a thousand of ``count`` rows, spread evenly over all of them."""
    return np.linspace(0, count - 1, min(count, 1000)).astype(int).tolist()


def _are_short(rows: Sequence[str]) -> bool:
    return sorted(map(len, rows))[len(rows) // 2] < SHORT


def split_rows(corpus: Corpus, fraction: float) -> tuple[Split, Split]:
    """Divide the rows of a dataset, which may be documents or no more than lines of them, as in wikitext.

    Long rows are documents, see ``split``. Short ones may be lines, and lines of a text that is otherwise trained on
    do not represent unseen text: the last ones are set aside, from the beginning of an article if one can be seen.
    """
    count = len(corpus.sizes)
    first = count - round(count * fraction)
    if not _are_short(list(corpus.read(spread(count)))) or not 0 < first < count:
        return split(corpus, fraction)
    half = range(first, first + (count - first + 1) // 2)
    titles = (row for row, text in zip(half, corpus.read(half), strict=True) if _TITLE.fullmatch(text.strip()))
    first = next(titles, first)
    why = ": they are short, and may be lines of longer texts" if corpus.joint is None else ""
    origin = f"the last {count - first:,} of {count:,} rows{why}"
    return Split(corpus, range(first)), Split(corpus, range(first, count), origin=origin)
