"""What a measurement is given, and the rows that it yields."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evidence.turns import Times, interleave, stopwatch
from trainer.hardware import Hardware
from trainer.precision.kernels import not_timed_here

MARKDOWN = "| quantity | measured | target | how |\n|---|---|---|---|"
"""The heading of a table of rows on a page."""
_DIGITS = {"x": 3, "%": 2, "ms": 3, "s": 2, "images/s": 1}


@dataclass
class Row:
    """One line of the report."""

    name: str
    unit: str
    """``x``, ``%``, ``ms``, ``s`` or ``images/s``."""
    values: list[float]
    """One per repeat; empty: not measured."""
    measured: str
    """The command or config, and how it was measured."""
    target: float | None = None
    at_most: bool = True
    """Whether the target is an upper limit of the median."""
    lower_bound: bool = False
    """Whether values are lower bounds, and so is the median; an upper limit is then missed."""

    @property
    def median(self) -> float:
        """The median of ``values``."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None without a target or a measurement."""
        if self.target is None or not self.values:
            return None
        if self.at_most:
            return self.median <= self.target and not self.lower_bound
        return self.median >= self.target

    def text(self) -> str:
        """Return two lines: the figure with its range and verdict, and below it what was measured."""
        figure, spread, target = self._cells()
        verdict = f"target {target}: {'met' if self.met else 'MISSED'}" if self.values and target else ""
        return f"  {self.name:<52} {figure:>10}  {spread:<20} {verdict}".rstrip() + f"\n      {self.measured}"

    def markdown(self) -> str:
        """Return one row of a table with the columns ``MARKDOWN``."""
        figure, spread, target = self._cells()
        return f"| {self.name} | {f'{figure} {spread}'.strip()} | {target} | {self.measured} |"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self) | {"median": self.median if self.values else None, "met": self.met}

    def _cells(self) -> tuple[str, str, str]:
        """Return the median with its unit, the lowest and highest value, and the target."""
        target = ""
        if self.target is not None:
            target = f"{'≤' if self.at_most else '≥'} {self.target:g} {self.unit}".replace(" x", "x")
        if not self.values:
            return "–", "", target
        low, high, median = (
            f"{value:.{_DIGITS[self.unit]}f}" for value in (min(self.values), max(self.values), self.median)
        )
        figure = f"{'at least ' if self.lower_bound else ''}{median} {self.unit}"
        return figure.replace(" x", "x"), f"({low} to {high})", target


@dataclass
class Bench:
    """One run of the bench. A measurement takes it, and yields its rows as soon as each is known."""

    hardware: Hardware
    repeats: int
    folder: Path
    """Empty, and removed after the measurement."""
    modes: frozenset[str] = frozenset()
    """Precisions that are measured also in fp32 arithmetic."""
    text: str = ""
    """A file of text for ``nanogpt``; empty: the source of the standard library."""
    failures: dict[str, str] = field(default_factory=dict, init=False)
    """Errors by the part of the measurement that failed."""

    def failed(self, what: str, error: Exception) -> str:
        """Record that a part of the measurement failed, while the others go on; return the error in words."""
        self.failures[what] = f"{type(error).__name__}: {error}"
        return f"failed: {self.failures[what]}"

    def left_out(self, mode: str) -> str | None:
        """Return why a precision is not measured: its speed here is not that of its format; None: it is."""
        why = None if mode in self.modes else not_timed_here(mode, self.hardware)
        return f"left out: {why}; measured with modes={mode}" if why else None

    def time(self, works: Mapping[str, Callable[[], object]], repeats: int | None = None) -> Times:
        """Return the seconds of each piece of work, called in turns, ``repeats`` times after a warm-up."""

        def seconds(work: Callable[[], object]) -> float:
            return stopwatch(lambda _: work(), self.hardware.device)(1)

        return interleave({name: partial(seconds, work) for name, work in works.items()}, repeats or self.repeats)

    @property
    def mode(self) -> str:
        """The precision of measurements that compare no precisions: bf16, or fp32 where bf16 is left out."""
        return "fp32" if self.left_out("bf16") else "bf16"
