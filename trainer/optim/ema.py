"""The ``ema`` config group: an exponential moving average of the weights, which is evaluated and exported.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; as it is used for image
classification: Szegedy et al., "Rethinking the Inception Architecture", 2016, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mantissa.tensors import local
from trainer.errors import check_range
from trainer.parallel.shards import shard_again

_STATISTICS = ("running_mean", "running_var")
"""Buffers of batch norm, which are averaged like weights."""


@dataclass
class Ema:
    """The ``ema`` config group; this base is ``ema=none``: the weights of the last step are evaluated and exported."""

    kind: ClassVar[str] = "none"

    def decay_after(self, step: int) -> float:
        """Return the decay of the update after ``step`` steps."""
        return 0.0


@dataclass
class ExponentialMovingAverage(Ema):
    """``ema=default``: after step t the average moves by 1 - decay towards the weights.

    With ``warmup`` the decay is at most (1 + t) / (10 + t), as in TensorFlow's ``ExponentialMovingAverage``, so that
    the first weights, which are random, are soon forgotten.
    """

    kind: ClassVar[str] = "default"
    decay: float = 0.999
    """Decay per step: the average spans about 1 / (1 - decay) steps. torchvision's ResNet-50 reference uses 0.99998."""
    warmup: bool = True
    """Average over fewer steps at first, so that the random initial weights are soon forgotten."""

    def __post_init__(self) -> None:
        check_range("ema.decay", self.decay, "(0, 1)")

    def decay_after(self, step: int) -> float:
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class Average:
    """The averages, fp32, of a model's trainable weights and of batch norm's statistics; sharded as the weights are.

    With ``ema=none`` there are none. Where the optimizer keeps fp32 masters, these are averaged: their 16-bit roundings
    would add noise.

    Args:
        options: of the config.
        model: after it is wrapped for several processes; the averages begin with its present weights.
        kept: its fp32 master weights by name.
    """

    def __init__(self, options: Ema, model: nn.Module, kept: dict[str, nn.Parameter]) -> None:
        self._model, self._options = model, options
        live: dict[str, Tensor] = {}
        if options.kind != Ema.kind:
            live |= {name: each for name, each in model.named_parameters() if each.requires_grad}
            live |= {name: each for name, each in model.named_buffers() if name.rpartition(".")[2] in _STATISTICS}
        self._live = live
        """The model's own tensors."""
        self._sources = {name: kept.get(name, tensor) for name, tensor in live.items()}
        self._averages = {name: each.detach().to(torch.float32, copy=True) for name, each in self._sources.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the weights as they are after ``step`` steps."""
        if self._averages:
            sources = [local(each.detach()).float() for each in self._sources.values()]
            averages = [local(each) for each in self._averages.values()]
            torch._foreach_lerp_(averages, sources, 1 - self._options.decay_after(step))

    def persistent_weights(self) -> dict[str, Tensor]:
        """Return the averages by the names of the weights."""
        return self._averages

    def buffers(self) -> list[Tensor]:
        """Return the averages of the buffers, which differ by rank."""
        return [each for name, each in self._averages.items() if not isinstance(self._live[name], nn.Parameter)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Hold the averages in the model, rounded to its dtypes; afterwards it has its own weights again."""
        if not self._averages:
            yield
            return
        live = [local(each.detach()) for each in self._live.values()]
        own = [each.clone() for each in live]
        with torch.no_grad():
            torch._foreach_copy_(live, [local(each) for each in self._averages.values()])
        shard_again(self._model)  # ``parallel.reshard_after_forward=false`` keeps the weights gathered
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, own)
            shard_again(self._model)

    def state_of_model(self) -> dict[str, Tensor] | None:
        """Return the model's state dict with the averages, fp32, in the place of its weights; None: without any."""
        if not self._averages:
            return None
        averages = {id(each): self._averages[name] for name, each in self._live.items()}
        state: dict[str, Any] = self._model.state_dict(keep_vars=True)
        return {name: averages.get(id(each), each.detach()) for name, each in state.items()}
