"""Repeatable runs: the seeds of the global generators, and kernels that give the same bits every time."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed every global generator; data order and augmentation do not use them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def set_determinism(deterministic: bool) -> None:
    """Make torch refuse operations without a repeatable implementation, or let it choose the fastest."""
    if deterministic:
        # cuBLAS requires it, before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # It takes a pass over memory and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic
