"""The end of an optimizer step as one operation: unscale, measure, clip, step, update the scale, clear."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.hardware import kind_of
from trainer.optim.masters import MasterWeights
from trainer.parallel.shards import is_sharded
from trainer.precision.scaler import LossScale

if TYPE_CHECKING:
    from mantissa.step.updates import UpdateMeter


@dataclass
class Clip:
    """The ``clip`` config group; this base is ``clip=none``: gradients are measured, never changed."""

    kind: ClassVar[str] = "none"

    def apply(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Clip the true gradients in place; ``norm`` is their total 2-norm, fp32 scalar."""

    def clip_factor(self, gradients: list[Tensor], norm: Tensor, factor: Tensor | None) -> Tensor | None:
        """Clip gradients that stay in 16 bits, without rounding them again if that can be avoided.

        Args:
            gradients: as backward left them; may be changed in place.
            norm: total 2-norm of the true gradients, fp32 scalar.
            factor: turns them into the true ones, fp32 scalar; None: they are.

        Returns:
            The factor that the optimizer applies in fp32, in place of ``factor``.
        """
        return factor


@dataclass
class ClipNorm(Clip):
    """``clip=norm``: scale all gradients so that their total norm is at most ``max_norm`` (Pascanu et al. 2013)."""

    kind: ClassVar[str] = "norm"
    max_norm: float = 1.0
    """Maximum total norm of the gradients."""

    def __post_init__(self) -> None:
        if not self.max_norm > 0:  # so that NaN is refused, too
            raise UserError(f"clip.max_norm={self.max_norm} must be above 0", "clip=none", mistake="clip.max_norm")

    def apply(self, gradients: list[Tensor], norm: Tensor) -> None:
        torch._foreach_mul_(gradients, self._coefficient(norm))

    def clip_factor(self, gradients: list[Tensor], norm: Tensor, factor: Tensor | None) -> Tensor | None:
        coefficient = self._coefficient(norm)
        return coefficient if factor is None else factor * coefficient

    def _coefficient(self, norm: Tensor) -> Tensor:
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's


@dataclass
class ClipValue(Clip):
    """``clip=value``: clamp every gradient element to ±``max_value``."""

    kind: ClassVar[str] = "value"
    max_value: float = 1.0
    """Maximum absolute value of a gradient element."""

    def __post_init__(self) -> None:
        if not self.max_value > 0:
            raise UserError(f"clip.max_value={self.max_value} must be above 0", "clip=none", mistake="clip.max_value")

    def apply(self, gradients: list[Tensor], norm: Tensor) -> None:
        torch._foreach_clamp_min_(gradients, -self.max_value)
        torch._foreach_clamp_max_(gradients, self.max_value)

    def clip_factor(self, gradients: list[Tensor], norm: Tensor, factor: Tensor | None) -> Tensor | None:
        limit = torch.full_like(norm, self.max_value) if factor is None else self.max_value / factor
        for gradient in gradients:
            gradient.clamp_(-limit, limit)  # beyond fp16's range the limit is infinite, and nothing is clamped
        return factor


class UpdateResult(NamedTuple):
    """The outcome of one update: scalars that stay on the device until they are logged."""

    grad_norm: Tensor
    """Total 2-norm of the unscaled gradients before clipping, fp32."""
    skipped: Tensor
    """Whether the weights were not changed because a gradient was not finite, bool."""
    loss_scale: Tensor
    """The scale that multiplied this step's loss, fp32."""


class Update:
    """From a loss to updated weights: backward, unscaling, clipping, the optimizer's step.

    Gradients that are not finite never reach the optimizer. Where the loss scale recovers (fp16) the step is
    skipped and the next one tries again with a smaller scale; otherwise every later update is blocked too,
    until the host reads ``skipped`` (see ``Monitor``) and ends the run: the weights stay as before the bad step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        loss_scale: LossScale,
        clip: Clip,
        masters: MasterWeights | None = None,
    ) -> None:
        """Prepare the updates of one run.

        Args:
            optimizer: over ``parameters``.
            parameters: of the model, or of ``masters`` where there are any.
            loss_scale: of the run.
            clip: of the config.
            masters: the fp32 weights that the optimizer updates in place of the model's 16-bit ones.
        """
        self.optimizer = optimizer
        self.masters = masters
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.loss_scale = loss_scale
        self.clip = clip
        self.meter: UpdateMeter | None = None
        """Measures the steps that are taken while it is set."""
        self._sharded = any(map(is_sharded, self.parameters))
        self._unscales_in_place = all(parameter.dtype.itemsize > 2 for parameter in self.parameters)
        device = self.parameters[0].device
        self._blocked = torch.zeros((), dtype=torch.bool, device=device)
        # The protocol of torch.amp.GradScaler with fused optimizers: they divide by a scale while they compute in fp32,
        # and on some devices take the flag there. For all others the host has to read two flags: whether the
        # norm is finite, and whether the step is taken. That is free on a CPU; on a GPU it takes two waits per step.
        self._optimizer_unscales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._takes_flag = kind_of(device).fused_amp and self._optimizer_unscales

    def backward(self, loss: Tensor, exchanged: bool = False) -> None:
        """Add the gradient of one microbatch's share of the step's loss (fp32 scalar).

        ``exchanged``: whether the ranks sum their gradients in this pass.
        """
        if exchanged and self.masters is not None:
            self.masters.before_exchange()
        self.loss_scale.multiply(loss).backward()

    @torch.no_grad()
    def step(self, steps_done: int = 0, correction: float = 1.0) -> UpdateResult:
        """End an optimizer step: change the weights, unless a gradient is not finite, and clear the gradients.

        Args:
            steps_done: before this one; the random numbers of ``bf16_sr``'s rounding depend on it.
            correction: a factor of the gradients besides the loss scale's, see ``Precision.loss_divisor``.
        """
        if self.masters is not None:
            self.masters.take_gradients()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        factor = self.loss_scale.inverse(correction)
        if self.meter is not None:
            self.meter.before(factor)
        if self._unscales_in_place and factor is not None:
            torch._foreach_mul_(gradients, factor)
            factor = None
        norm, overflow = self._measure(gradients, factor)
        if self.loss_scale.recovers:
            skipped = overflow
        else:
            skipped = self._blocked = self._blocked | overflow
        if self._unscales_in_place:
            self.clip.apply(gradients, norm)
        else:  # 16-bit gradients are not written again: what is unscaled would vanish in fp16
            factor = self.clip.clip_factor(gradients, norm, factor)
            self._give_scale_to_optimizer(gradients, factor)
        self.apply(skipped)
        if self.masters is not None:
            self.masters.write_back(steps_done)  # after a skipped step: what they were
        if self.meter is not None:
            self.meter.after(steps_done + 1, ~skipped, norm)
        scale = self.loss_scale.scale
        if self.loss_scale.recovers:
            self.loss_scale.update(~overflow)
        for parameter in self.parameters:  # the optimizer's method opens a range of the profiler, too
            parameter.grad = None
        return UpdateResult(norm, skipped, scale)

    def _measure(self, gradients: list[Tensor], factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the total 2-norm of the true gradients, and whether it is not finite.

        A norm above 1.8e19, whose square no fp32 holds, counts as not finite: training is lost by then.
        """
        # Torch's own norm would add up squares of 16-bit gradients in fp32, and round each tensor's norm to 16 bits,
        # which is infinite beyond fp16's range.
        dtype = None if self._unscales_in_place else torch.float32
        if self._sharded:  # DTensors know no dtype for many at once
            norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
        else:
            norms = list(torch._foreach_norm(gradients, 2.0, dtype=dtype))
        norm: Any = torch.linalg.vector_norm(torch.stack(norms))
        norm = norm.full_tensor() if self._sharded else norm  # that of all rows on all ranks
        norm = norm if factor is None else norm * factor
        return norm, ~(norm < math.inf)  # true for NaN too, and two kernels where isfinite takes four

    def _give_scale_to_optimizer(self, gradients: list[Tensor], factor: Tensor | None) -> None:
        """Let the optimizer multiply by the factor; one that is not fused gets gradients rounded to bf16 once.

        (``Optimizer.build`` refuses it in fp16, where small ones would be 0.)
        """
        if self._optimizer_unscales:
            self.optimizer.grad_scale = None if factor is None else factor.reciprocal()  # type: ignore[attr-defined]
        elif factor is not None:
            for gradient in gradients:
                gradient.copy_(gradient.float().mul_(factor))

    def apply(self, skipped: Tensor) -> None:
        """Let the optimizer take its step, unless ``skipped``. The memory forecast overrides this and ``read``."""
        if self._takes_flag:
            self.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not self.read(skipped):
            self.optimizer.step()

    def read(self, flag: Tensor) -> bool:
        """Read a flag; the host waits for it."""
        return bool(flag)
