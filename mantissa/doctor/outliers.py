"""Samples of a batch that are far larger than the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from mantissa.display import shortened
from mantissa.step.batch import Batch, batch_key, with_rows

_RATIO = 30.0
"""A sample is tried as a cause if its largest number is so many times that of the median sample."""


class Outlier(NamedTuple):
    """Samples of a batch that are far larger than the others."""

    place: str
    """The batch's tensor, and the numbers of such samples."""
    largest: float
    usual: float
    """The largest number of the median sample."""
    batch: int
    """Number of the batch, from 0."""

    def __str__(self) -> str:
        return f"{self.place}: numbers up to {self.largest:.3g}, in half of the others none above {self.usual:.3g}"


def find_outlier(batches: Iterable[Batch]) -> Outlier | None:
    """Return the samples that are farther from the others of their batch than all; None: there are none."""
    outliers = []
    for number, batch in enumerate(batches):
        for name, tensor in batch.items():
            rows, sizes, usual = _far(tensor)
            if rows:
                place = f"{batch_key(name)}, {samples(rows)}"
                outliers.append(Outlier(place, sizes.max().item(), usual, number))
    return max(outliers, key=lambda outlier: outlier.largest / outlier.usual, default=None)


def without_outliers(batch: Batch) -> Batch:
    """Return a batch of the same size with the median sample in the place of each that is far larger."""
    instead: dict[int, int] = {}
    count = 0
    for tensor in batch.values():
        rows, sizes, usual = _far(tensor)
        for row in rows:
            instead[row], count = int((sizes - usual).abs().argmin()), len(sizes)
    if not instead:
        return batch
    return with_rows(batch, [instead.get(row, row) for row in range(count)])


def samples(rows: list[int]) -> str:
    """Return samples in words."""
    return f"{'samples' if len(rows) > 1 else 'sample'} {shortened(list(map(str, rows)), 4)}"


def _far(tensor: Tensor) -> tuple[list[int], Tensor, float]:
    """Return the samples that are far larger, the largest number of each sample, and that of the median sample.

    None are where there are few samples, or where the median one is 0.
    """
    is_dense = tensor.ndim and tensor.layout == torch.strided
    if is_dense and len(tensor) > 2 and tensor.numel() and tensor.dtype != torch.bool and not tensor.is_complex():
        sizes = tensor.detach().abs().reshape(len(tensor), -1).amax(1).double()
        if usual := sizes.median().item():
            return (sizes > _RATIO * usual).nonzero().flatten().tolist(), sizes, usual
    return [], torch.zeros(0), 0.0
