"""The learning-rate range test: one short training whose learning rate rises exponentially.

Smith, Cyclical Learning Rates for Training Neural Networks, 2017 (arXiv 1506.01186), and Super-Convergence, 2018
(arXiv 1708.07120), with a linear rise. The exponential rise, the smoothed loss and the two suggestions are those of
fastai's ``lr_find`` (Howard and Gugger, fastai: A Layered API for Deep Learning, 2020, arXiv 2002.04688).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from trainer.config.schema import Config
from trainer.hardware import Hardware
from trainer.optim.schedule import Schedule
from trainer.trainer import StepRecord, Trainer

SMOOTHING = 0.9
"""Weight of the past in the smoothed loss, which follows the loss about nine steps later. (With fastai's 0.98 it would
be 49 steps: half of a test with 100.)"""
TOO_HIGH = 4.0
"""The test ends where the smoothed loss is so many times its lowest value (as in fastai)."""
FIRST = 10
"""Steps at the start from which nothing is suggested: the smoothed loss is the mean of a few batches there."""


@dataclass
class Exponential(Schedule):
    """From ``first`` times the peak to the peak, by the same factor at every step."""

    kind: ClassVar[str] = "exponential"
    first: float = 1e-8

    def warmup(self, steps: int) -> int:
        return 0

    def factor(self, step: int, steps: int) -> float:
        return float(self.first ** (1 - step / max(1, steps - 1)))


@dataclass
class Curve:
    """The result of one test."""

    label: str
    """The overrides in which it differs from the other tests of a command, such as ``precision=bf16``."""
    lr: list[float] = field(default_factory=list)
    """Of each step."""
    loss: list[float] = field(default_factory=list)
    """The training loss of each step, before its update; the last one may be not finite."""
    smoothed: list[float] = field(default_factory=list)
    """The exponential average of the finite losses, without its bias towards 0 at the start."""
    skipped_steps: int = 0
    ended: str = "at the last step"

    def add(self, record: StepRecord, recovers: bool) -> bool:
        """Take a step's record; return whether the test continues.

        Args:
            record: of the step.
            recovers: whether there is a loss scale that makes up for gradients that are not finite.
        """
        loss, skipped = float(record.loss), bool(record.skipped)
        self.lr.append(record.lr)
        self.loss.append(loss)
        self.skipped_steps += skipped
        if not math.isfinite(loss) or (skipped and not recovers):
            self.ended = "the loss or its gradients were not finite"
            return False
        done = len(self.smoothed)
        before = self.smoothed[-1] * (1 - SMOOTHING**done) if done else 0.0
        self.smoothed.append((SMOOTHING * before + (1 - SMOOTHING) * loss) / (1 - SMOOTHING ** (done + 1)))
        if self.smoothed[-1] > TOO_HIGH * min(self.smoothed):
            self.ended = f"the smoothed loss was {TOO_HIGH:g} times its lowest value"
            return False
        return True

    @property
    def lowest(self) -> int | None:
        """The index of the lowest smoothed loss; None: it did not fall."""
        if len(self.smoothed) <= FIRST:
            return None
        lowest = int(np.argmin(self.smoothed))
        return lowest if lowest > FIRST else None

    @property
    def steepest(self) -> int | None:
        """The index where the smoothed loss falls fastest over the logarithm of the learning rate; None: nowhere."""
        if self.lowest is None:
            return None
        slopes = np.gradient(np.array(self.smoothed), np.log(self.lr[: len(self.smoothed)]))
        return FIRST + int(np.argmin(slopes[FIRST : self.lowest]))

    def suggestions(self) -> dict[str, float]:
        """Return learning rates by the reason for them, in two digits; none where the loss did not fall."""
        if self.lowest is None or self.steepest is None:
            return {}
        found = {"the loss falls fastest": self.lr[self.steepest], "a tenth of the lowest": self.lr[self.lowest] / 10}
        return {reason: float(f"{lr:.1e}") for reason, lr in found.items()}


def range_test(
    config: Config, hardware: Hardware, lowest: float, highest: float, label: str, show: Callable[[str], None]
) -> Curve:
    """Train ``config.steps`` optimizer steps at most, and write nothing.

    Args:
        config: as composed; its learning rate and schedule are replaced.
        hardware: where it runs.
        lowest: learning rate of the first step.
        highest: that of the last.
        label: see ``Curve.label``.
        show: called with lines of progress.
    """
    rises = replace(
        config,
        optimizer=replace(config.optimizer, lr=highest),
        schedule=Exponential(first=lowest / highest),
    )
    trainer = Trainer.from_config(rises, hardware)
    curve = Curve(label)
    try:
        for record in _steps(trainer):
            goes_on = curve.add(record, trainer.loss_scale.recovers)
            if record.step % 20 == 0 or not goes_on or record.step == trainer.plan.steps:
                show(f"  step {record.step}/{trainer.plan.steps}  lr {record.lr:.2e}  loss {curve.loss[-1]:.4f}")
            if not goes_on:
                break
    finally:
        trainer.close()
    return curve


def _steps(trainer: Trainer) -> Iterator[StepRecord]:
    for microbatches in trainer.batches():
        yield trainer.train_step(microbatches)
