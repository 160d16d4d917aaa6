"""Whether the disk has room for what a run keeps, before it takes its first step."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from mantissa.display import size
from trainer.checkpoint.store import SPARE_BYTES
from trainer.config.schema import Config
from trainer.config.step import Plan
from trainer.errors import RunError, UserError
from trainer.parallel.single import Parallel
from trainer.run.memory.forecast import forecast

_ROUGH = 24
"""Bytes of a parameter in a checkpoint, at most: fp32 weights, masters, averages, and three states of the optimizer."""


def check_disk(config: Config, plan: Plan, parameters: int, averaged: bool) -> None:
    """Raise UserError where the free disk space is less than a new run needs for its checkpoints and its export.

    The config is as composed. Where weights are ``averaged``, their averages are exported, in fp32. Forecasting sizes
    takes seconds: only where a rough bound is above what is free.
    """
    options, folder = config.checkpoint, Path(config.output_dir).expanduser().absolute()
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    copies = _copies(config, plan)
    rough = _ROUGH * parameters * (copies + 1) + SPARE_BYTES
    if not options.enabled or disk.free > rough or not disk.total:  # some file systems do not tell
        return
    try:
        held = forecast(replace(config, parallel=Parallel())).highest
    except RunError:  # it cannot be forecast; the writer reports what does not fit
        return
    export = held["buffers"] + (4 * parameters if averaged else held["weights"])
    each = held["buffers"] + held["weights"] + held["optimizer"]
    # best/ is written between two checkpoints, in the space of the next one.
    needed = copies * each + (export if copies < options.keep + 2 else 0) + SPARE_BYTES
    if disk.free < needed:
        raise UserError(
            f"output_dir={config.output_dir}: the disk has {size(disk.free)} free, but {size(needed)} are needed for "
            f"best/, logs and {copies} checkpoints of {size(each)}, including the one being written; free disk "
            "space, choose another with output_dir=…, or keep nothing with checkpoint=none"
        )


def _copies(config: Config, plan: Plan) -> int:
    """Return how many checkpoints there can be at once: the newest, the best, and one that is being written."""
    every = plan.save_every if isinstance(config.checkpoint.every, str) else config.checkpoint.every
    most, interval = config.checkpoint.keep + 2, max(Fraction(1), plan.eval_every)
    evaluated = {min(plan.steps, math.ceil(n * interval)) for n in range(1, min(most, plan.evaluations) + 1)}
    due = range(every, plan.steps + 1, every)[:most] if every else ()
    return min(most, len(evaluated.union(due)))
