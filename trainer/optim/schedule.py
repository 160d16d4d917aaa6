"""The ``schedule`` config group: the learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from trainer.errors import check_number, check_range, no_effect


@dataclass
class Schedule:
    """The base is ``schedule=constant``: linear warm-up, then the peak learning rate to the end."""

    kind: ClassVar[str] = "constant"
    warmup_steps: int | str = "auto"
    """Linear warm-up steps; auto: a twentieth of the run, at most 2000."""

    def __post_init__(self) -> None:
        check_number("schedule.warmup_steps", self.warmup_steps, 0)

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of ``steps``."""
        return min(steps // 20, 2000) if isinstance(self.warmup_steps, str) else self.warmup_steps

    def factor(self, step: int, steps: int) -> float:
        """Return the multiple of the peak learning rate that step ``step`` (from 0) of ``steps`` uses."""
        warmup = self.warmup(steps)
        if step < warmup:
            return (step + 1) / warmup
        return self.after_warmup(step - warmup, max(1, steps - warmup))

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the multiple for step ``step`` of the ``steps`` that follow the warm-up."""
        return 1.0


@dataclass
class Linear(Schedule):
    """``schedule=linear``: a straight line from the peak to ``final`` (Devlin et al., BERT, 2019)."""

    kind: ClassVar[str] = "linear"
    final: float = 0.0
    """Learning rate at the end, one step after the last, as a fraction of the peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("schedule.final", self.final, "[0, 1]")

    def after_warmup(self, step: int, steps: int) -> float:
        return 1.0 + (self.final - 1.0) * min(1.0, step / steps)


@dataclass
class Cosine(Linear):
    """``schedule=cosine``: half a cosine from the peak down toward ``final`` (Loshchilov and Hutter, SGDR, 2017)."""

    kind: ClassVar[str] = "cosine"
    final: float = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1 - self.final) * _half_cosine(min(1.0, step / steps))


@dataclass
class OneCycle(Schedule):
    """``schedule=onecycle``: half a cosine up to the peak, then half a cosine down to almost nothing.

    Smith and Topin, Super-Convergence, 2019, with the values of ``torch.optim.lr_scheduler.OneCycleLR`` in its two
    phases, for the learning rate alone: momentum (``betas[0]``) is not cycled.
    """

    kind: ClassVar[str] = "onecycle"
    rise: float = 0.3
    """Fraction of the steps in which the learning rate rises; torch's ``pct_start``."""

    def __post_init__(self) -> None:
        if self.warmup_steps != "auto":
            why = "schedule.rise is the fraction of the steps in which the learning rate of schedule=onecycle rises"
            raise no_effect(f"schedule.warmup_steps={self.warmup_steps}", why, "schedule.warmup_steps=auto")
        check_range("schedule.rise", self.rise, "(0, 1)")

    def warmup(self, steps: int) -> int:
        return int(self.rise * steps)

    def factor(self, step: int, steps: int) -> float:
        first = 1 / 25.0  # as torch's, and the last is a ten-thousandth of it
        peak, last = self.rise * steps - 1, steps - 1  # the steps of the highest and of the lowest rate
        if 0 < peak >= step:
            return 1 + (first - 1) * _half_cosine(step / peak)
        final = first / 1e4
        return final + (1 - final) * _half_cosine(min(1.0, (step - peak) / (last - peak)))


@dataclass
class WarmupStableDecay(Linear):
    """``schedule=wsd``: the peak, then a linear decay over the last ``decay`` of the run (Hu et al., MiniCPM, 2024)."""

    kind: ClassVar[str] = "wsd"
    decay: float = 0.2
    """Fraction of the steps after warm-up in which the learning rate falls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("schedule.decay", self.decay, "[0, 1]")

    def after_warmup(self, step: int, steps: int) -> float:
        start = steps * (1 - self.decay)
        if step < start:
            return 1.0
        progress = min(1.0, (step - start) / max(1.0, steps - start))
        return 1.0 + (self.final - 1.0) * progress


def _half_cosine(progress: float) -> float:
    """Fall from 1 to 0 while ``progress`` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))
