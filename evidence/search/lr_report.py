"""The files of a learning-rate range test: every step as CSV, the suggestions as JSON, the plot."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from evidence.search.lr_range import Curve
from mantissa.page import COLORS
from trainer.files import write_json, write_text
from trainer.hardware import Hardware
from trainer.run.provenance import git_facts, versions
from trainer.tracking.plots import INK, QUIET, bare_figure


def write_report(curves: list[Curve], folder: Path, title: str, command: str, hardware: Hardware) -> Path:
    """Write ``lr_range.csv``, ``.json`` and ``.png`` into an existing folder; return the plot's path."""
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(["test", "step", "lr", "loss", "smoothed_loss"])
    for curve in curves:
        smoothed = [*curve.smoothed, *([math.nan] * (len(curve.loss) - len(curve.smoothed)))]
        points = zip(curve.lr, curve.loss, smoothed, strict=True)
        writer.writerows([curve.label, step, *point] for step, point in enumerate(points, 1))
    write_text(folder / "lr_range.csv", rows.getvalue())
    tests = [
        {
            "label": curve.label,
            "skipped_steps": curve.skipped_steps,
            "ended": curve.ended,
            "steps": len(curve.lr),
            "suggestions": curve.suggestions(),
        }
        for curve in curves
    ]
    facts = {"hardware": hardware.facts(), "versions": versions(), "git": git_facts()}
    write_json(folder / "lr_range.json", {"command": command, "tests": tests} | facts)
    path = folder / "lr_range.png"
    draw(curves, title).savefig(path)
    return path


def draw(curves: list[Curve], title: str) -> Any:
    """Return the figure: every loss faint, the smoothed ones strong, a mark where each falls fastest."""
    figure, axes = bare_figure(8, 4.5)
    axes.set_title(title, loc="left", color=INK, fontsize=12)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate", color=QUIET)
    axes.set_ylabel("training loss", color=QUIET)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        smoothed = np.array(curve.smoothed)
        lr = np.array(curve.lr)
        axes.plot(lr, curve.loss, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(lr[: len(smoothed)], smoothed, color=color, linewidth=1.8, label=curve.label or "smoothed")
        if curve.steepest is not None and curve.lowest is not None:
            at, tenth = lr[curve.steepest], lr[curve.lowest] / 10
            label = f"falls fastest at {at:.1e}"
            axes.plot(at, smoothed[curve.steepest], "o", color=color, markersize=7, linestyle="none", label=label)
            style = {"color": color, "linewidth": 1, "linestyle": (0, (4, 3))}
            axes.axvline(tenth, label=f"a tenth of the lowest: {tenth:.1e}", **style)
    if finite := [value for curve in curves for value in curve.loss if math.isfinite(value)]:
        low, first = min(finite), max(curve.smoothed[0] for curve in curves if curve.smoothed)
        room = max(first - low, 1e-3 * abs(first), 1e-9)
        axes.set_ylim(low - 0.05 * room, first + 0.25 * room)  # what rises far above would flatten the rest
    axes.legend(frameon=False, labelcolor=INK, loc="lower left")
    return figure
