"""What a measurement is given, and the rows that it yields."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.turns import Times, interleave
from evidence.turns import stopwatch
from trainer.hardware import Hardware
from trainer.precision.kernels import not_timed_here

MARKDOWN = "| quantity | measured | target | how |\n|---|---|---|---|"
"""The heading of a table of rows on a page."""
ENDLESS = "steps=1000000"
"""For a trainer whose steps are taken by hand, so that its schedule does not end."""
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
    def met(self) -> bool | None:
        """Whether the median reaches the target; None without a target or a measurement."""
        if self.target is None or not self.values:
            return None
        median = statistics.median(self.values)
        return median <= self.target and not self.lower_bound if self.at_most else median >= self.target

    def text(self) -> str:
        """Return two lines: the figure with its range and verdict, and below it what was measured."""
        figure, spread, target = self._cells()
        verdict = "" if self.met is None else f"target {target}: {'met' if self.met else 'MISSED'}"
        return f"  {self.name:<52} {figure:>10}  {spread:<20} {verdict}".rstrip() + f"\n      {self.measured}"

    def markdown(self) -> str:
        """Return one row of a table with the columns ``MARKDOWN``."""
        figure, spread, target = self._cells()
        return f"| {self.name} | {f'{figure} {spread}'.strip()} | {target} | {self.measured} |"

    def _cells(self) -> tuple[str, str, str]:
        """Return the median with its unit, the lowest and highest value, and the target."""
        unit = self.unit if self.unit == "x" else f" {self.unit}"
        target = "" if self.target is None else f"{'≤' if self.at_most else '≥'} {self.target:g}{unit}"
        if not self.values:
            return "–", "", target
        shown = (min(self.values), max(self.values), statistics.median(self.values))
        low, high, median = (f"{value:.{_DIGITS[self.unit]}f}" for value in shown)
        return f"{'at least ' if self.lower_bound else ''}{median}{unit}", f"({low} to {high})", target


@dataclass
class Bench:
    """One run of the bench. A measurement takes it, and yields its rows as soon as each is known."""

    hardware: Hardware
    repeats: int
    folder: Path
    """Empty, and removed after the measurement."""
    report: Callable[[str], object] = lambda doing: None
    """Takes what is being done now, such as ``gpt2 mini: bf16, repeat 2 of 5``; cheap enough for every block."""
    modes: frozenset[str] = frozenset()
    """Precisions that are measured also in fp32 arithmetic."""
    text: str = ""
    """A file of text for ``nanogpt``; empty: the source of the standard library."""

    def left_out(self, mode: str) -> str | None:
        """Return why a precision is not measured: its speed here is not that of its format; None: it is."""
        why = None if mode in self.modes else not_timed_here(mode, self.hardware)
        return f"left out: {why}; measured with modes={mode}" if why else None

    @property
    def mode(self) -> str:
        """The precision of measurements that compare no precisions: bf16, or fp32 where bf16 is left out."""
        return "fp32" if self.left_out("bf16") else "bf16"

    def times(
        self, what: str, loops: Mapping[str, Callable[[int], object]], steps: int = 1, repeats: int | None = None
    ) -> Times:
        """Let loops take ``steps`` steps in turn, and return their seconds per repeat by name."""
        blocks = {name: partial(stopwatch(loop, self.hardware.device), steps) for name, loop in loops.items()}
        return self.interleave(what, blocks, repeats)

    def interleave(
        self, what: str, blocks: Mapping[str, Callable[[], float]], repeats: int | None = None, warm_up: int = 1
    ) -> Times:
        """Call blocks that return their seconds in turn (see ``benchmarks.turns``)."""
        repeats = self.repeats if repeats is None else repeats

        def before(name: str, number: int) -> None:
            self.repeat(f"{what}: {name}", number + 1 - warm_up)

        return interleave(blocks, repeats, warm_up, before)

    def repeat(self, what: str, number: int) -> None:
        """Report that repeat ``number`` of ``what`` begins; 0 is the warm-up."""
        self.report(f"{what}, {f'repeat {number} of {self.repeats}' if number else 'warm-up'}")
