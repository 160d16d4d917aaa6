"""The plots of a comparison: the three answers, and loss curves."""

from __future__ import annotations

from typing import Any

import numpy as np

from evidence.comparison.compare import Result
from evidence.comparison.judge import ArmResult, Ratio
from evidence.runs import LOSS
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


def _color(result: Result, arm: ArmResult) -> str:
    return COLORS[[other.label for other in result.arms].index(arm.label) % len(COLORS)]


def _answers(result: Result) -> Any:
    """Return the figure with the three answers side by side, a row for each arm; None: only one arm finished."""
    from matplotlib.figure import Figure

    arms = [arm for arm in result.arms if arm.seeds]
    if len(arms) < 2:
        return None
    figure = Figure(figsize=(5.4, 1 + 0.38 * len(arms)), dpi=200, layout="constrained")
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
        axes.set_yticks(range(len(arms)), [plain(arm.label) for arm in arms], color=INK)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", color=RULE)
    panels[2].axvspan(-margin, margin, color=MARGIN, zorder=0)
    for row, arm in enumerate(arms):
        is_base, color = arm.label == base, _color(result, arm)
        for axes, quantity in zip(panels, (arm.speed, arm.memory), strict=False):
            _draw_ratio(axes, row, quantity, is_base, color)
        if is_base:
            panels[2].plot(0, row, "D", color=color)
        elif arm.quality.test:
            mean, low, high = (100 * getattr(arm.quality.test.difference, end) for end in ("mean", "low", "high"))
            panels[2].errorbar(mean, row, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=4)
            _note(panels[2], arm.quality.verdict, mean, row, (0, 7), ha="center", fontsize=8)
    return figure


def _draw_ratio(axes: Any, row: int, quantity: Ratio, is_base: bool, color: str) -> None:
    """Draw a bar for what was judged, and for the baseline, which is 1."""
    if is_base and quantity.values:
        axes.barh(row, 1, color=color, height=0.62)
        _note(axes, "1", 1, row, (5, 0), va="center")
    elif (ratio := quantity.ratio) and not quantity.why:
        axes.errorbar(ratio.mean, row, xerr=[[ratio.mean - ratio.low], [ratio.high - ratio.mean]], color=INK, capsize=3)
        axes.barh(row, ratio.mean, color=color, height=0.62)
        _note(axes, f"{ratio.mean:.2f}x", ratio.high, row, (5, 0), va="center")


def _note(axes: Any, text: str, x: float, y: float, offset: tuple[int, int], **style: Any) -> None:
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=INK, **style)


def _loss(result: Result) -> Any:
    figure, axes = bare_figure(*SIZE)
    for arm in result.arms:
        runs = [o.series[LOSS] for o in result.outcomes if o.arm == arm.label and o.finished and LOSS in o.series]
        color = _color(result, arm)
        for steps, values in runs:
            axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        if runs:
            steps = min((steps for steps, _ in runs), key=len)
            means = np.mean([values[: len(steps)] for _, values in runs], axis=0)
            axes.plot(steps, means, "-", color=color, linewidth=1.8, label=plain(arm.label))
    if not axes.lines:
        return None
    axes.set_xlabel("optimizer step", color=QUIET)
    axes.set_ylabel("validation loss", color=QUIET)
    axes.grid(axis="y", color=RULE)
    axes.legend(frameon=False, labelcolor=INK)
    return figure
