"""From which step on a run is looked at, by the losses that it has recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from evidence.doctor.history import read_history

FALLS = {step: 4.0 / step**0.5 for step in range(1, 101)}
EXPLODES = {step: FALLS[step] if step <= 60 else 5.0 * step for step in range(1, 101)}
FLAT = {step: 4.0 + 0.01 * math.sin(step) for step in range(1, 101)}


def written(folder: Path, losses: dict[int, float]) -> Path:
    rows = [
        {"step": step, "time": 0.0, "loss": value if math.isfinite(value) else None} for step, value in losses.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("losses", "at", "failed", "start", "wrong"),
    [
        # A run that fails without a sign is followed from some steps before.
        (FALLS | {101: math.nan}, 101, True, 77, False),
        ({1: 4.0}, 2, True, 1, False),
        # One whose steps were skipped for long, from some steps before the first of them.
        (FALLS | dict.fromkeys(range(101, 151), math.inf), 151, True, 77, False),
        ({1: 5.5, 10: math.nan, 20: math.nan, 29: math.nan}, 29, True, 1, False),
        ({}, 9, True, 1, False),
        # One that has left its course, from before it did.
        (EXPLODES | {101: math.nan}, 101, True, 36, True),
        (EXPLODES, 101, False, 27, True),
        # One that has not learned anything, or got worse, from its beginning.
        (FLAT, 101, False, 1, True),
        ({step: 4.0 + step / 10 for step in range(1, 101)}, 101, False, 1, True),
        ({1: 4.0, 2: 90.0} | {step: 200.0 - step for step in range(3, 101)}, 101, False, 1, True),
        # A run that learns, or is too short to say.
        (FALLS, 101, False, 101, False),
        (dict.fromkeys(range(1, 10), 4.0), 10, False, 10, False),
        ({1: 13.9, 10: 9.2, 20: 10.7, 30: 9.2, 40: 10.1}, 41, False, 41, False),
        # One of a few records that may have learned nothing is followed from its beginning.
        ({1: 5.38, 10: 5.31, 20: 5.33, 30: 5.32, 40: 5.31}, 41, False, 1, False),
    ],
)
def test_where_a_run_is_looked_at(
    losses: dict[int, float], at: int, failed: bool, start: int, wrong: bool, tmp_path: Path
) -> None:
    history = read_history(written(tmp_path, losses), at, failed)
    assert (history.start, bool(history.wrong)) == (start, wrong), history
