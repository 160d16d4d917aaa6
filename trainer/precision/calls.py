"""The names of operators that options may have, and forward passes that only inspect the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.operators import GROUPS
from trainer.errors import UserError, nearest

_IN_PLACE = ("batch_norm", "instance_norm")  # of a copy in 16 bits, the statistics would be lost
_HOLDERS = (F, torch, Tensor, *(getattr(torch, group) for group in GROUPS))


def is_operator(name: str) -> bool:
    """Return whether torch has a function, or a method of tensors, of this name that does not work in place."""
    found = [getattr(holder, name, None) for holder in _HOLDERS]
    public = not name.startswith("_") and not name.endswith("_")
    return public and any(callable(each) and not isinstance(each, type) for each in found)


def check(overrides: dict[str, list[str]]) -> None:
    """Check the names of operators, by the option that has them.

    Raises:
        UserError: torch has no such operator, both options have it, or it cannot compute in 16 bits.
    """
    for option, name in ((option, name) for option, names in overrides.items() for name in names):
        if not is_operator(name):
            near = nearest(name, filter(is_operator, (each for holder in _HOLDERS for each in dir(holder))))
            raise UserError(f"precision.{option}: torch has no operator {name!r} that returns a new tensor{near}")
        if option == "half_ops" and name in overrides.get("fp32_ops", ()):
            raise UserError(f"precision.fp32_ops and precision.half_ops both have {name}; remove it from one of them")
        if option == "half_ops" and name in _IN_PLACE:
            raise UserError(f"precision.half_ops: {name} updates statistics, which stay in fp32; remove it")


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
