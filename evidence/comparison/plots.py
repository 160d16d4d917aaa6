"""The plots of a comparison: the three answers, loss curves, throughput, memory by category."""

from __future__ import annotations

from typing import Any

import numpy as np

from evidence.comparison.compare import Result
from evidence.comparison.judge import ArmResult
from evidence.measures import LOSS
from mantissa.display import mebibytes
from mantissa.ledger import CATEGORIES, MIB
from mantissa.page import MARGIN, PAPER
from trainer.tracking.plots import COLORS, INK, QUIET, RULE, bare_figure

SIZE = (4.6, 3.2)
"""Inches."""
PARTS = dict(
    zip(
        CATEGORIES,
        ("#0072b2", "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d9d9d9", "#d55e00", "#f0b27a"),
        strict=True,
    )
)


def figures(result: Result) -> dict[str, tuple[str, Any]]:
    """Return (title, matplotlib figure) by file name; what was not measured is left out."""
    drawn = {
        "answers": (
            f"Speed, memory and validation loss, relative to {result.comparison.baseline}",
            _answers(result),
        ),
        "loss": ("Validation loss, mean over the seeds; one faint line per run", _loss(result)),
        "speed": (f"Throughput, {result.facts['unit']} per second: mean, runs, 95 % interval", _speed(result)),
        "memory": ("Peak memory of one optimizer step", _memory(result)),
    }
    return {name: (title, figure) for name, (title, figure) in drawn.items() if figure is not None}


def _color(result: Result, arm: ArmResult) -> str:
    return COLORS[[other.label for other in result.arms].index(arm.label) % len(COLORS)]


def _answers(result: Result) -> Any:
    """Return the figure with the three answers side by side, a row for each arm; None if no speed is to be shown."""
    from matplotlib.figure import Figure

    arms = _timed(result)
    if not arms:
        return None
    figure = Figure(figsize=(5.4, 1 + 0.38 * len(arms)), dpi=200, layout="constrained")
    _draw_answers(figure.subplots(1, 3, sharey=True), result, arms)
    return figure


def _draw_answers(panels: Any, result: Result, arms: list[ArmResult]) -> None:
    base, margin = result.comparison.baseline, 100 * result.comparison.margin
    heads = (
        ("Fastest?", f"speed / {base}"),
        ("Less memory?", f"memory / {base}"),
        ("Same quality?", "change of loss, %"),
    )
    for axes, (title, label) in zip(panels, heads, strict=True):
        axes.set_title(title, fontsize=11, weight="bold", color=INK, loc="left")
        axes.set_xlabel(label, color=QUIET, fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(RULE)
        axes.tick_params(length=0, colors=QUIET, labelsize=10)
        axes.grid(axis="x", color=RULE)
        axes.set_axisbelow(True)
    panels[2].axvspan(-margin, margin, color=MARGIN, zorder=0)
    for row, arm in enumerate(arms):
        _draw_arm(panels, row, arm, _color(result, arm), is_base=arm.label == base)
    for axes in panels:
        axes.margins(x=0.4)
    _rows(panels[0], arms)


def _draw_arm(panels: Any, row: int, arm: ArmResult, color: str, is_base: bool) -> None:
    for axes, quantity in zip(panels, (arm.speed, arm.memory), strict=False):
        if (ratio := quantity.ratio) and not quantity.why:
            ends = [[ratio.mean - ratio.low], [ratio.high - ratio.mean]]
            axes.errorbar(ratio.mean, row, xerr=ends, color=INK, capsize=3, linewidth=1)
        elif not is_base:
            continue
        axes.barh(row, ratio.mean if ratio else 1, color=color, height=0.62)
        shown = f"{ratio.mean:.2f}x" if ratio else "1"
        end = (ratio.high if ratio else 1, row)
        axes.annotate(shown, end, xytext=(5, 0), textcoords="offset points", va="center", color=INK)
    if is_base:
        panels[2].plot(0, row, "D", color=color)
    elif arm.quality.test:
        mean, low, high = (100 * getattr(arm.quality.test.difference, end) for end in ("mean", "low", "high"))
        panels[2].errorbar(mean, row, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=4)
        verdict = arm.quality.verdict
        panels[2].annotate(
            verdict, (mean, row), xytext=(0, 7), textcoords="offset points", ha="center", color=INK, fontsize=8
        )


def _timed(result: Result) -> list[ArmResult]:
    """Return the arms whose speed was measured; none if only the baseline is left."""
    arms = [arm for arm in result.arms if arm.speed.values and not (arm.arithmetic or arm.not_timed)]
    return arms if len(arms) > 1 else []


def _loss(result: Result) -> Any:
    figure, axes = bare_figure(*SIZE)
    for arm in result.arms:
        runs = [o.series[LOSS] for o in result.outcomes if o.arm == arm.label and o.finished and LOSS in o.series]
        color = _color(result, arm)
        for steps, values in runs:
            axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        losses: dict[int, list[float]] = {}
        for steps, values in runs:
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                losses.setdefault(step, []).append(value)
        common = [step for step, values in losses.items() if len(values) == len(runs)]
        if common:
            means = [float(np.mean(losses[step])) for step in common]
            axes.plot(common, means, "-", color=color, linewidth=1.8, label=arm.label)
    if not axes.lines:
        return None
    axes.set_xlabel("optimizer step", color=QUIET)
    axes.set_ylabel("validation loss", color=QUIET)
    axes.grid(axis="y", color=RULE)
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _speed(result: Result) -> Any:
    from matplotlib.ticker import EngFormatter

    arms = _timed(result)
    if not arms:
        return None
    figure, axes = bare_figure(*SIZE)
    for row, arm in enumerate(arms):
        values = arm.speed.values
        middle = float(np.mean(values))
        axes.barh(row, middle, color=_color(result, arm), height=0.7)
        if arm.speed.value:
            half = (arm.speed.value.high - arm.speed.value.low) / 2
            axes.errorbar(middle, row + 0.18, xerr=half, color=INK, capsize=3, linewidth=1)
        axes.plot(values, [row + 0.18] * len(values), "o", color=PAPER, markeredgecolor=INK, markersize=4)
        shown = (
            f"{arm.speed.ratio.mean:.2f}x" if arm.speed.ratio and not arm.speed.why else EngFormatter(places=1)(middle)
        )
        axes.annotate(shown, (middle, row - 0.14), xytext=(6, 0), textcoords="offset points", va="center", color=INK)
    axes.set_xlim(0, 1.2 * max(max(arm.speed.values) for arm in arms))  # with few seeds the interval may be far wider
    _rows(axes, arms)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    return figure


def _memory(result: Result) -> Any:
    arms = [arm for arm in result.arms if arm.memory.values]
    if not arms:
        return None
    figure, axes = bare_figure(*SIZE)
    shown: set[str] = set()
    for row, arm in enumerate(arms):
        left = 0.0
        parts = (
            {name: arm.ledger[name] for name in CATEGORIES}
            if arm.ledger
            else {"allocated": float(np.mean(arm.memory.values))}
        )
        for name, amount in parts.items():
            if not amount:
                continue
            color = PARTS.get(name, _color(result, arm))
            label = None if name in shown or not arm.ledger else name.replace("_", " ")
            axes.barh(row, amount / MIB, left=left, color=color, height=0.6, label=label)
            shown.add(name)
            left += amount / MIB
        axes.annotate(
            mebibytes(left * MIB), (left, row), xytext=(4, 0), textcoords="offset points", va="center", color=INK
        )
    _rows(axes, arms)
    axes.margins(x=0.12)
    axes.set_xlabel("MiB", color=QUIET)
    if any(arm.ledger for arm in arms):
        figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=INK, fontsize=9)
    return figure


def _rows(axes: Any, arms: list[ArmResult]) -> None:
    axes.set_yticks(range(len(arms)), [arm.label for arm in arms], color=INK)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=RULE)
