"""The learning-rate range test: one short training whose learning rate rises exponentially.

Smith, Cyclical Learning Rates for Training Neural Networks, 2017 (arXiv 1506.01186), and Super-Convergence, 2018
(arXiv 1708.07120), with a linear rise. The exponential rise, the smoothed loss and the two suggestions are those of
fastai's ``lr_find`` (Howard and Gugger, fastai: A Layered API for Deep Learning, 2020, arXiv 2002.04688).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np

from mantissa.display import counted
from trainer.config.compose import combinations, compose
from trainer.config.options import ONE_PROCESS, Overriding, parse
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import RunError, UserError
from trainer.hardware import detect
from trainer.run_folder import RunFolder
from trainer.tracking.plots import COLORS, INK, QUIET, RULE, bare_figure, plain
from trainer.trainer import StepRecord, Trainer

FIRST = 10
"""Steps from which nothing is suggested: their loss is the mean of few batches."""
SMOOTHING = 0.9
"""Weight of the past in the smoothed loss, which follows the loss about nine steps later. (With fastai's 0.98 it would
be 49 steps: half of a test with 100.)"""
TOO_HIGH = 4.0
"""The test ends where the smoothed loss is so many times its lowest value (as in fastai)."""


@dataclass
class RangeOptions(Overriding):
    """Options of scripts/lr_range.py."""

    fixed = ONE_PROCESS | dict.fromkeys(("optimizer.lr", "schedule", "resume", "epochs"), "the test sets it itself")

    min: float = 1e-7
    max: float = 10.0
    steps: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.min < self.max < math.inf:
            raise UserError(
                f"min={self.min:g} and max={self.max:g} must be learning rates above 0, min the lower one",
                f"min={RangeOptions.min:g} max={RangeOptions.max:g}",
            )
        if self.steps <= 2 * FIRST:
            raise UserError(f"steps={self.steps} must be more than {2 * FIRST} for a curve", "steps=100")


def main(arguments: list[str]) -> int:
    """Run the test for every combination of the overrides, and print what to paste.

    Raises:
        UserError: a range that is none, an option that the test sets itself, or a mistake of train.py's.
        RunError: nothing can be suggested.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, RangeOptions, "overrides")
    configs = {
        label: compose(overrides) for label, overrides in combinations([*overrides, f"steps={options.steps}"]).items()
    }
    for config in configs.values():
        config.precision.check_single("a test is of one format")
        plan_of(config, detect(config.device))  # mistakes before any work
    first = next(iter(configs.values()))
    curves = []
    for label, config in configs.items():
        print(f"{label or config.name}: {options.steps} steps, lr from {options.min:g} to {options.max:g}")
        curve = range_test(config, options.min, options.max, label)
        skipped = f", {counted(curve.skipped_steps, 'step')} skipped by the loss scale" if curve.skipped_steps else ""
        print(f"  ended after {counted(len(curve.lr), 'step')}: {curve.ended}{skipped}")
        curves.append(curve)
    name = first.run_name or (first.name if len(configs) == 1 else first.recipe.name)
    folder = RunFolder.create(f"{first.output_dir}/lr_range", name).path
    draw(curves, f"Learning-rate range test: {name}").savefig(folder / "lr_range.png")
    print(f"\nplot {folder / 'lr_range.png'}")
    for curve in curves:
        print(f"\n{curve.label or 'paste one of'}")
        for reason, lr in curve.suggestions().items():
            print(f"  optimizer.lr={lr:g}  {reason}")
        if not curve.suggestions():
            print("  the loss does not fall")
    if not any(curve.suggestions() for curve in curves):
        raise RunError("the loss does not fall within this range: set a larger max, or more steps (steps=300)")
    return 0


class RangeTrainer(Trainer):
    """A trainer whose learning rate rises from ``lowest`` to ``highest``, by the same factor at every step."""

    lowest: float
    highest: float

    def lr(self, step: int) -> float:
        return float(self.highest * (self.lowest / self.highest) ** (1 - step / (self.plan.steps - 1)))


@dataclass
class Curve:
    """The result of one test."""

    label: str
    """Overrides in which it differs from the other tests of a command, such as ``precision=bf16``."""
    lr: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    loss: list[float] = field(default_factory=list)
    """Training loss of each step, before its update; the last one may be not finite."""
    smoothed: list[float] = field(default_factory=list)
    """Exponential average of the finite losses, without its bias towards 0 at the start."""
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

    def suggestions(self) -> dict[str, float]:
        """Return learning rates by the reason for them, in two digits; none where the loss did not fall."""
        lowest = int(np.argmin(self.smoothed)) if self.smoothed else 0
        if lowest <= FIRST:
            return {}
        slopes = np.gradient(np.array(self.smoothed), np.log(self.lr[: len(self.smoothed)]))
        steepest = FIRST + int(np.argmin(slopes[FIRST:lowest]))
        rates = {"the loss falls fastest": self.lr[steepest], "a tenth of the lowest": self.lr[lowest] / 10}
        return {reason: float(f"{lr:.1e}") for reason, lr in rates.items()}


def range_test(config: Config, lowest: float, highest: float, label: str) -> Curve:
    """Train ``config.steps`` optimizer steps at most, print some of them, and write nothing.

    Args:
        config: as composed; its learning rate and schedule have no effect.
        lowest: learning rate of the first step.
        highest: that of the last.
        label: see ``Curve.label``.
    """
    trainer = RangeTrainer.from_config(config)
    trainer.lowest, trainer.highest = lowest, highest
    curve = Curve(label)
    try:
        for microbatches in trainer.batches():
            record = trainer.train_step(microbatches)
            goes_on = curve.add(record, trainer.loss_scale.recovers)
            if record.step % 20 == 0 or not goes_on or record.step == trainer.plan.steps:
                print(f"  step {record.step}/{trainer.plan.steps}  lr {record.lr:.2e}  loss {curve.loss[-1]:.4f}")
            if not goes_on:
                break
    finally:
        trainer.close()
    return curve


def draw(curves: list[Curve], title: str) -> Any:
    """Return the figure: every loss faint, the smoothed ones strong, a line for each suggestion."""
    figure, axes = bare_figure(8, 4.5)
    axes.set_title(plain(title), loc="left", color=INK, fontsize=12)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate", color=QUIET)
    axes.set_ylabel("training loss", color=QUIET)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    for curve, color in zip(curves, cycle(COLORS), strict=False):
        axes.plot(curve.lr, curve.loss, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(curve.lr[: len(curve.smoothed)], curve.smoothed, color=color, label=plain(curve.label) or "smoothed")
        for (reason, lr), style in zip(curve.suggestions().items(), ("-", "--"), strict=False):
            axes.axvline(lr, label=f"{reason}: {lr:#.2g}", color=color, linewidth=1, linestyle=style)
    if finite := [value for curve in curves for value in curve.loss if math.isfinite(value)]:
        low, first = min(finite), max(curve.smoothed[0] for curve in curves if curve.smoothed)
        room = max(first - low, 1e-3 * abs(first), 1e-9)
        axes.set_ylim(low - 0.05 * room, first + 0.25 * room)  # what rises far above would flatten the rest
    axes.legend(frameon=False, labelcolor=INK, loc="lower left")
    return figure
