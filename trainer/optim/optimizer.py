"""The ``optimizer`` config group: any optimizer of torch.optim by name, with weight decay by parameter role."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.errors import UserError, nearest
from trainer.kernels.fused import fused_is_sound, start_momentum
from trainer.optim.groups import check_patterns, layer_factors, parameter_groups
from trainer.optim.masters import MasterWeights


@dataclass
class Optimizer:
    """A class of ``torch.optim`` and its options; a new choice is one YAML file."""

    name: str = "AdamW"
    """The class in torch.optim."""
    lr: float = 1e-3
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: float = 0.0
    """Applied to the weights of linear, convolution, embedding and attention layers. Everything else is not decayed,
    whatever its shape: biases, norms, scales, class tokens, plain position embeddings. The rule is ``decayed``.
    """
    groups: Any = None
    """A mapping of name patterns to what the parameters that match have of their own: ``lr``, a multiple of the
    learning rate, and ``weight_decay``, where they have any. Of several patterns the last one decides.
    """
    layer_decay: float | None = None
    """Multiplies the learning rate from each block to the one below, from 1 at the head; see ``layer_factors``."""
    fused: bool | str = "auto"
    """Use one kernel for the whole update; auto: if torch has one for this device."""
    set_to_none: bool = True
    """Clear gradients to None; false: fill them with zeros, to measure the difference."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class, such as ``betas`` or ``momentum``."""

    def __post_init__(self) -> None:
        cls = getattr(torch.optim, self.name, None)
        if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
            raise UserError(f"optimizer.name={self.name} is not in torch.optim{nearest(self.name, dir(torch.optim))}")
        if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
            raise UserError(f"optimizer.name={self.name} needs a closure or sparse gradients, which no recipe has")
        if not 0 < self.lr < math.inf:
            raise UserError(f"optimizer.lr={self.lr} must be a number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"optimizer.weight_decay={self.weight_decay} must be a number of at least 0")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UserError(f"optimizer.layer_decay={self.layer_decay} must be above 0 and at most 1, such as 0.75")
        self.groups = self.groups or None  # as in the records of runs of earlier versions
        check_patterns(self.groups)
        if isinstance(self.fused, str) and self.fused != "auto":
            raise UserError(f"optimizer.fused={self.fused} must be true, false or auto")
        accepted = set(inspect.signature(cls).parameters) - {"params"}
        for option in self.options:
            if option in ("lr", "weight_decay", "fused"):
                raise UserError(f"optimizer.options.{option} has its own key: set optimizer.{option}=…")
            if option not in accepted:
                raise UserError(
                    f"optimizer.options.{option}: {self.name} has no such argument{nearest(option, accepted)}"
                )
        if self.fused is True and "fused" not in accepted:
            raise UserError(
                f"optimizer.fused=true: torch.optim.{self.name} has no fused form; use optimizer.fused=auto"
            )
        if self.fused is True and self._dampened:
            raise UserError("optimizer.fused=true cannot have optimizer.options.dampening; use optimizer.fused=auto")

    @property
    def _dampened(self) -> bool:
        return self.name == "SGD" and bool(self.options.get("dampening", 0))

    def build(
        self, model: nn.Module | MasterWeights, device: torch.device, blocks: list[nn.Module] | None = None
    ) -> torch.optim.Optimizer:
        """Return the optimizer of the trainable parameters of a model or its masters, first those with weight decay.

        Args:
            model: what it changes.
            device: where that is.
            blocks: the model's repeated blocks, for ``layer_decay``.

        Raises:
            UserError: an option that this class, dtype, device or model does not support.
        """
        cls = getattr(torch.optim, self.name)
        accepted = set(inspect.signature(cls).parameters)
        whole = model.model if isinstance(model, MasterWeights) else model
        factors = {} if self.layer_decay is None else layer_factors(whole, blocks or [], self.layer_decay)
        groups = parameter_groups(model.named_parameters(), whole, self.weight_decay, self.groups or {}, factors)
        parameters = [parameter for group in groups for parameter in group["params"]]
        if "weight_decay" not in accepted:
            decays = [group.pop("weight_decay") for group in groups]
            if any(decays):
                raise UserError(f"optimizer.weight_decay: torch.optim.{self.name} has no weight decay; set it to 0")
        keywords: dict[str, object] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in self.options.items()
        }
        # Of torch's fused kernels, only Adam's support sharded weights (FSDP2's DTensors).
        sharded = hasattr(parameters[0], "full_tensor") and self.name not in ("Adam", "AdamW")
        if sharded and self.fused is True:
            raise UserError(f"optimizer.fused=true: {self.name} has no fused form for parallel=fsdp; use auto")
        halves = {parameter.dtype for parameter in parameters if parameter.dtype.itemsize <= 2}
        unsound = device.type == "cpu" and "fused" in accepted and not all(fused_is_sound(cls, d) for d in halves)
        if unsound and self.fused is True:
            raise UserError(
                f"optimizer.fused=true: {self.name}'s fused form in torch {torch.__version__} updates 16-bit weights "
                "wrongly on a CPU; use optimizer.fused=auto"
            )
        auto = self.fused == "auto" and device.type in ("cuda", "cpu") and not (self._dampened or sharded or unsound)
        if "fused" in accepted and (self.fused is True or auto):
            keywords["fused"] = True
        if torch.float16 in halves and "fused" not in keywords:
            self._check_eps(cls)
        try:
            optimizer: torch.optim.Optimizer = cls(groups, lr=self.lr, **keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"torch.optim.{self.name} refuses optimizer.options={self.options}: {error}") from error
        if self.name == "SGD" and "fused" in keywords:
            start_momentum(optimizer)
        return optimizer

    def _check_eps(self, cls: type[torch.optim.Optimizer]) -> None:
        """Refuse an ``eps`` that is 0 in fp16, where an optimizer that is not fused adds it: 0 / 0 is NaN."""
        default = inspect.signature(cls).parameters.get("eps")
        eps = self.options.get("eps", default.default if default else None)
        if isinstance(eps, (int, float)) and eps < 2.0**-24:  # fp16's smallest number
            raise UserError(
                f"optimizer.options.eps={eps:g} is 0 in fp16, where {self.name} divides by it if it is not fused: the "
                "weights turn NaN; set optimizer.options.eps=1e-4, or precision=fp16_master"
            )


def accepted_options(name: str) -> set[str] | None:
    """Return the names of the arguments of an optimizer of torch.optim; None: there is no such optimizer."""
    cls = getattr(torch.optim, name, None)
    return set(inspect.signature(cls).parameters) if inspect.isclass(cls) else None
