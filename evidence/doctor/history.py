"""How the loss of a run went by its record, and from which step on a doctor looks at it."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mantissa.display import loss as shown
from trainer.files import METRICS_FILE, read_json_lines

_BEFORE = 24
"""Steps before the loss left its course, from which on training is followed."""
_FLAT = 0.03
"""Share of the first loss up to which a difference is none."""
_FEWEST = 20
"""Steps from which on a run can be said to have learned nothing."""
_LEAST = 10
"""Recorded losses from which on their usual change says how much is noise."""
_SOME = 4
"""Recorded losses from which on a run may have learned nothing if none is lower than the first."""
_TIMES = 5.0
"""How many times the usual change from one recorded loss to the next is no progress."""


def before(step: int) -> int:
    """Return the number of the step from which on training is followed up to a step, and as far beyond."""
    return max(1, step - _BEFORE)


class History(NamedTuple):
    """What a record says of a run."""

    start: int
    """Number of the step from which on training is followed: some before the loss left, or may have left, its course;
    the step itself: it did not."""
    wrong: str
    """How the loss went wrong, in words; empty: it did not, as far as is recorded."""


def read_history(folder: Path, at: int, failed: bool) -> History:
    """Read the recorded losses of a run.

    Args:
        folder: of the run.
        at: number of the step at which it failed, or which follows its last one.
        failed: whether it failed there; else it went wrong only where its last losses say so.

    Raises:
        UserError: the record cannot be read.
    """
    recorded = [(line["step"], line["loss"]) for line in read_json_lines(folder / METRICS_FILE) if "loss" in line]
    losses = {step: value for step, value in recorded if step < at and value is not None}
    if not losses:
        return History(before(at) if failed else at, "")
    steps, values = list(losses), list(losses.values())
    if failed:  # from its first loss that was not finite, whose step may have been skipped, as those after it
        at = min((step for step, value in recorded if value is None and step > steps[-1]), default=at)
    return _failed(steps, values, at) if failed else _ended(steps, values, at)


def _failed(steps: list[int], values: list[float], at: int) -> History:
    """Return since when a run had lost half of what it had learned, before it failed."""
    best = min(values)
    kept = best + max(values[0] - best, _FLAT * abs(values[0])) / 2
    if values[-1] <= kept:
        return History(before(at), "")
    last = max(step for step, value in zip(steps, values, strict=True) if value <= kept)
    return History(before(last), _words(steps, values, values[-1]))


def _ended(steps: list[int], values: list[float], at: int) -> History:
    """Return where a run that took all its steps stopped learning; single losses vary, so means of many count."""
    if steps[-1] < _FEWEST or len(values) < _SOME:
        return History(at, "")
    if len(values) < _LEAST:  # it may have learned nothing, which training from its beginning tells
        return History(at if values[0] - min(values) > _FLAT * abs(values[0]) else 1, "")
    few, third = max(1, len(values) // 10), max(1, len(values) // 3)
    means = [statistics.fmean(values[place : place + few]) for place in range(0, len(values) - few + 1, few)]
    began, best, end = min(values[0], means[0]), min(means), statistics.fmean(values[-third:])
    varies = statistics.median(abs(one - other) for one, other in pairwise(values)) / math.sqrt(few)
    learned, flat = began - best, max(_FLAT * abs(began), _TIMES * varies)
    if learned > flat and end <= best + learned / 2 + flat:
        return History(at, "")
    lowest = steps[means.index(best) * few] if learned > flat else 1
    return History(before(lowest), _words(steps, values, end, f"on average from step {steps[-third]} on"))


def _words(steps: list[int], values: list[float], end: float, where: str = "") -> str:
    where = where or f"at step {steps[-1]}"
    wrong = f"the recorded loss goes from {shown(values[0])} at step {steps[0]} to {shown(end)} {where}"
    lowest = steps[values.index(min(values))]
    return wrong + (f"; its lowest is {shown(min(values))}, at step {lowest}" if lowest not in steps[:1] else "")
