"""What a dataset is: the contract between the data of ``recipes/`` and the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

Batch = dict[str, Tensor]
"""One microbatch: named tensors whose first dimension is the sample."""


class SampleId(NamedTuple):
    """One sample to fetch. Everything random about it comes from ``seed``, so neither workers nor ranks matter."""

    index: int  # type: ignore[assignment]
    seed: int | None
    """None means: no augmentation (evaluation)."""


class Dataset(Protocol):
    """Map-style data, fetched a microbatch at a time so that an array needs no Python loop per sample."""

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        ...

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return the CPU tensors of these samples, stacked in the order given."""
        ...


@dataclass
class Datasets:
    """What a recipe trains on and is judged by."""

    train: Dataset
    valid: Dataset
    description: str
    """One line for the start block, such as ``python_docs: 5.1M tokens, own BPE of 4096``."""
    decodes: bool = False
    """Whether fetching a sample costs real CPU time (decoding an image), so that workers pay."""
