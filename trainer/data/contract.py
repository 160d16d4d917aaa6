"""The interface between the datasets of ``recipes/`` and the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

Batch = dict[str, Tensor]
"""One microbatch: named tensors whose first dimension is the sample."""


class SampleId(NamedTuple):
    """One sample to fetch. Its randomness comes from ``seed`` only, not from the worker or rank that fetches it."""

    index: int  # type: ignore[assignment]
    seed: int | None
    """Of the augmentation; None: no augmentation (evaluation)."""


class Dataset(Protocol):
    """Map-style data, fetched one microbatch at a time, so that arrays need no Python loop over samples.

    Where ``batch`` uses torch's global generator, the dataset has an attribute ``uses_global_generator`` that is true:
    no thread beside the training then calls it. Where it has an attribute ``pins``, the loader sets this to whether it
    may put its batches into page-locked memory (``torch.empty(…, pin_memory=True)``), which saves a copy. An attribute
    ``unreadable`` (bool, one for each sample) marks those whose place others have taken; the run counts them.
    """

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        ...

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return the CPU tensors of these samples, stacked in the order given. A thread may call it."""
        ...


@dataclass
class Datasets:
    """The data of a run. A recipe's subclass adds what else the data decides."""

    train: Dataset
    valid: Dataset
    description: str
    """One line for the terminal, such as ``python_docs: 5.1M tokens, own BPE of 4096``."""
    decodes: bool = False
    """Whether fetching a sample takes considerable CPU time (decoding an image), so that workers are worthwhile."""
    test: Dataset | None = field(default=None, kw_only=True)
    """The test data, evaluated once, at the end, with the best weights; None: there is none."""

    def keep(self, folder: Path) -> None:
        """Write into the run folder what a later run needs of this data beside the weights."""
