"""Trainings in this process: many short ones, each of which needs no seconds to start."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import replace

from evidence.measures import curve_of
from evidence.runs import Arm, Runner, merge_overrides
from mantissa.display import loss
from mantissa.verdict.runs import Run
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.hardware import threads
from trainer.run.fit import release_memory
from trainer.trainer import Trainer


class InProcess(Runner):
    """Trains arms in this process. Losses are those of train.py; speed and memory are not measured."""

    def run(self, arm: Arm, seed: int) -> Run:
        """Train an arm, up to what is not finite and nothing recovers."""
        began = time.monotonic()
        config = replace(_composed(*merge_overrides(self.common, arm.overrides)), seed=seed + arm.seed_shift)
        points: list[tuple[int, float]] = []
        skipped, failure = 0, ""
        release_memory()  # of the run before
        with threads(config.threads):
            trainer = Trainer.from_config(config)
            try:
                for microbatches in trainer.batches():
                    record = trainer.train_step(microbatches)
                    skipped += bool(record.skipped)
                    if skipped and not trainer.loss_scale.recovers:
                        failure = f"step {record.step}: the gradients are not finite"
                        break
                    if trainer.plan.evaluates(record.step):
                        points.append((record.step, trainer.evaluate()["loss"]))
            finally:
                trainer.close()
        seconds = time.monotonic() - began
        if not failure and not math.isfinite(points[-1][1]):
            failure = "the final loss is not finite"
        if failure:
            return Run(arm.label, seed, {"loss": None}, seconds, failure, f"diverged: {failure}")
        value, curve = points[-1][1], curve_of(*zip(*points, strict=True))
        values: dict[str, float | None] = {"loss": value, "skipped": skipped}
        return Run(arm.label, seed, values, seconds, shown=f"loss {loss(value)}", curve=curve)


@functools.cache
def _composed(*overrides: str) -> Config:
    """Return the config of all runs of an arm: Hydra takes longer than a short training."""
    return compose(overrides)
