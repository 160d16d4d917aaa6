"""Which text is trained on, and which is set aside to judge by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, in any selection."""

    sizes: np.ndarray
    """One integer per document, in any unit: used to split off a fair share."""
    read: Callable[[Sequence[int]], Iterator[str]]
    """Yields the texts of these documents, in the order given."""
    identity: Any
    """JSON that changes whenever the text does."""


@dataclass(frozen=True)
class Split:
    """Some documents of a corpus, whole or the same share of each."""

    corpus: Corpus
    rows: Sequence[int]
    start: float = 0.0
    end: float = 1.0

    @property
    def identity(self) -> Any:
        """JSON that changes whenever the selected text does."""
        rows = hashlib.sha256(np.asarray(self.rows, dtype=np.int64).tobytes()).hexdigest()
        return [self.corpus.identity, rows, self.start, self.end]

    def __iter__(self) -> Iterator[str]:
        """Yield the texts that are not empty."""
        for text in self.corpus.read(self.rows):
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
        return Split(corpus, everything, 0.0, 1 - fraction), Split(corpus, everything, 1 - fraction, 1.0)
    chosen = set(valid)
    return Split(corpus, [row for row in everything if row not in chosen]), Split(corpus, sorted(valid))
