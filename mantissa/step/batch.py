"""A batch of a step: its tensors, and others in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch import Tensor

Batch = dict[str, Tensor]
"""Tensors by name, whose rows are the samples."""


def batch_key(tensor: str) -> str:
    """Return how code names a tensor of a batch: ``batch['x']``."""
    return f"batch{tensor}" if tensor.startswith("[") else f"batch['{tensor}']"


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch of the same kind with changed tensors."""
    result = copy.copy(batch)
    result.update({name: change(tensor) for name, tensor in batch.items()})
    return result


def with_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a batch with some of its samples in this order, as many as it has; what has other rows stays."""
    taken = list(rows)
    return map_tensors(batch, lambda tensor: tensor[taken] if tensor.shape[:1] == (len(taken),) else tensor)
