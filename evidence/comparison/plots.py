"""The plots of a comparison: the three answers, and loss curves."""

from __future__ import annotations

from typing import Any

import numpy as np

from evidence.comparison.compare import Result
from mantissa.verdict.judge import Ratio
from mantissa.verdict.page import MARGIN
from trainer.tracking.plots import COLORS, INK, QUIET, RULE, bare_figure, plain

SIZE = (4.6, 3.2)
"""Inches."""


def figures(result: Result) -> dict[str, tuple[str, Any]]:
    """Return (title, matplotlib figure) by file name; what was not measured is left out."""
    drawn = {
        "answers": (f"Speed, memory and validation loss, relative to {result.plan.baseline}", _answers(result)),
        "loss": ("Validation loss, mean over the seeds; one faint line per run", _loss(result)),
    }
    return {name: (title, figure) for name, (title, figure) in drawn.items() if figure is not None}


def _color(result: Result, label: str) -> str:
    return COLORS[list(result.rows).index(label) % len(COLORS)]


def _answers(result: Result) -> Any:
    """Return the figure with the three answers side by side, a row for each arm; None: only one arm finished."""
    from matplotlib.figure import Figure

    labels = [label for label in result.rows if result.finished(label)]
    if len(labels) < 2:
        return None
    figure = Figure(figsize=(5.4, 1 + 0.38 * len(labels)), dpi=200, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    base, margin = result.plan.baseline, 100 * result.plan.margin
    titles = ("Fastest?", "Less memory?", "Same quality?")
    for axes, title, label in zip(
        panels, titles, (f"speed / {plain(base)}", f"memory / {plain(base)}", "change of loss, %"), strict=True
    ):
        axes.set_title(title, fontsize=11, weight="bold", color=INK, loc="left")
        axes.set_xlabel(label, color=QUIET, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(RULE)
        axes.tick_params(length=0, colors=QUIET, labelsize=10)
        axes.set_axisbelow(True)
        axes.margins(x=0.4)
        axes.set_yticks(range(len(labels)), list(map(plain, labels)), color=INK)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", color=RULE)
    panels[2].axvspan(-margin, margin, color=MARGIN, zorder=0)
    for place, label in enumerate(labels):
        row, is_base, color = result.rows[label], label == base, _color(result, label)
        for axes, quantity in zip(panels, row.ratios.values(), strict=False):
            _draw_ratio(axes, place, quantity, is_base, color)
        if is_base:
            panels[2].plot(0, place, "D", color=color)
        elif row.quality.test:
            mean, low, high = (100 * getattr(row.quality.test.difference, end) for end in ("mean", "low", "high"))
            panels[2].errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=4)
            _note(panels[2], row.quality.verdict, mean, place, (0, 7), ha="center", fontsize=8)
    return figure


def _draw_ratio(axes: Any, place: int, quantity: Ratio, is_base: bool, color: str) -> None:
    """Draw a bar for what was judged, and for the baseline, which is 1."""
    if is_base and quantity.values:
        axes.barh(place, 1, color=color, height=0.62)
        _note(axes, "1", 1, place, (5, 0), va="center")
    elif (ratio := quantity.ratio) and not quantity.why:
        axes.errorbar(
            ratio.mean, place, xerr=[[ratio.mean - ratio.low], [ratio.high - ratio.mean]], color=INK, capsize=3
        )
        axes.barh(place, ratio.mean, color=color, height=0.62)
        _note(axes, f"{ratio.mean:.2f}x", ratio.high, place, (5, 0), va="center")


def _note(axes: Any, text: str, x: float, y: float, offset: tuple[int, int], **style: Any) -> None:
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=INK, **style)


def _loss(result: Result) -> Any:
    figure, axes = bare_figure(*SIZE)
    for label in result.rows:
        curves = [run.curve for run in result.finished(label) if len(run.curve[0])]
        color = _color(result, label)
        for steps, losses in curves:
            axes.plot(steps, losses, color=color, linewidth=0.6, alpha=0.3)
        if curves:
            steps = min((steps for steps, _ in curves), key=len)
            means = np.mean([losses[: len(steps)] for _, losses in curves], axis=0)
            axes.plot(steps, means, "-", color=color, linewidth=1.8, label=plain(label))
    if not axes.lines:
        return None
    axes.set_xlabel("optimizer step", color=QUIET)
    axes.set_ylabel("validation loss", color=QUIET)
    axes.grid(axis="y", color=RULE)
    axes.legend(frameon=False, labelcolor=INK)
    return figure
