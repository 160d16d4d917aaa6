"""What a measurement is given, and the rows that it yields."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantissa.verdict import runs
from mantissa.verdict.statistics import mean_interval, ratio_interval
from trainer.hardware import Hardware
from trainer.precision.kernels import not_timed_here

ENDLESS = "steps=1000000"
"""Override for a trainer whose steps are taken by hand, so that its schedule does not end."""
_DIGITS = {"x": 3, "%": 2, "ms": 3, "s": 2, "nats": 2, "images": 0}
Times = dict[str, list[float]]
"""Seconds of each block by its name, one number per repeat."""


@dataclass
class Row:
    """One line of the report, and below it what was measured."""

    name: str
    unit: str
    """``x``, ``%``, ``ms``, ``s``, ``nats`` (of a loss) or ``images``."""
    values: list[float]
    """One per repeat; empty: not measured."""
    measured: str
    """The command or config, and how it was measured."""
    target: float | None = None
    at_most: bool = True
    """Whether the target is an upper limit of the median."""

    def __str__(self) -> str:
        if not self.values:
            return f"  {self.name:<52} {'–':>10}\n      {self.measured}"
        digits, suffix = _DIGITS[self.unit], self.unit if self.unit == "x" else f" {self.unit}"
        low, median, high = min(self.values), statistics.median(self.values), max(self.values)
        spread = f"({low:.{digits}f} to {high:.{digits}f})" if len(self.values) > 1 else ""
        verdict = ""
        if self.target is not None:
            met = median <= self.target if self.at_most else median >= self.target
            bound = f"{'≤' if self.at_most else '≥'} {self.target:g}{suffix}"
            verdict = f"target {bound}: {'met' if met else 'MISSED'}"
        line = f"  {self.name:<52} {f'{median:.{digits}f}{suffix}':>10}  {spread:<20} {verdict}".rstrip()
        return f"{line}\n      {self.measured}"

    def record(self) -> dict[str, dict[str, Any]]:
        """Return what results/ keeps of it, by its name; nothing, if it was not measured."""
        if not self.values:
            return {}
        if len(self.values) == 1:
            (value,) = self.values
            return {self.name: {"value": value, "low": value, "high": value, "unit": self.unit}}
        interval = (ratio_interval if self.unit == "x" else mean_interval)(self.values)
        return {self.name: {"value": interval.mean, "low": interval.low, "high": interval.high, "unit": self.unit}}


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
    """A file of text for ``nanogpt_steps``; empty: the source of the standard library."""

    def left_out(self, mode: str) -> str | None:
        """Return why a precision is not measured: its speed here is not that of its format; None: it is."""
        why = None if mode in self.modes else not_timed_here(mode, self.hardware)
        return f"left out: {why}; measured with modes={mode}" if why else None

    @property
    def mode(self) -> str:
        """The precision of measurements that compare no precisions: bf16, or fp32 where bf16 is left out."""
        return "fp32" if self.left_out("bf16") else "bf16"


def interleave(blocks: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 1) -> Times:
    """Call the blocks in turn, in reverse order every second repeat, and return their seconds.

    ``warm_up`` further repeats come first and are not kept.
    """
    times: Times = {name: [] for name in blocks}
    for name, _ in runs.interleave(list(blocks), range(warm_up + repeats)):
        times[name].append(blocks[name]())
    return {name: seconds[warm_up:] for name, seconds in times.items()}


def ratios(times: Times, above: str, below: str) -> list[float]:
    """Return one ratio per repeat, of two loops that took turns within it."""
    return [a / b for a, b in zip(times[above], times[below], strict=True)]
