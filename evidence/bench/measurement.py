"""What a measurement is given: the hardware, how often to repeat, a folder, and where it says what it is doing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from evidence.bench.turns import Times, interleave
from trainer.hardware import Hardware


class Result(Protocol):
    """What a measurement yields: a ``Row``, or a whole table."""

    def text(self) -> str:
        """Return the lines to print."""

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
    """Precisions that are measured however slow they are."""
    text: str = ""
    """A file of text for ``nanogpt``; empty: the source of the standard library."""
    complete: int | None = field(default=None, init=False)
    """Complete repeats of the comparison that Ctrl-C ended; None: not interrupted."""

    def left_out(self, mode: str) -> str | None:
        """Return why a precision is not measured, where its products are hopelessly slow here; None: it is."""
        if mode in self.modes or find_spec("trainer.profiling.rates") is None:
            return None
        why: str | None = resolve_name("trainer.profiling.rates:hopeless")(mode, self.hardware)
        return why

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
