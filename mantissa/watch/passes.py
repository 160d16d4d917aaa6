"""The forward passes of a loop's step, and where in what a model returns its loss is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mantissa.doctor.cause import all_ignored
from mantissa.tensors import NotedState, numbers_in, tensors
from mantissa.watch.meters import Measured


class Pass:
    """A forward pass: what it takes in, for its replay, and the loss that the model returned."""

    def __init__(self, number: int, batch: Any, generators: NotedState) -> None:
        if any(tensor.requires_grad for tensor in tensors(batch)):  # else it would keep the graph of another model
            batch = tree_map_only(Tensor, Tensor.detach, batch)
        self.number, self.batch, self.generators = number, batch, generators
        self.loss: Tensor | None = None


@dataclass
class WatchedStep:
    """A step: what it takes in, for its replay, and its outcome, which the host may not know yet."""

    began: tuple[int, int] | None = None
    """Number of updates in the step, and of changes of a weight, when its passes began; None: they did not begin."""
    passes: list[Pass] = field(default_factory=list)
    """Passes that count: whose backward pass ran, or that were given to ``keep``."""
    parts: bool = False
    """Whether the losses of passes are parts of the step's, divided by the targets of all, as transformers'."""
    updating: bool = False
    """Whether the optimizer is in its step."""
    looked: bool = False
    """Whether the gradients were looked at before the update."""
    sound: Any = None
    """Whether the gradients are finite; None: they were not looked at."""
    skipped: Tensor | None = None
    """Whether a fused optimizer skips it; None: there is none."""
    updates: int = 0
    """Number of times that the optimizer has stepped."""
    number: int = field(init=False)
    flags: Any = field(init=False)
    """Numbers on the host: whether gradients are finite, whether losses are, whether it was skipped, the loss scale."""
    event: Any = None
    """Event after which the device is done with it; None: it is."""
    read: Callable[[], Measured] | None = None
    """Function that returns the measurement; None: the step was not measured."""

    @property
    def losses(self) -> list[Tensor]:
        """Losses that the model returned."""
        return [kept.loss for kept in self.passes if kept.loss is not None]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of what DDP and torch.compile made of it."""
    inner: Any = model
    while isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    return inner


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in what a model returns: its ``loss``, or the first scalar; None: there is none."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    scalars = [number for number in numbers_in(output) if number.ndim == 0]
    return named if isinstance(named, Tensor) else next(iter(scalars), None)


def without_targets(batch: Any) -> str:
    """Return what is said of a batch that has no targets, with the cure; empty: it has some."""
    if not any(all_ignored(tensor) or not tensor.numel() for tensor in tensors(batch)):
        return ""
    none = "A batch has no targets, or only such as losses leave out (-100), and a mean over nothing is 0/0"
    return f"{none}: give each batch targets, or leave it out."


def call(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with ``(args, kwargs)``; return its loss, or a stand-in where it returns none."""
    args, kwargs = batch
    output = model(*args, **kwargs)
    loss = loss_in(output)
    return loss if loss is not None else torch.stack([part.float().mean() for part in numbers_in(output)]).mean()
