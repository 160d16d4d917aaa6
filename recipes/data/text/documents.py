"""Documents of text, and which of them are set aside for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Text:
    """Documents that can be read again and again: all of a source, some, or the same share of each."""

    sizes: np.ndarray
    """Bytes of each document of the source, about, int64: to set a fair part aside, and to show progress."""
    read: Callable[[Sequence[int]], Iterator[Iterable[str]]]
    """Yields these documents, in the order given, each as the lines of its text, which can be read again."""
    source: Any
    """JSON that changes whenever the source's text does."""
    rows: Sequence[int]
    """Numbers of the selected documents."""
    share: tuple[float, float] = (0.0, 1.0)
    """Beginning and end of the part that is taken of each document."""
    note: str = ""
    """How they are read, for the start block."""
    origin: str = ""
    """What they are a part of, for the start block, such as ``whole documents``."""

    @property
    def megabytes(self) -> float:
        """Size of the selected text, about."""
        start, end = self.share
        return float(self.sizes[list(self.rows)].sum()) * (end - start) / 1e6

    @property
    def identity(self) -> Any:
        """JSON that changes whenever the selected text does."""
        rows = hashlib.sha256(np.asarray(self.rows, dtype=np.int64).tobytes()).hexdigest()
        return [self.source, rows, self.share]

    def __iter__(self) -> Iterator[Iterable[str]]:
        """Yield the documents, each as lines."""
        for document in self.read(self.rows):
            if self.share == (0.0, 1.0):
                yield document
            else:
                length = sum(map(len, document))
                yield _between(document, *(int(length * place) for place in self.share))


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
    chosen, filled = set(), 0
    for row in np.random.default_rng(0).permutation(count).tolist():
        size = int(text.sizes[row])
        if size <= wanted / 4 and filled + size <= wanted:
            chosen.add(row)
            filled += size
    if filled < wanted / 2:
        cut, of = 1 - fraction, "the text" if count == 1 else "each document"
        origin = f"the last {fraction:.3g} of {of}"
        return replace(text, share=(0.0, cut)), replace(text, share=(cut, 1.0), origin=origin)
    train = replace(text, rows=[row for row in range(count) if row not in chosen])
    return train, replace(text, rows=sorted(chosen), origin="whole documents")
