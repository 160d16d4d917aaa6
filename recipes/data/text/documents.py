"""Documents of text, and which of them are set aside for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Rows = range | np.ndarray
"""Numbers of documents; an array is int64: there may be tens of millions."""


@dataclass(frozen=True)
class Text:
    """Documents that can be read again and again: all of a source, some, or the same share of each."""

    sizes: np.ndarray
    """Bytes of each document of the source, about, int64: to set a fair part aside, and to show progress."""
    read: Callable[[Rows], Iterator[Iterable[str]]]
    """Yields these documents, in the order given, each as the lines of its text, which can be read again."""
    source: Any
    """JSON that changes whenever the source's text does."""
    rows: Rows
    """Numbers of the selected documents."""
    share: tuple[float, float] = (0.0, 1.0)
    """Beginning and end of the part that is taken of each document."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Characters of the documents that were counted, which takes as long as reading: of those divided into parts."""
    note: str = ""
    """How they are read, for the start block."""
    origin: str = ""
    """What they are a part of, for the start block, such as ``whole documents``."""

    @property
    def megabytes(self) -> float:
        """Size of the selected text, about."""
        start, end = self.share
        return float(self.sizes[self.rows].sum()) * (end - start) / 1e6

    @property
    def identity(self) -> Any:
        """JSON that changes whenever the selected text does."""
        rows = hashlib.sha256(np.asarray(self.rows, dtype=np.int64).data).hexdigest()
        return [self.source, rows, self.share]

    def __iter__(self) -> Iterator[Iterable[str]]:
        """Yield the documents, each as lines."""
        for row, document in zip(self.rows, self.read(self.rows), strict=True):
            if self.share == (0.0, 1.0):
                yield document
            else:
                if row not in self.lengths:
                    self.lengths[row] = sum(map(len, document))
                yield _between(document, *(int(self.lengths[row] * place) for place in self.share))


def _between(lines: Iterable[str], first: int, last: int) -> Iterator[str]:
    """Yield the characters ``first`` to ``last`` of a text."""
    for line in lines:
        yield line[max(0, first) : max(0, last)]
        first, last = first - len(line), last - len(line)


def split(text: Text, fraction: float) -> tuple[Text, Text]:
    """Divide into training and validation, always in the same way.

    Of many documents, whole ones are set aside, so that none is known in part. Where they are too few or
    too unequal for that (one file, for instance), the last part of each is, as in nanoGPT.
    """
    count = len(text.sizes)
    wanted = fraction * text.sizes.sum()
    chosen, filled = np.zeros(count, dtype=bool), 0
    order = np.random.default_rng(0).permutation(count)
    order = order[text.sizes[order] <= wanted / 4]
    while len(order):  # one after the other, passing over what is too large for the rest of the room
        sums = filled + np.cumsum(text.sizes[order])
        fit = int(np.searchsorted(sums, wanted, side="right"))
        chosen[order[:fit]], filled = True, int(sums[fit - 1])
        order = order[fit:]
        order = order[filled + text.sizes[order] <= wanted]
    if filled < wanted / 2:
        cut, of = 1 - fraction, "the text" if count == 1 else "each document"
        origin = f"the last {fraction:.3g} of {of}"
        return replace(text, share=(0.0, cut)), replace(text, share=(cut, 1.0), origin=origin)
    train = replace(text, rows=np.flatnonzero(~chosen))
    return train, replace(text, rows=np.flatnonzero(chosen), origin="whole documents")
