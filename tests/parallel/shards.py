from __future__ import annotations

from typing import Any

from torch import Tensor

from trainer.parallel.shards import is_sharded


def whole(tensor: Any) -> Tensor:
    """A copy, put together from the ranks' parts where it is sharded."""
    full: Tensor = (tensor.full_tensor() if is_sharded(tensor) else tensor).detach().clone()
    return full
