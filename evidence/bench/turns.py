"""Loops that alternate in each repeat, and the rows of the report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Times = dict[str, list[float]]
"""Seconds of each loop by its name, one number per repeat."""
Block = Callable[[int], float]
"""Takes a number of optimizer steps and returns the seconds they took."""
Clock = Callable[[], float]


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def stopwatch(loop: Callable[[int], object], device: torch.device, clock: Clock = time.perf_counter) -> Block:
    """Return the loop as a block that returns its seconds, the device's work included."""

    def block(steps: int) -> float:
        synchronise(device)
        began = clock()
        loop(steps)
        synchronise(device)
        return clock() - began

    return block


MARKDOWN = "| quantity | measured | target | how |\n|---|---|---|---|"
"""The heading of a table of rows on a page."""


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
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median if self.values else None,
            "values": self.values,
            "lower_bound": self.lower_bound,
            "target": self.target,
            "target_is": "at most" if self.at_most else "at least",
            "met": self.met,
            "measured": self.measured,
        }

    def _cells(self) -> tuple[str, str, str]:
        """Return the median with its unit, the lowest and highest value, and the target."""
        target = ""
        if self.target is not None:
            target = f"{'≤' if self.at_most else '≥'} {self.target:g} {self.unit}".replace(" x", "x")
        if not self.values:
            return "–", "", target
        low, high = self._number(min(self.values)), self._number(max(self.values))
        figure = f"{'at least ' if self.lower_bound else ''}{self._number(self.median)} {self.unit}"
        return figure.replace(" x", "x"), f"({low} to {high})", target

    def _number(self, value: float) -> str:
        return f"{value:.{ {'x': 3, '%': 2, 'ms': 3, 's': 2, 'images/s': 1}[self.unit] }f}"


def ratios(times: Times, above: str, below: str) -> list[float]:
    """Return one ratio per repeat, of two loops that took turns within it."""
    return [a / b for a, b in zip(times[above], times[below], strict=True)]


def overheads(times: Times, name: str, unit: str, steps: int) -> list[float]:
    """Return the overhead of a loop over ``bare``, for each repeat of ``steps`` steps: in ``%``, or ``ms`` per step."""
    if unit == "%":
        return [100 * (ratio - 1) for ratio in ratios(times, name, "bare")]
    return [1e3 * (a - b) / steps for a, b in zip(times[name], times["bare"], strict=True)]


def interleave(
    blocks: dict[str, Callable[[], float]],
    repeats: int,
    warm_up: int = 1,
    before: Callable[[str, int], object] = lambda name, repeat: None,
) -> Times:
    """Call the blocks in turn, in reverse order every second repeat, and return their seconds.

    ``warm_up`` further repeats come first and are not kept. ``before`` is called before each block, with its name and
    the number of the repeat (from 0, warm-up included). Ctrl-C ends the repeats early, if one to be kept is complete.
    """
    times: Times = {name: [] for name in blocks}
    complete = 0
    try:
        for repeat in range(warm_up + repeats):
            for name in list(blocks)[:: -1 if repeat % 2 else 1]:
                before(name, repeat)
                times[name].append(blocks[name]())
            complete += 1
    except KeyboardInterrupt:
        if complete <= warm_up:
            raise
    return {name: seconds[warm_up:complete] for name, seconds in times.items()}


class Turns:
    """Lets other loops take turns with a trainer's run, which cannot be called block by block.

    In each round of a repeat the run takes ``steps`` optimizer steps and then each of ``others`` as many; at the end
    of a repeat, each of ``fits`` takes as many as all its rounds together. One further repeat comes first, as a
    warm-up, and is not kept.
    """

    def __init__(
        self,
        steps: int,
        rounds: int,
        repeats: int,
        others: dict[str, Block],
        fits: dict[str, Block],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.steps = steps
        self.steps_per_repeat = steps * rounds
        self.last_step = self.steps_per_repeat * (repeats + 1)
        self.others = others
        self.fits = fits
        self.clock = clock
        self.report: Callable[[str], object] = lambda doing: None
        """Takes the name of the loop whose turn it is, and the repeat."""
        self._repeats = repeats
        self._times: Times = {name: [0.0] * (repeats + 1) for name in ("trainer", *others, *fits)}
        self._began = 0.0

    @property
    def times(self) -> Times:
        """Seconds per repeat by name; the run is called ``trainer``."""
        return {name: seconds[1:] for name, seconds in self._times.items()}

    def start(self, repeat: int = 0) -> None:
        """Start the clock of the run's next block, which belongs to ``repeat`` (0: the warm-up)."""
        self._tell("Mantissa", repeat)
        self._began = self.clock()

    def due(self, step: int) -> bool:
        """Return whether the run's optimizer step ``step`` (from 1) ends a block."""
        return step % self.steps == 0 and step <= self.last_step

    def take(self, step: int) -> None:
        """End the run's block, run the others' blocks, and start the clock of the next one."""
        repeat = (step - 1) // self.steps_per_repeat
        self._times["trainer"][repeat] += self.clock() - self._began
        for name, block in self.others.items():
            self._tell(name, repeat)
            self._times[name][repeat] += block(self.steps)
        if step % self.steps_per_repeat == 0:
            for name, block in self.fits.items():
                self._tell(name, repeat)
                self._times[name][repeat] += block(self.steps_per_repeat)
        self.start(step // self.steps_per_repeat)

    def _tell(self, name: str, repeat: int) -> None:
        if repeat <= self._repeats:  # what comes later is not measured
            self.report(f"{name}, {f'repeat {repeat} of {self._repeats}' if repeat else 'warm-up'}")
