"""The training logs of any trainer, JSON lines or CSV, and the first step at which two of them differ."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mantissa.display import counted, shortened
from trainer.errors import UserError

STEPS = (
    *("step", "global_step", "trainer/global_step", "train/global_step", "_step", "steps"),
    *("iteration", "iterations", "iter", "iter_num", "it", "update", "epoch"),
)
"""Names of the column that counts steps, in any case: the first that a log has."""
EPOCH = "epoch"
_MEASURED = re.compile(
    r"time|times|walltime|timestamp|runtime|elapsed|duration|dt|latency|throughput|speed|fps|tps|stall|"
    r"mem|memory|allocated|reserved|cpu|gpu|mfu|flops|tflops|system|per (s|sec|second|day)"
)
"""Words, or two, in the names of what is measured of the machine, which no two runs have in common."""
LARGE = 1e-3
"""Relative difference from which on one is called large."""

Points = dict[float, dict[str, float]]
"""Values by name, by step, in ascending order; NaN: not finite, where the log has null."""


class Log(NamedTuple):
    """A training log."""

    counted_by: str
    """The name of the column of the steps."""
    points: Points
    notes: list[str]
    """What was not taken as it stands, in words."""


class Pair(NamedTuple):
    """The values of a metric in both logs, at one step."""

    name: str
    a: float
    b: float

    @property
    def relative(self) -> float:
        """``|a - b| / max(|a|, |b|)``; 0: the same value, infinite: only one is finite."""
        if self.a == self.b or (math.isnan(self.a) and math.isnan(self.b)):
            return 0.0
        finite = math.isfinite(self.a) and math.isfinite(self.b)
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b)) if finite else math.inf


class Compared(NamedTuple):
    """Two logs, beside each other at the steps and of the metrics that both have."""

    steps: list[float]
    """Those with values that were compared."""
    names: list[str]
    """Those of the values that were compared."""
    values: int
    """How many were."""
    first: tuple[float, list[Pair]] | None
    """The first step at which any value differs, and all that do; None: none does."""
    large: tuple[float, list[Pair]] | None
    """Likewise, by more than ``LARGE``."""
    notes: list[str]
    """What was not compared, in words."""
    alone: bool
    """Whether a value of the training is in one log alone."""


def read_log(path: Path, step: str = "") -> Log:
    """Read a log.

    Args:
        path: of the file.
        step: name of the column that counts steps; of a log without it, the first of ``STEPS`` that it has.

    Raises:
        UserError: it cannot be read, or no column counts steps.
    """
    rows = _rows(path)
    cells = [{name: _number(cell) for name, cell in row.items()} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numbers = list(dict.fromkeys(name for row in cells for name, value in row.items() if value is not None))
    column = _column_of_steps(path, columns, numbers, step)

    points: Points = {}
    later = 0
    for row in cells:
        number = row.pop(column, None)
        if number is None or math.isnan(number):  # such as a first line with the configuration
            continue
        values = points.setdefault(number, {})
        for name, value in row.items():
            if value is None or name.removesuffix("_nonfinite") in row.keys() - {name}:  # a flag beside its null
                continue
            later += name in values and not _is_measured(name) and Pair(name, values[name], value).relative > 0
            values[name] = value
    notes = []
    if later:
        notes.append(f"{path}: {counted(later, 'value')} of a step that is there again: the last one counts")
    if texts := [name for name in columns if name not in numbers and any(row.get(name, "") != "" for row in rows)]:
        notes.append(f"{path}: not compared, no numbers: {shortened(texts)}")
    return Log(column, dict(sorted(points.items())), notes)


def compare(a: Log, b: Log, means: Collection[str] | None = None) -> Compared:
    """Put two logs beside each other: step by step, metric by metric.

    Args:
        a: the first one.
        b: the second one.
        means: metrics that are taken over all steps since the line before, so that they are compared where both logs
            have the same line before; None: which they are is not known.

    Raises:
        UserError: they have no step or no metric in common.
    """
    if (a.counted_by.lower() == EPOCH) != (b.counted_by.lower() == EPOCH):
        raise UserError(f"a counts by {a.counted_by}, and b by {b.counted_by}; give logs that count the same")
    if not (common := a.points.keys() & b.points):
        raise UserError(f"no step is in both logs: a has {_span(a)}, and b has {_span(b)}; give logs of the same steps")
    of_a, of_b = _lines_before(a), _lines_before(b)
    if not (both := [name for name in of_a if name in of_b and not _is_measured(name)]):
        raise UserError(
            f"the logs have no metric of the training in common: a has {shortened([*of_a]) or 'none'}, and b has "
            f"{shortened([*of_b]) or 'none'}; give logs with the same names"
        )

    # Every value that both have, in the order of the steps; of means, those over the same steps.
    shared = {name: of_a[name].keys() & of_b[name] for name in both}
    uneven = {name: {step for step in shared[name] if of_a[name][step] != of_b[name][step]} for name in both}
    taken = {name: shared[name] - uneven[name] if name in (means or ()) else shared[name] for name in both}
    pairs = {
        step: [Pair(name, at[name], b.points[step][name]) for name in both if step in taken[name]]
        for step, at in a.points.items()
        if step in common
    }
    if not (pairs := {step: values for step, values in pairs.items() if values}):
        raise UserError(f"no value of {shortened(both)} is in both logs at the same step; give logs of the same steps")
    differing = {step: [each for each in values if each.relative > 0] for step, values in pairs.items()}
    large = {step: [each for each in values if each.relative > LARGE] for step, values in differing.items()}

    # What is in one log alone is said, so that "equal" means no more than it does.
    notes, alone = [], False
    for which, log, own, other in (("a", a, of_a, of_b), ("b", b, of_b, of_a)):
        if more := len(log.points) - len(common):
            notes.append(f"not compared, only in {which}: {counted(more, 'step')} of {len(log.points):,}")
        if extra := [name for name in own if name not in other and not _is_measured(name)]:
            notes.append(f"not compared, only in {which}: {shortened(extra)}")
        lacking = {name: (own[name].keys() - other[name].keys()) & common for name in both}
        if at := {name: steps for name, steps in lacking.items() if steps}:
            first = shown_step(min(set().union(*at.values())))
            notes.append(f"not compared, only in {which} at step {first} or others: {shortened([*at])}")
        alone |= bool(more or extra or at)
    if never := [name for name in both if not taken[name]]:
        notes.append(f"not compared, at no step in both: {shortened(never)}")
    if means is None and any(uneven.values()):
        notes.append("the logs have other lines between: what is a mean since the line before differs by that alone")
    elif partly := [name for name in both if means and name in means and uneven[name]]:
        notes.append(f"compared only where both have the same line before, being means since then: {shortened(partly)}")
    if measured := [name for name in of_a if name in of_b and _is_measured(name)]:
        notes.append(f"not compared, of the machine: {shortened(measured, 6)}")
    return Compared(
        steps=list(pairs),
        names=[name for name in both if taken[name]],
        values=sum(map(len, pairs.values())),
        first=next(((step, values) for step, values in differing.items() if values), None),
        large=next(((step, values) for step, values in large.items() if values), None),
        notes=notes,
        alone=alone,
    )


def shown_step(step: float) -> str:
    """Return a step as logs write it: whole, where it is."""
    return f"{step:.0f}" if step == int(step) else repr(step)


def _span(log: Log) -> str:
    steps = list(log.points)
    return f"{shown_step(steps[0])} to {shown_step(steps[-1])}" if steps else "none"


def _lines_before(log: Log) -> dict[str, dict[float, float | None]]:
    """Return the steps that have a value, by the metric's name, each with the one before; None: it is the first."""
    found: dict[str, dict[float, float | None]] = {}
    for step, values in log.points.items():
        for name in values:
            steps = found.setdefault(name, {})
            steps[step] = next(reversed(steps), None)
    return found


def _is_measured(name: str) -> bool:
    words = re.sub(r"[^a-z]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()).split()
    return any(_MEASURED.fullmatch(text) for text in (*words, *map(" ".join, pairwise(words))))


def _number(cell: Any) -> float | None:
    """Return the number that a cell holds, NaN for null; None: it is something else."""
    if cell is None:
        return math.nan
    if isinstance(cell, bool) or not isinstance(cell, (int, float, str)):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None


def _column_of_steps(path: Path, columns: list[str], numbers: list[str], step: str) -> str:
    if step in numbers:
        return step
    lower = {name.lower(): name for name in reversed(numbers)}
    if (found := next((lower[name] for name in STEPS if name in lower), None)) is None:
        raise UserError(
            f"{path}: no column of numbers is called step, iteration, epoch or the like "
            f"({shortened(columns) or 'none'}); name the one that counts steps, step=NAME"
        )
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log, each with its cells by name; an empty text stands for no value.

    Raises:
        UserError: it cannot be read, or has no rows.
    """
    try:
        rows = list(READERS[path.suffix.lower()](path.read_text(encoding="utf-8-sig")))
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError('a row is no object, such as {"step": 1, "loss": 2.5}')
    except FileNotFoundError:
        raise UserError(f"there is no {path}; give the log of a run that has logged") from None
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({error}); give JSON lines, CSV, or a trainer_state.json") from None
    if not any(rows):
        raise UserError(f"{path} has no rows; give the log of a run that has logged")
    return rows


def _of_lines(text: str) -> list[Any]:
    rows = []
    *whole, last = text.split("\n")
    for number, line in enumerate(whole, 1):
        try:
            rows.append(json.loads(line or "{}"))
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
    with suppress(ValueError):  # it may be being written
        rows.append(json.loads(last))
    return rows


def _of_csv(text: str) -> list[dict[str, Any]]:
    rows = list(csv.DictReader(text.splitlines(), restkey="", restval="", strict=True))
    if any(isinstance(row.get(""), list) for row in rows):
        raise ValueError("a line has more cells than the heading")
    return rows


READERS: dict[str, Callable[[str], list[Any]]] = {
    ".jsonl": _of_lines,
    ".csv": _of_csv,
    ".json": lambda text: json.loads(text)["log_history"],  # trainer_state.json of transformers
}
"""What reads a log's text, by the end of the file's name."""
