"""What the terminal shows: lines, blocks of facts, and in place the progress of training and of other work.

State of the process: the terminals in use, ``_in_use``, which ``Terminal.in_use`` sets, and the one that shows what the
project logs, the logger's handler, which ``Terminal.show_logs`` sets.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from mantissa.display import duration, quantity
from trainer.errors import redacted
from trainer.files import discard

Advance = Callable[..., None]
"""Takes how much is done, and how much there is where that was not known before; it may be called often."""
WIDTH = 100
"""Columns of what is shown; fewer where a terminal has fewer."""
_SLOW_S = 10.0
"""Seconds that work takes before a file shows its progress."""
_AGAIN_S = 20.0
"""Seconds between two lines of the progress of one piece of work in a file."""
_REFRESHED_S = 0.2
"""Seconds between two updates of what is in place: each takes about a millisecond, a step of a tiny model no more."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on where nobody reads any more; rich would end the program."""
        leave_unread()


class Terminal:
    """Writes to standard output. On a terminal, progress stays in place; in a file or a notebook it is a line each."""

    def __init__(
        self,
        console: Console | None = None,
        shown: bool = True,
        quiet: bool = False,
        brief: bool = False,
    ) -> None:
        """Write to ``console`` (None: standard output), or nothing at all where another process does.

        With ``quiet`` only warnings are shown, with ``brief`` also the one line that says how a run ended, and progress
        in place.
        """
        self.brief = brief
        self._quiet = quiet
        self.console = console or _Console(highlight=False, quiet=not shown, force_jupyter=False)
        self.width = min(WIDTH, self.console.width) if self.console.is_terminal else WIDTH
        self.in_place = self.console.is_terminal and not (self.console.quiet or quiet)
        self._progress = Progress(
            BarColumn(24, complete_style="green", finished_style="green"),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=not self.console.stderr,  # else what is printed would go there, too
        )
        self._training: TaskID | None = None
        self._drawn = -math.inf

    def show_logs(self) -> None:
        """Show here, from now on, what other parts log, such as an MLflow that does not answer."""
        logger = logging.getLogger("mantissa")
        logger.handlers[:] = [_Shown(self)]
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def block(self, title: str, rows: Iterable[tuple[str, str | Text]], style: str = "bold") -> None:
        """Show aligned ``name  value`` rows under a title; long values are wrapped."""
        self.note(title, style)
        rows = list(rows)
        widest = max((len(name) for name, _ in rows), default=0)
        indent = widest + 4 if widest else 2
        for name, value in rows:
            text = value if isinstance(value, Text) else Text(value)
            lines = text.wrap(self.console, max(24, self.width - indent)) or [Text()]
            for number, line in enumerate(lines):
                line.rstrip()
                label = f"  {'' if number else name:<{widest}}"
                self.note(Text.assemble((f"{label:<{indent}}", "cyan"), line))

    def warn(self, message: str) -> None:
        """Show a warning."""
        self._print(Text.assemble(("warning: ", "bold yellow"), message))

    def note(self, message: str | Text = "", style: str = "") -> None:
        """Show a line as it is, above the progress."""
        if not (self._quiet or self.brief):
            self._print(message, style)

    def outcome(self, message: str) -> None:
        """Show how a run ended: the only line of one that is ``brief``."""
        if not self._quiet:
            self._print(message)

    def _print(self, message: str | Text, style: str = "") -> None:
        text = message if isinstance(message, Text) else Text(message, style)
        # The terminal breaks a line that is too long: pasted from it, a command is whole.
        _unless_closed(lambda: self.console.print(text, soft_wrap=True))

    def bar(self, done: int, total: int, text: Callable[[], str]) -> None:
        """Show in place how much of the training is done, a few times a second at most."""
        now = time.perf_counter()
        if not self.in_place or now < self._drawn + _REFRESHED_S:
            return
        self._drawn = now
        if self._training is None:
            self._training = self._begin("", total)
        self._progress.update(self._training, completed=done, description=text())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Show meanwhile what the function ``work`` reports."""
        _in_use.append(self)
        try:
            yield
        finally:
            _in_use.remove(self)

    @contextmanager
    def work(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        """Show the progress of other work, see the function ``work``."""
        began = time.perf_counter()
        due = began + _SLOW_S
        task = self._begin(label, total) if self.in_place else None

        def advance(done: float, of: float | None = None) -> None:
            nonlocal due, total
            total, now = of or total, time.perf_counter()
            if task is not None:
                line = work_line(label, done, total, unit, now - began)
                self._progress.update(task, completed=done, total=total, description=line)
            elif now >= due:
                due = now + _AGAIN_S
                self.note(work_line(label, done, total, unit, now - began))

        try:
            yield advance
        finally:
            if task is not None:
                self._progress.remove_task(task)
                if not self._progress.tasks:
                    self.end_progress()

    def _begin(self, description: str, total: float | None) -> TaskID:
        task = self._progress.add_task(description, total=total)
        _unless_closed(self._progress.start)
        return task

    def end_progress(self) -> None:
        """Remove the progress of training."""
        if self._training is not None:
            self._progress.remove_task(self._training)
            self._training = None
        if self.in_place:  # elsewhere rich ends it by an empty line
            _unless_closed(self._progress.stop)


_in_use: list[Terminal] = []
"""Terminals, of which the last shows. Not by thread: libraries call what they are given in threads of their own."""


def work(label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Advance]:
    """Show work that may take more than a moment on the terminal in use, if there is one, while the context is entered.

    Args:
        label: what is done, such as ``tokenizing``.
        total: how much there is to do; None: not known.
        unit: of ``total``, such as ``MB``.
    """
    return _in_use[-1].work(label, total, unit) if _in_use else nullcontext(lambda *_: None)


def _unless_closed(write: Callable[[], None]) -> None:
    """Write to the terminal; where it was closed, training continues."""
    try:
        write()
    except OSError:
        leave_unread()


@contextmanager
def on_error_stream() -> Iterator[None]:
    """Show the progress of work there: what a script prints may go to a file."""
    with Terminal(_Console(stderr=True, highlight=False)).in_use():
        yield


def leave_unread() -> None:
    """Discard from now on what goes to a terminal that was closed, or to a pipe without a reader."""
    for descriptor in (1, 2):
        polled = select.poll()
        polled.register(descriptor, 0)  # reports an error or a hang-up
        if polled.poll(0):
            discard(descriptor)


class _Shown(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        (self.terminal.warn if record.levelno >= logging.WARNING else self.terminal.note)(redacted(record.getMessage()))


def work_line(label: str, done: float, total: float | None, unit: str, seconds: float) -> str:
    """Return ``evaluating  12/48 batches  eta 0:30``, or what is known of it."""
    parts = [label]
    if done:
        parts.append(f"{quantity(done)}{f'/{quantity(total)}' if total else ''} {unit}".rstrip())
    if total and done:
        parts.append(f"eta {duration(seconds / done * (total - done))}")
    return "  ".join(parts)
