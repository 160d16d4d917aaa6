"""Samples of a batch that are far larger than the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from mantissa.step import Batch, batch_key, map_tensors

_FAR, _FARTHER = 30.0, 1000.0
"""A sample is tried as a cause if its largest number is so many times that of the median sample; from the second one on
it is worth a word in any case."""


class Sample(NamedTuple):
    """A sample of a batch that is far larger than the others."""

    place: str
    """The batch's tensor, and the number of the sample."""
    largest: float
    usual: float
    """The largest number of the median sample."""
    batch: int
    """The number of the batch, from 0."""

    def __str__(self) -> str:
        return f"{self.place} has numbers up to {self.largest:.3g}, half of the others none above {self.usual:.3g}"


def far(batches: Iterable[Batch]) -> Sample | None:
    """Return the sample that is farther from the others of its batch than all; None: there is none."""
    found = []
    for number, name, tensor in ((number, *item) for number, batch in enumerate(batches) for item in batch.items()):
        sizes, usual = _sizes(tensor)
        if bool((sizes > _FAR * usual).any()):
            found.append(Sample(f"{batch_key(name)}, sample {int(sizes.argmax())}", sizes.max().item(), usual, number))
    return max(found, key=lambda sample: sample.largest / sample.usual, default=None)


def worth_a_word(batches: Iterable[Batch]) -> str:
    """Return which sample is far larger than the others, in words; empty: none is."""
    sample = far(batches)
    return f"; {sample}" if sample is not None and sample.largest > _FARTHER * sample.usual else ""


def without(batch: Batch) -> Batch:
    """Return a batch of the same size with the median sample in the place of each that is far larger."""
    rows: dict[int, int] = {}
    count = 0
    for tensor in batch.values():
        sizes, usual = _sizes(tensor)
        for row in (sizes > _FAR * usual).nonzero().flatten().tolist():
            rows[row], count = int((sizes - usual).abs().argmin()), len(sizes)
    if not rows:
        return batch
    taken = [rows.get(row, row) for row in range(count)]
    return map_tensors(batch, lambda tensor: tensor[taken] if tensor.shape[:1] == (count,) else tensor)


def _sizes(tensor: Tensor) -> tuple[Tensor, float]:
    """Return the largest number of each sample, and that of the median sample; none where there are few, or it is 0."""
    if tensor.ndim and len(tensor) > 2 and tensor.numel() and tensor.dtype != torch.bool and not tensor.is_complex():
        sizes = tensor.detach().abs().reshape(len(tensor), -1).amax(1).double()
        if usual := sizes.median().item():
            return sizes, usual
    return torch.zeros(0), 0.0
