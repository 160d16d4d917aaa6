"""Loss scaling: the ``scaler`` config group, and the scale, which is kept on the device.

fp16 gradients below 2^-24 vanish; multiplying the loss by a large scale lifts them, and dividing the fp32
gradients by it afterwards restores them (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mantissa.formats import Format
from trainer.errors import UserError, check_number, check_range
from trainer.hardware import kind_of

_LARGEST = 3.4028234663852886e38  # of fp32


class LossScale:
    """The loss scale of one run.

    A dynamic one grows after ``interval`` good steps in a row and backs off at every overflow. The rule is
    torch.amp.GradScaler's, with a floor, and kept in device tensors: the host never waits for it, with any optimizer.

    Args:
        device: of the loss.
        scale: at first; None: there is none; it multiplies and divides nothing.
        rule: how it changes; None: it is a constant.
    """

    def __init__(self, device: torch.device, scale: float | None = None, rule: DynamicScaler | None = None) -> None:
        self.recovers = scale is not None
        """Whether training continues after a step with non-finite gradients, which is skipped."""
        self.scale = torch.full((), 1.0 if scale is None else scale, dtype=torch.float32, device=device)
        self.rule = rule
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        # torch.amp.GradScaler computes in double; so do we, for the same bits, where the device does.
        self._wide = kind_of(device).wide

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, fp32 scalar."""
        return loss * self.scale if self.recovers else loss

    def inverse(self, correction: float) -> Tensor | None:
        """Return the factor (fp32 scalar) that turns a gradient of the scaled loss into the true one; None: it is 1.

        ``correction`` is a further factor that the gradient needs, see ``Precision.loss_divisor``. To multiply by it is
        what ``GradScaler.unscale_`` does. In a loop that leaves unscaling to the fused optimizer the kernel divides by
        the scale instead: the same bits if the scale is a power of two, as it is by default; else up to one unit in the
        last place of a gradient.
        """
        if self.recovers:
            return (self.scale.to(self._wide).reciprocal() * correction).float()
        return None if correction == 1 else torch.full_like(self.scale, correction)

    def update(self, finite: Tensor) -> None:
        """Adapt the scale to whether this step's gradients were ``finite`` (bool scalar on the device)."""
        if (rule := self.rule) is None:
            return
        good_steps = (self.good_steps + 1) * finite
        grow = good_steps == rule.interval
        scale = self.scale.to(self._wide)
        larger = (scale * rule.growth).float()
        kept = torch.where(grow & torch.isfinite(larger), larger, self.scale)
        smaller = (scale * rule.backoff).float().clamp(min=rule.floor)
        self.scale = torch.where(finite, kept, smaller)
        self.good_steps = good_steps * ~grow

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the state that decides its next change."""
        return {"scale": self.scale.item()} | ({} if self.rule is None else {"good_steps": self.good_steps.item()})

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what ``state_dict`` returned."""
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state.get("good_steps", 0))


@dataclass
class Scaler:
    """The ``scaler`` config group; this base is ``scaler=none``."""

    kind: ClassVar[str] = "none"
    force: bool = False
    """Allow a scaler that does not fit the precision, to demonstrate the effect."""

    @property
    def floor(self) -> float:
        """The scale at which a further overflow ends the run, see ``Monitor``."""
        return 0.0

    def check(self, format: Format) -> None:
        """Check that the scaler fits the precision, unless ``force``.

        Raises:
            UserError: fp16 without a scaler, or a scaler with a precision whose range is fp32's.
        """
        if self.force or self.kind == AutoScaler.kind or format.needs_loss_scale == (self.kind != Scaler.kind):
            return
        if format.needs_loss_scale:
            raise UserError(
                f"scaler=none with precision={format.name} silently loses gradients below 2^-24",
                "scaler=auto",
                "scaler=none scaler.force=true",
            )
        range = "more than fp32's range" if format.wide else "fp32's range"
        reason = "numbers have scales of their own" if format.number.scaled else f"{format.number.name} has {range}"
        raise UserError(
            f"scaler={self.kind} with precision={format.name}: {reason}, so scaling is not needed",
            "scaler=auto",
            f"scaler={self.kind} scaler.force=true",
        )

    def build(self, format: Format, device: torch.device) -> LossScale:
        """Return the run's loss scale."""
        return LossScale(device)


@dataclass
class Scaling(Scaler):
    """The base of the choices that scale the loss, and so skip the steps that overflow."""

    max_consecutive_skips: int = 25
    """Consecutive steps that may overflow and be skipped; one more ends the run."""

    def __post_init__(self) -> None:
        check_number("scaler.max_consecutive_skips", self.max_consecutive_skips)


@dataclass
class StaticScaler(Scaling):
    """``scaler=static``: a fixed scale."""

    kind: ClassVar[str] = "static"
    scale: float = 1024.0
    """The loss scale."""

    def __post_init__(self) -> None:
        if not 0 < self.scale <= _LARGEST:
            raise UserError(f"scaler.scale={self.scale} must be a positive number that fp32 holds, such as 1024")
        super().__post_init__()

    def build(self, format: Format, device: torch.device) -> LossScale:
        return LossScale(device, self.scale)


@dataclass
class DynamicScaler(Scaling):
    """``scaler=dynamic``: the defaults are torch.amp.GradScaler's."""

    kind: ClassVar[str] = "dynamic"
    init: float = 65536.0
    """Initial loss scale."""
    growth: float = 2.0
    """The scale grows by this factor after ``interval`` steps without an overflow."""
    backoff: float = 0.5
    """The scale shrinks by this factor at an overflow."""
    interval: int = 2000
    """Consecutive steps without an overflow before the scale grows."""
    floor_scale: float = 2.0**-10
    """The smallest scale; an overflow at this scale ends the run."""

    def __post_init__(self) -> None:
        if not 0 < self.init <= _LARGEST:
            raise UserError(f"scaler.init={self.init} must be a positive number that fp32 holds, such as 65536")
        check_range("scaler.growth", self.growth, "(1, inf)")
        check_range("scaler.backoff", self.backoff, "(0, 1)")
        check_number("scaler.interval", self.interval)
        if not 0 < self.floor_scale <= self.init:
            raise UserError(
                f"scaler.floor_scale={self.floor_scale} must be above 0 and at most scaler.init={self.init}"
            )
        super().__post_init__()

    @property
    def floor(self) -> float:
        return torch.tensor(self.floor_scale, dtype=torch.float32).item()  # as the scale, which it is compared with

    def build(self, format: Format, device: torch.device) -> LossScale:
        return LossScale(device, self.init, self)


@dataclass
class AutoScaler(DynamicScaler):
    """``scaler=auto``: dynamic where gradients are computed in fp16, none for every other precision."""

    kind: ClassVar[str] = "auto"

    def build(self, format: Format, device: torch.device) -> LossScale:
        return super().build(format, device) if format.needs_loss_scale else LossScale(device)
