"""Comparisons by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nested structures are equal, tensors by type, shape and every bit (NaN equals itself)."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
            return False
        return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return bool(one == other)
