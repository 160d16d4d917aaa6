"""The ``optimizer`` config group: any optimizer of torch.optim, named, with weight decay where it belongs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.errors import UserError
from trainer.suggest import nearest


@dataclass
class Optimizer:
    """One class of ``torch.optim`` and its options: a new choice costs one YAML."""

    name: str = "AdamW"
    """The class in torch.optim."""
    lr: float = 1e-3
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: float = 0.0
    """Applied to parameters of two or more dimensions only: norms and biases are not decayed."""
    fused: bool | str = "auto"
    """One kernel for the whole update; auto: where torch has it for this device."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class, such as ``betas`` or ``momentum``."""

    def __post_init__(self) -> None:
        cls = getattr(torch.optim, self.name, None)
        if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
            raise UserError(f"optimizer.name={self.name} is not in torch.optim{nearest(self.name, dir(torch.optim))}")
        if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
            raise UserError(f"optimizer.name={self.name} needs a closure or sparse gradients, which no recipe has")
        if self.lr <= 0:
            raise UserError(f"optimizer.lr={self.lr} must be above 0")
        if self.weight_decay < 0:
            raise UserError(f"optimizer.weight_decay={self.weight_decay} must not be negative")
        if isinstance(self.fused, str) and self.fused != "auto":
            raise UserError(f"optimizer.fused={self.fused} must be true, false or auto")
        accepted = set(inspect.signature(cls).parameters)
        for option in self.options:
            if option not in accepted:
                raise UserError(
                    f"optimizer.options.{option}: {self.name} has no such argument{nearest(option, accepted)}"
                )
        if self.fused is True and "fused" not in accepted:
            raise UserError(
                f"optimizer.fused=true: torch.optim.{self.name} has no fused form; use optimizer.fused=auto"
            )

    def build(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """Return the optimizer over the model's trainable parameters, decayed ones first."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        others = [parameter for parameter in parameters if parameter.ndim < 2]
        groups = [
            {"params": members, "weight_decay": decay}
            for members, decay in ((matrices, self.weight_decay), (others, 0.0))
            if members
        ]
        cls = getattr(torch.optim, self.name)
        accepted = set(inspect.signature(cls).parameters)
        if "weight_decay" not in accepted:
            if self.weight_decay:
                raise UserError(f"optimizer.weight_decay: torch.optim.{self.name} has none; set it to 0")
            groups = [{"params": parameters}]
        keywords: dict[str, object] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in self.options.items()
        }
        if "fused" in accepted and (self.fused is True or (self.fused == "auto" and device.type in ("cuda", "cpu"))):
            keywords["fused"] = True
        try:
            optimizer: torch.optim.Optimizer = cls(groups, lr=self.lr, **keywords)
        except (TypeError, ValueError) as error:
            raise UserError(f"torch.optim.{self.name} refuses optimizer.options={self.options}: {error}") from error
        return optimizer
