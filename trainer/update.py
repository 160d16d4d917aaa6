"""The end of an optimizer step as one act: unscale, measure, clip, step, update the scale, clear."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.master import MasterWeights
from trainer.scaler import LossScale


@dataclass
class Clip:
    """The ``clip`` config group; this base is ``clip=none``: gradients are measured, never changed."""

    kind: ClassVar[str] = "none"

    def apply(self, parameters: list[nn.Parameter], norm: Tensor) -> None:
        """Clip the unscaled gradients in place; ``norm`` is their total 2-norm, fp32 scalar."""


@dataclass
class ClipNorm(Clip):
    """``clip=norm``: scale all gradients so that their total norm is at most ``max_norm`` (Pascanu et al. 2013)."""

    kind: ClassVar[str] = "norm"
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if not self.max_norm > 0:  # not a number is neither
            raise UserError(f"clip.max_norm={self.max_norm} must be above 0; use clip=none to leave gradients alone")

    def apply(self, parameters: list[nn.Parameter], norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)


@dataclass
class ClipValue(Clip):
    """``clip=value``: cut every gradient element to ±``max_value``."""

    kind: ClassVar[str] = "value"
    max_value: float = 1.0

    def __post_init__(self) -> None:
        if not self.max_value > 0:
            raise UserError(f"clip.max_value={self.max_value} must be above 0; use clip=none to leave gradients alone")

    def apply(self, parameters: list[nn.Parameter], norm: Tensor) -> None:
        torch.nn.utils.clip_grad_value_(parameters, self.max_value)


class UpdateResult(NamedTuple):
    """What one update did: scalars that stay on the device until the tracker copies them."""

    grad_norm: Tensor
    """Total 2-norm of the unscaled gradients before clipping, fp32."""
    skipped: Tensor
    """Whether the weights were left alone because a gradient was not finite, bool."""
    loss_scale: Tensor
    """The scale this step's loss was multiplied by, fp32."""


class Update:
    """Owns the way from a loss to changed weights.

    Gradients that are not finite never reach the optimizer. Where the loss scale recovers (fp16) the step is
    skipped and the next one tries again with a smaller scale; otherwise every later update is blocked too,
    until the host reads ``skipped`` and ends the run: the weights stay as they were before the bad step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        loss_scale: LossScale,
        clip: Clip,
        masters: MasterWeights | None = None,
        set_to_none: bool = True,
    ) -> None:
        """Take what an update needs.

        Args:
            optimizer: over ``parameters``.
            parameters: of the model, or of ``masters`` where there are any.
            loss_scale: of the run.
            clip: what is done to the gradients.
            masters: the fp32 weights that the optimizer changes in the place of the model's 16-bit ones.
            set_to_none: how gradients are cleared; False fills them with zeros, which keeps their memory.

        """
        self.optimizer = optimizer
        self.masters = masters
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.loss_scale = loss_scale
        self.clip = clip
        self.set_to_none = set_to_none
        self._wide = all(parameter.dtype.itemsize > 2 for parameter in self.parameters)
        device = self.parameters[0].device
        self._blocked = torch.zeros((), dtype=torch.bool, device=device)
        # Fused CUDA optimizers take the flag on the device; for all others the host has to look, which costs
        # nothing on a CPU and one wait per step on a GPU.
        self._takes_flag = device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one microbatch's share of the step's mean loss."""
        self.loss_scale.multiply(loss).backward()

    @torch.no_grad()
    def step(self, number: int = 0) -> UpdateResult:
        """End optimizer step ``number``, on which ``bf16_sr``'s rounding depends, and clear the gradients."""
        if self.masters is not None:
            self.masters.take_gradients()
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.loss_scale.unscale(gradients)
        norm = torch.nn.utils.get_total_norm(gradients) if self._wide else _total_norm_fp32(gradients)
        if hasattr(norm, "full_tensor"):  # a DTensor: of rows that lie on other ranks too
            norm = norm.full_tensor()
        finite = norm < math.inf  # false for NaN too, and one kernel where isfinite takes four
        skipped = ~finite if self.loss_scale.recovers else self._blocked.logical_or_(~finite).clone()
        self.clip.apply(parameters, norm)
        self._step_unless(skipped)
        if self.masters is not None:
            self.masters.write_back(number)  # after a skipped step: what they were
        scale = self.loss_scale.scale
        self.loss_scale.update(finite)
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        return UpdateResult(norm, skipped, scale)

    def _step_unless(self, skipped: Tensor) -> None:
        if self._takes_flag:
            # The protocol of torch.amp.GradScaler with fused optimizers.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skipped.item():
            self.optimizer.step()


def _total_norm_fp32(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, some of them 16-bit, as one vector: fp32 scalar."""
    # Torch's own would add up squares in fp32, and then round each tensor's norm to fp16, beyond which it is infinite.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))
