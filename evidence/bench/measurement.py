"""What a measurement is given and yields, and what the bench shows while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from evidence.bench.turns import Times, interleave
from mantissa.display import duration
from trainer.hardware import Hardware
from trainer.precision.kernels import not_timed_here


class Result(Protocol):
    """What a measurement yields: a ``Row``, or a whole table."""

    def text(self) -> str:
        """Return the lines to print."""

    def markdown(self) -> str:
        """Return it for a page: a row of a table, or a whole table."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""


def silent(doing: str) -> None:
    """Report nothing."""


@dataclass
class Bench:
    """One run of the bench. A measurement takes it, and yields its rows as soon as each is known."""

    hardware: Hardware
    repeats: int
    folder: Path
    """Empty, and removed after the measurement."""
    report: Callable[[str], None] = silent
    """Takes what is being done now, such as ``gpt2 mini: bf16, repeat 2 of 5``; cheap enough for every block."""
    modes: frozenset[str] = frozenset()
    """Precisions that are measured also in fp32 arithmetic."""
    text: str = ""
    """A file of text for ``nanogpt``; empty: the source of the standard library."""
    failures: dict[str, str] = field(default_factory=dict, init=False)
    """Errors by the part of the measurement that failed."""
    complete: int | None = field(default=None, init=False)
    """Complete repeats of the comparison that Ctrl-C ended; None: not interrupted."""

    def failed(self, what: str, error: Exception) -> str:
        """Record that a part of the measurement failed, while the others go on; return the error in words."""
        self.failures[what] = f"{type(error).__name__}: {error}"
        return f"failed: {self.failures[what]}"

    def left_out(self, mode: str) -> str | None:
        """Return why a precision is not measured: its speed here is not that of its format; None: it is."""
        why = None if mode in self.modes else not_timed_here(mode, self.hardware)
        return f"{why}; measured with modes={mode}" if why else None

    @property
    def mode(self) -> str:
        """The precision of measurements that compare no precisions: bf16, or fp32 where bf16 is left out."""
        return "bf16" if self.left_out("bf16") is None else "fp32"

    def interleave(
        self, what: str, blocks: dict[str, Callable[[], float]], repeats: int | None = None, warm_up: int = 1
    ) -> Times:
        """Call the blocks in turn (see ``interleave``), and report each call as one of ``what``.

        Ctrl-C ends the repeats early. The complete ones are returned, so that their rows can be printed; the next call
        raises KeyboardInterrupt.
        """
        if self.complete is not None:
            raise KeyboardInterrupt
        repeats = self.repeats if repeats is None else repeats

        def before(name: str, repeat: int) -> None:
            count = "warm-up" if repeat < warm_up else f"repeat {repeat - warm_up + 1} of {repeats}"
            self.report(f"{what}: {name}, {count}")

        times = interleave(blocks, repeats, warm_up, before)
        if (complete := min(map(len, times.values()), default=repeats)) < repeats:
            self.complete = complete
        return times


Measurement = Callable[[Bench], Iterator[Result]]


class StatusLine:
    """A line in place below the printed rows: which measurement, which loop, which repeat, and the time so far.

    It is redrawn once a second by a thread of its own, so that ``report`` costs the measured loops nothing, and the
    redrawing (about a millisecond) costs each of them the same thousandth.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.clock = clock
        self.stage = ""
        """The measurement, such as ``precision, 1 of 12``."""
        self.doing = ""
        self._began = clock()
        self._live = Live(self, console=console, refresh_per_second=1, transient=True) if console.is_terminal else None

    def report(self, doing: str) -> None:
        """Set what is being done now; it shows at the next redrawing."""
        self.doing = doing

    def line(self) -> str:
        """Return the line as it is now."""
        return "  ".join(part for part in (duration(self.clock() - self._began), self.stage, self.doing) if part)

    def print(self, text: str = "") -> None:
        """Print text as it is, above the line."""
        self.console.print(Text(text), soft_wrap=True)

    def __rich__(self) -> Text:
        return Text(self.line(), style="green", no_wrap=True, overflow="ellipsis")

    def __enter__(self) -> StatusLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
