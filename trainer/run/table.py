"""The table of a run's progress: a row for each evaluation, the same on a terminal, in a file and in a notebook."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from mantissa.display import duration, quantity
from trainer.config.step import Plan
from trainer.run.monitor import Monitor
from trainer.run.scores import PREFIX
from trainer.terminal import Terminal

_SILENT_S = 10.0
"""Seconds after which a file gets a row without an evaluation; twice as many where the log has no new line."""
_RATES = {"tokens": "tok/s", "images": "img/s"}


class Table:
    """Shows the rows as they come, and between them that training goes on."""

    def __init__(self, terminal: Terminal, plan: Plan[Any], monitor: Monitor) -> None:
        self._terminal, self._plan, self._monitor = terminal, plan, monitor
        self._rate = _RATES.get(monitor.unit, f"{monitor.unit}/s")
        self._metrics: list[str] = []
        self._heading, self._shown = "", time.perf_counter()
        self._line: Mapping[str, float] = {}
        self._latest: Mapping[str, float] = {}

    def progress(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Show that a step was taken; ``metrics`` is the line of the log that it ends, None within one."""
        if metrics:  # of the first step, the time says nothing about the others
            untimed = (f"{self._monitor.unit}_per_s", "step_time_s") if step == 1 else ()
            self._line = self._latest = {name: value for name, value in metrics.items() if name not in untimed}
        self._terminal.bar(step, self._plan.steps, lambda: self._text(step))
        silent_s = time.perf_counter() - self._shown
        if not (self._terminal.in_place or self._plan.evaluates(step) or silent_s < _SILENT_S * (1 if metrics else 2)):
            self.row(step)

    def _text(self, step: int) -> str:
        known = self._cells(step, self._latest, {})
        shown = {"loss": f"loss {known['loss']}", self._rate: f"{known[self._rate]} {self._rate}", "eta": known["eta"]}
        return "  ".join([f"{step}/{self._plan.steps}", *(text for name, text in shown.items() if known[name])])

    def row(self, step: int, scores: Mapping[str, float] | None = None, best: bool = False) -> None:
        """Show what the log's last line has, and the ``scores`` by ``valid/<name>`` of an evaluation, ``best`` or not.

        A heading comes before the first row, and where the columns change.
        """
        cells = self._cells(step, self._line, scores or {})
        self._line = {}
        widths = {name: max(9, len(name) + 2) for name in cells}
        own = [name for name in cells if f"{PREFIX}{name}" in self._metrics]
        for name in (*own[:0:-1], "MFU", "norm", "lr", *own[:1]):
            if name in widths and sum(widths.values()) + len("  ★") > self._terminal.width:
                del widths[name]
        heading = "".join(f"{name:>{width}}" for name, width in widths.items())
        if heading != self._heading:
            self._terminal.note(heading if self._heading else f"\n{heading}", "dim")
            self._heading = heading
        line = "".join(f"{cells[name]:>{width}}" for name, width in widths.items())
        self._terminal.note(Text(line).append("  ★", "green") if best else line.rstrip())
        self._shown = time.perf_counter()

    def _cells(self, step: int, line: Mapping[str, float], scores: Mapping[str, float]) -> dict[str, str]:
        """Return the text of each column by its heading; empty: not known."""
        loss, monitor = f"{PREFIX}loss", self._monitor
        self._metrics += [name for name in scores if name not in (*self._metrics, loss)]
        rate, step_s = line.get(f"{monitor.unit}_per_s"), line.get("step_time_s")
        share = monitor.utilisation.mfu(rate)
        cells = {"step": str(step), "loss": _number(line.get("loss")), "valid": _number(scores.get(loss))}
        cells |= {name.removeprefix(PREFIX): _number(scores.get(name)) for name in self._metrics}
        cells["lr"] = f"{line['lr']:.1e}" if line else ""
        cells["norm"] = _number(line.get("grad_norm"), 2)
        cells[self._rate] = "" if rate is None else quantity(rate)
        if monitor.utilisation.mfu(1.0) is not None:
            cells["MFU"] = "" if share is None else f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
        cells["eta"] = "" if step_s is None else duration((self._plan.steps - step) * step_s)
        if monitor.recovers:  # from overflows, by another loss scale
            cells["scale"] = f"{line['loss_scale']:g}" if line else ""
            cells["skipped"] = f"{line['skipped_steps']:.0f}" if line else ""
        return cells


def _number(value: float | None, decimals: int = 4) -> str:
    """Return a number in eight characters, if it is not negative; empty: there is none."""
    if value is None:
        return ""
    fits = value == 0 or not math.isfinite(value) or 10 ** (1 - decimals) <= abs(value) < 999
    return f"{value:.{decimals}f}" if fits else f"{value:.2e}"
