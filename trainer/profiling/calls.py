"""A forward pass that is only looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn


def observe(
    model: nn.Module, forward: Callable[[], object], *recorders: AbstractContextManager[Any], gradients: bool = True
) -> None:
    """Take one eager forward pass in training under the recorders; the model keeps its buffers.

    Args:
        model: in training.
        forward: calls it on a few samples (at least two, for batch norm's statistics), and restores the generators.
        recorders: modes of torch that see what is called.
        gradients: whether the pass records operations for a backward pass (there is none).
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    training = model.training
    benchmark = torch.backends.cudnn.benchmark
    try:
        model.train()
        torch.backends.cudnn.benchmark = False  # not worth it for a few samples
        with torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(gradients), ExitStack() as entered:
            for recorder in recorders:
                entered.enter_context(recorder)
            forward()
    finally:
        torch.backends.cudnn.benchmark = benchmark
        model.train(training)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
