"""What the bench shows while it runs: on a terminal a line that says what is being measured; elsewhere nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainer.formats import duration


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
