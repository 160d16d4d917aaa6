"""The table of a run's progress: a row for each evaluation, the same on a terminal, in a file and in a notebook."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rich.text import Text

from mantissa.display import duration, quantity
from trainer.config.settle import Plan
from trainer.run.monitor import Monitor
from trainer.run.scores import PREFIX
from trainer.run.step_metrics import STEP_METRICS, short
from trainer.terminal import Terminal

_SILENT_S = 10.0
"""Seconds after which a file gets a row without an evaluation; twice as many where the log has no new line."""
_RATES = {"tokens": "tok/s", "images": "img/s"}


class Table:
    """Shows the rows as they come, and between them that training goes on."""

    def __init__(self, terminal: Terminal, plan: Plan, monitor: Monitor) -> None:
        self._terminal, self._plan, self._monitor = terminal, plan, monitor
        self._rate = _RATES.get(monitor.unit, f"{monitor.unit}/s")
        self._metrics: list[str] = []
        """The evaluation's metrics so far, ``valid/loss`` aside, which has the column ``valid``."""
        columns = {name: metric.column for name, metric in STEP_METRICS.items() if metric.column is not None}
        self._columns = {name: each for name, each in columns.items() if monitor.ever_scaled or not each.scaled_only}
        """Columns of the step's metrics, by metric."""
        self._widths: dict[str, int] = {}
        """Of the columns, by heading, as the first row has them: a later format changes none."""
        self._shown = time.perf_counter()
        self._line: Mapping[str, float] = {}
        """The log's last line, until a row has shown it."""
        self._latest: Mapping[str, float] = {}
        """The log's last line, for the bar."""

    def progress(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Show that a step was taken; ``metrics`` is the line of the log that it ends, None within one."""
        if metrics:  # of the first step, the time says nothing about the others
            untimed = (f"{self._monitor.unit}_per_s", "step_time_s") if step == 1 else ()
            self._line = self._latest = {name: value for name, value in metrics.items() if name not in untimed}
        self._terminal.bar(step, self._plan.steps, lambda: self._text(step))
        silent_s = time.perf_counter() - self._shown
        if self._terminal.in_place or self._plan.evaluates(step) or silent_s < _SILENT_S * (1 if metrics else 2):
            return
        if self._widths and self._line:
            self.row(step)
        else:  # nothing new for a row, or no evaluation has said yet which columns there are
            self._terminal.note(f"  {self._text(step, loss=bool(metrics))}")
            self._shown = time.perf_counter()

    def _text(self, step: int, loss: bool = True) -> str:
        known = self._cells(step, self._latest, {})
        known["loss"] *= loss  # a line is of its step, and the last logged loss perhaps of another
        rate, eta = f"{known[self._rate]} {self._rate}", f"eta {known['eta']}"
        shown = {"loss": f"loss {known['loss']}", self._rate: rate, "eta": eta}
        return "  ".join([f"{step}/{self._plan.steps}", *(text for name, text in shown.items() if known[name])])

    def row(self, step: int, scores: Mapping[str, float] | None = None, best: bool = False) -> None:
        """Show what the log's last line has, and the ``scores`` by ``valid/<name>`` of an evaluation, ``best`` or not.

        The heading comes before the first row.
        """
        cells = self._cells(step, self._line, scores or {})
        self._line = {}
        if not self._widths:
            self._widths = self._fitting(cells)
            self._terminal.note("\n" + "".join(f"{name:>{width}}" for name, width in self._widths.items()), "dim")
        # What is longer than its column moves the others on, rather than touching the one before.
        line = "".join(f" {cells.get(name, '')}".rjust(width) for name, width in self._widths.items())
        self._terminal.note(Text(line).append("  ★", "green") if best else line.rstrip())
        self._shown = time.perf_counter()

    def _fitting(self, headings: Iterable[str]) -> dict[str, int]:
        """Return the widths of the columns that the terminal has room for."""
        widths = {name: max(9, len(name) + 2) for name in headings}
        # One that is too narrow loses columns in this order.
        scores_shown = [name for name in widths if f"{PREFIX}{name}" in self._metrics]
        of_steps = [column.heading for column in self._columns.values() if not column.scaled_only]
        for name in (*scores_shown[:0:-1], "MFU", *of_steps[:0:-1], *scores_shown[:1]):
            if name in widths and sum(widths.values()) + len("  ★") > self._terminal.width:
                del widths[name]
        return widths

    def _cells(self, step: int, line: Mapping[str, float], scores: Mapping[str, float]) -> dict[str, str]:
        """Return the text of each column by its heading; empty: not known."""
        loss, monitor = f"{PREFIX}loss", self._monitor
        self._metrics += [name for name in scores if name not in (*self._metrics, loss)]
        rate, step_s = line.get(f"{monitor.unit}_per_s"), line.get("step_time_s")
        share = monitor.utilisation.mfu(rate)
        of_steps, scaled = (
            {
                column.heading: column.text(line[name]) if name in line else ""
                for name, column in self._columns.items()
                if column.scaled_only == scaled_only
            }
            for scaled_only in (False, True)
        )
        # The losses of training and of validation side by side, then the quality, the step, the speed.
        cells = {"step": str(step), "loss": of_steps.pop("loss"), "valid": short(scores.get(loss))}
        cells |= {name.removeprefix(PREFIX): short(scores.get(name)) for name in self._metrics} | of_steps
        cells[self._rate] = "" if rate is None else quantity(rate)
        if monitor.utilisation.mfu(1.0) is not None:
            cells["MFU"] = "" if share is None else _percent(share)
        cells["eta"] = "" if step_s is None else duration((self._plan.steps - step) * step_s)
        return cells | scaled


def _percent(share: float) -> str:
    if not 1e-4 <= share < 9.995:
        return "<0.01 %" if share < 1e-4 else ">999 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
