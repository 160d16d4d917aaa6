"""Tensors that FSDP2 shards by rows: the part of this rank."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is sharded (a DTensor, whose import would take a third of a second)."""
    return hasattr(tensor, "to_local")


def shard_again(model: nn.Module) -> None:
    """Let FSDP2 free the weights that it keeps gathered, and gather them anew when they are needed."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


def local_rows(tensor: Any) -> tuple[int, int]:
    """Return the first row and the number of rows of this rank's part of a tensor that is sharded as by torch.chunk."""
    from torch.distributed.tensor import Shard

    assert tensor.device_mesh.ndim == 1
    assert tensor.placements == (Shard(0),)
    length = tensor.shape[0]
    chunk = math.ceil(length / tensor.device_mesh.size())
    first = min(length, tensor.device_mesh.get_local_rank() * chunk)
    count = tensor.to_local().shape[0]
    assert count == min(chunk, length - first)
    return first, count
