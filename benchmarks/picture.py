"""Draw a comparison of precisions on every machine, on one scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mantissa.page import ALARM, INK, MARGIN, QUIET, RULE
from mantissa.statistics import EQUIVALENT, WORSE
from trainer.tracking.plots import COLORS

COMPARISON = "precisions"
PANELS = (
    ("speed", "speed over fp32, faster →", (0, 2.5)),
    ("memory", "← memory over fp32", (0, 1.4)),
    ("validation loss", "← change of loss, %", (-0.5, 1.2)),
)
"""Each quantity from the left to the right, with the words and the limits of its axis."""
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""The box of a text, so that no line crosses it."""
VERDICTS = {EQUIVALENT: "#137333", WORSE: ALARM}


def draw(machines: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw what was measured, by name, of each machine, by title: bars of ratios, and points beside their verdicts."""
    from matplotlib.figure import Figure

    lines: list[tuple[str, str]] = []  # machine and arm; without an arm, its title
    for machine, measured in machines.items():
        arms = dict.fromkeys(name.split(", ")[1] for name in measured if name.startswith(f"{COMPARISON}, "))
        lines += [(machine, arm) for arm in ("", *arms)] if arms else []
    colors = dict(zip(dict.fromkeys(arm for _, arm in lines if arm), COLORS, strict=False))
    figure = Figure(figsize=(8, 0.8 + 0.3 * len(lines)), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True, width_ratios=(5, 3, 3))
    for axes, (quantity, label, limits) in zip(panels, PANELS, strict=True):
        axes.set(xlabel=label, xlim=limits, ylim=(len(lines) - 0.4, -0.6), axisbelow=True)
        axes.set_yticks(range(len(lines)), [arm.removesuffix(" / fp32") for _, arm in lines], color=INK)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=11)
        axes.grid(axis="x", color=RULE)
        for y, (machine, arm) in enumerate(lines):
            if not arm and axes is panels[0]:
                axes.text(0, y + 0.1, machine, color=INK, weight="bold", va="center", bbox=BEHIND)
            if found := machines[machine].get(f"{COMPARISON}, {arm}, {quantity}"):
                value, verdict = found["value"], found.get("verdict")
                ends = {"xerr": [[value - found["low"]], [found["high"] - value]], "capsize": 3}
                beside = {
                    "textcoords": "offset points",
                    "xytext": (6, 0),
                    "va": "center",
                    "fontsize": 11,
                    "bbox": BEHIND,
                }
                if verdict:
                    axes.axvspan(-0.3, 0.3, color=MARGIN, zorder=0)
                    axes.errorbar(value, y, fmt="o", color=colors[arm], **ends)
                    place, color = (1, y), VERDICTS.get(verdict, QUIET)
                    axes.annotate(verdict.lower(), place, xycoords=axes.get_yaxis_transform(), color=color, **beside)
                else:
                    axes.axvline(1, color=INK, linewidth=1)
                    axes.barh(y, value, color=colors[arm], height=0.7)
                    axes.errorbar(value, y, color=INK, **ends)
                    axes.annotate(f"{value:.2f}x", (found["high"], y), color=INK, **beside)
    figure.savefig(path, metadata={"Software": None})
