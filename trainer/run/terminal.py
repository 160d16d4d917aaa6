"""What the terminal shows: the start block, a progress line, the summary table."""

from __future__ import annotations

import logging
import math
import os
import select
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mantissa.display import duration, loss, quantity
from trainer.errors import redacted
from trainer.progress import Advance, shown_by

Rows = Iterable[tuple[str, str]]


class Terminal:
    """Writes to standard output; on a terminal and in a notebook the progress is one line that stays in place."""

    def __init__(self, console: Console | None = None, shown: bool = True, logged: bool = True) -> None:
        """Write to ``console`` (None: standard output), or nothing at all where another process does.

        With ``logged`` what other parts log is shown here, too.
        """
        self._notebook = console is None and shown and Console().is_jupyter
        # rich's own notebook display makes an output of every line, and needs ipywidgets to change one.
        self.console = console or Console(highlight=False, quiet=not shown, force_jupyter=False)
        self._live: Live | None = None
        self._cell: Any = None
        """The output of a notebook's cell that holds the progress."""
        self._works: list[threading.Event] = []
        self._shown = -math.inf
        self._metrics: dict[str, float] = {}
        # A refresh takes about a millisecond, which would slow the steps of a tiny model.
        self._interval_s = 0.2 if self.console.is_terminal else 2.0
        self.patience_s, self.again_s = 2.0, 0.5 if self.console.is_terminal else 20.0
        """Work that takes less is not shown; then it is shown again and again, see ``work``."""
        if logged:
            logger = logging.getLogger("mantissa")
            logger.handlers[:] = [_Shown(self)]
            logger.setLevel(logging.INFO)
            logger.propagate = False

    def block(self, title: str, rows: Rows) -> None:
        """Show aligned ``name  value`` rows under a title; long values are wrapped."""
        self.note(title, style="bold")
        rows = list(rows)
        widest = max((len(name) for name, _ in rows), default=0)
        room = max(24, self.console.width - widest - 5) if self.console.is_terminal else 10_000
        for name, value in rows:
            first, *others = textwrap.wrap(value, room, break_on_hyphens=False) or [""]
            self.note(Text.assemble("  ", (f"{name:<{widest}}", "cyan"), f"  {first}"))
            for line in others:
                self.note(" " * (widest + 4) + line)

    def warn(self, message: str) -> None:
        """Show a warning."""
        self.note(Text.assemble(("warning: ", "bold yellow"), message))

    def note(self, message: str | Text = "", style: str = "") -> None:
        """Show a line as it is, above the progress line."""
        text = message if isinstance(message, Text) else Text(message, style)
        self._show(self.console.print, text, soft_wrap=not self.console.is_terminal)  # a file has no line width

    def progress(self, step: int, steps: int, metrics: dict[str, float] | None, unit: str) -> None:
        """Show the progress of training, a few times a second at most; ``metrics`` is None within a log interval."""
        now = time.perf_counter()
        interval_s = self._interval_s if metrics else 10 * self._interval_s
        if now - self._shown < interval_s and (metrics is None or step not in (1, steps)):
            return
        if metrics:  # of the first step, the time says nothing about the others
            self._metrics = metrics | ({"step_time_s": math.nan} if step == 1 else {})
        self._shown = now
        self._in_place(progress_line(step, steps, self._metrics, unit))

    @contextmanager
    def work(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        """Show the progress of other work (see ``progress.work``), once it has taken ``patience_s``.

        A thread shows it: the work may be one long call. Of work within other work, the inner one is shown.
        """
        if self.console.quiet:
            yield lambda done, total=None: None
            return
        began, done, ended = time.perf_counter(), 0.0, threading.Event()

        def advance(now: float, of: float | None = None) -> None:
            nonlocal done, total
            done, total = now, of or total

        def show() -> None:
            wait_s = self.patience_s
            while not ended.wait(wait_s):
                if self._works[-1:] == [ended]:
                    self._in_place(work_line(label, done, total, unit, time.perf_counter() - began))
                wait_s = self.again_s

        thread = threading.Thread(target=show, name="progress", daemon=True)
        self._works.append(ended)
        thread.start()
        try:
            yield advance
        finally:
            self._works.remove(ended)
            ended.set()
            thread.join()
            self.end_progress()

    def _in_place(self, line: str) -> None:
        """Show a line in the place of the one before; in a file below it."""
        if self._notebook:
            from IPython.display import display

            if self._cell is None:
                self._cell = display({"text/plain": line}, raw=True, display_id=True)
            else:
                self._cell.update({"text/plain": line}, raw=True)
            return
        if not self.console.is_terminal:
            self.note(line)
            return
        if self._live is None:
            out = not self.console.stderr  # else what is printed would go there, too
            self._live = Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=out)
            self._show(self._live.start)
        self._show(self._live.update, Text(line, style="green", no_wrap=True, overflow="ellipsis"), refresh=True)

    def end_progress(self) -> None:
        """Remove the progress line."""
        if self._live is not None:
            self._show(self._live.stop)
            self._live = None

    def _show(self, write: Callable[..., object], *arguments: object, **options: object) -> None:
        try:
            write(*arguments, **options)
        except OSError:  # nobody watches any more; training continues
            leave_unread()


@contextmanager
def on_error_stream() -> Iterator[None]:
    """Show the progress of work there: what a script prints may go to a file."""
    with shown_by(Terminal(Console(stderr=True, highlight=False), logged=False).work):
        yield


def leave_unread() -> None:
    """Discard from now on what goes to a terminal that was closed, or to a pipe without a reader."""
    for descriptor in (1, 2):
        polled = select.poll()
        polled.register(descriptor, 0)  # reports an error or a hang-up
        if polled.poll(0):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


class _Shown(logging.Handler):
    """Shows what other parts log, such as an MLflow that does not answer."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        (self.terminal.warn if record.levelno >= logging.WARNING else self.terminal.note)(redacted(record.getMessage()))


def progress_line(step: int, steps: int, metrics: dict[str, float], unit: str) -> str:
    """Return ``step 20/300  loss 5.123  12.3k tokens/s  norm 1.2  scale 65536  eta 0:42``."""
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    if not metrics:  # none yet
        return parts[0]
    parts.append(f"loss {loss(metrics['loss'])}")
    parts.append(f"{quantity(metrics[f'{unit}_per_s'])} {unit}/s")
    parts.append(f"norm {metrics['grad_norm']:.3g}")
    if metrics["loss_scale"] != 1:
        parts.append(f"scale {metrics['loss_scale']:g}")
    if metrics["skipped_steps"]:
        parts.append(f"skipped {metrics['skipped_steps']:g}")
    if math.isfinite(metrics["step_time_s"]):
        parts.append(f"eta {duration((steps - step) * metrics['step_time_s'])}")
    return "  ".join(parts)


def work_line(label: str, done: float, total: float | None, unit: str, seconds: float) -> str:
    """Return ``evaluating  12/48 batches  eta 0:30``, or what is known of it and the time so far."""
    parts = [label]
    if done:
        parts.append(f"{quantity(done)}{f'/{quantity(total)}' if total else ''} {unit}".rstrip())
    parts.append(f"eta {duration(seconds / done * (total - done))}" if total and done else duration(seconds))
    return "  ".join(parts)
