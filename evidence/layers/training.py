"""Trainings in this process: many short ones, each of which needs no seconds to start."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from evidence.doctor.step import step_of
from evidence.runs import Arm, Runner, merge_overrides
from mantissa.display import loss
from mantissa.doctor.module_errors import local_errors
from mantissa.verdict.runs import Curve, Run
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.hardware import threads
from trainer.run.fit import release_memory
from trainer.trainer import Trainer


class Trained(NamedTuple):
    """A training that has ended."""

    trainer: Trainer
    curve: Curve
    """Of the validation losses."""
    skipped: int
    """Steps that the loss scale skipped."""
    failure: str
    """What was not finite; empty: nothing."""


class InProcess(Runner):
    """Trains arms in this process. Losses are those of train.py; speed and memory are not measured."""

    def run(self, arm: Arm, seed: int) -> Run:
        began = time.monotonic()
        ended = self.trained(arm, seed)
        seconds, curve, failure = time.monotonic() - began, ended.curve, ended.failure
        if failure:
            return Run(arm.label, seed, {"loss": None}, seconds, failure, f"diverged: {failure}")
        value = curve[1][-1]
        values: dict[str, float | None] = {"loss": value, "skipped": ended.skipped}
        return Run(arm.label, seed, values, seconds, shown=f"loss {loss(value)}", curve=curve)

    def trained(self, arm: Arm, seed: int) -> Trained:
        """Train an arm, up to what is not finite and nothing recovers."""
        config = replace(_composed(*merge_overrides(self.common, arm.overrides)), seed=seed + arm.seed_shift)
        steps: list[float] = []
        losses: list[float] = []
        skipped = 0
        release_memory()  # of the run before
        with threads(config.threads):
            trainer = Trainer.from_config(config)
            try:
                for microbatches in trainer.batches():
                    record = trainer.train_step(microbatches)
                    skipped += bool(record.skipped)
                    if skipped and not trainer.loss_scale.recovers:
                        why = f"step {record.step}: the gradients are not finite"
                        return Trained(trainer, (steps, losses), skipped, why)
                    if trainer.plan.evaluates(record.step):
                        steps.append(record.step)
                        losses.append(trainer.evaluate()["loss"])
            finally:
                trainer.close()
        failure = "" if math.isfinite(losses[-1]) else "the final loss is not finite"
        return Trained(trainer, (steps, losses), skipped, failure)

    def errors(self, arm: Arm, seed: int, layers: Sequence[str]) -> dict[str, float]:
        """Return for each layer its worst local error in the first step after an arm's training, in terms of its bound.

        Above 1 it is more than the format makes unavoidable. See ``mantissa.doctor.module_errors``.
        """
        worst = dict.fromkeys(layers, 0.0)
        for row in local_errors(step_of(self.trained(arm, seed).trainer)).rows:
            if row.module in worst:
                worst[row.module] = max(worst[row.module], row.ratio)
        return worst


@functools.cache
def _composed(*overrides: str) -> Config:
    """Return the config of all runs of an arm: Hydra takes longer than a short training."""
    return compose(overrides)
