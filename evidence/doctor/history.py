"""How the loss of a run went by its record, and from which step on a doctor looks at it."""

from __future__ import annotations

import math
import statistics
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


def before(step: int) -> int:
    """Return the number of the step from which on training is followed up to a step, and as far beyond."""
    return max(1, step - _BEFORE)


class History(NamedTuple):
    """What a record says of a run."""

    start: int
    """Number of the step from which on training is followed: some before the loss left its course."""
    wrong: str
    """How the loss went wrong, in words; empty: it did not, as far as is recorded."""


def read_history(folder: Path, at: int, ended: bool) -> History:
    """Read the recorded losses of a run.

    Args:
        folder: of the run.
        at: number of the step at which it failed, or which follows its last one.
        ended: whether it failed there; else it went wrong only where its last losses say so.

    Raises:
        UserError: the record cannot be read.
    """
    recorded = [(line["step"], line["loss"]) for line in read_json_lines(folder / METRICS_FILE) if "loss" in line]
    losses = {step: value for step, value in recorded if step < at and value is not None}
    if not losses:
        return History(before(at), "")
    (first, began), (last, _) = next(iter(losses.items())), list(losses.items())[-1]
    lowest = min(losses, key=losses.__getitem__)
    best = losses[lowest]

    # What it ends with: of a run that failed the last loss, else the mean of many, which vary.
    values = list(losses.values())
    end = values[-1] if ended else statistics.fmean(values[-max(1, len(values) // 3) :])

    # It has left its course where it has lost half of what it had learned, and has none where it learned nothing.
    flat = _FLAT * abs(began)
    kept = best + max(began - best, flat) / 2
    if end <= kept and (ended or began - best > flat or last < _FEWEST):
        return History(before(at), "")
    wrong = f"the recorded loss goes from {shown(began)} at step {first} to {shown(end)} at step {last}"
    if lowest not in (first, last):
        wrong += f"; its lowest is {shown(best)}, at step {lowest}"
    kept_at = max((step for step, value in losses.items() if value <= kept), default=1) if ended else lowest
    return History(before(kept_at), wrong if math.isfinite(end) else "")
