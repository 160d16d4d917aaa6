"""Draw a comparison of precisions on every machine, on one scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mantissa.verdict.page import ALARM, INK, QUIET, RULE
from mantissa.verdict.statistics import EQUIVALENT, WORSE
from trainer.tracking.plots import COLORS, bare_figure

COMPARISON = "precisions"
MEASURED = ("speed", "memory", "validation loss")
VERDICTS = {EQUIVALENT: "#137333", WORSE: ALARM}
CLEAR = {"va": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
"""Style of a text that lines do not cross."""


def draw(machines: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the speed of each precision on each machine, by title; beside it memory, and the verdict on its loss."""
    figure, axes = bare_figure(8, 1)
    rows, beside = dict[float, str](), axes.get_yaxis_transform()
    y = 0.0
    for machine, measured in machines.items():
        arms = dict.fromkeys(name.split(", ")[1] for name in measured if name.startswith(f"{COMPARISON}, "))
        if arms:
            axes.text(0, y, machine, color=INK, weight="bold", **CLEAR)
        for color, arm in zip(COLORS, arms, strict=False):
            y += 1
            rows[y] = arm.removesuffix(" / fp32")
            speed, memory, loss = (measured.get(f"{COMPARISON}, {arm}, {what}") for what in MEASURED)
            if speed:
                value, low, high = (speed[end] for end in ("value", "low", "high"))
                axes.barh(y, value, color=color, height=0.7)
                axes.errorbar(value, y, xerr=[[value - low], [high - value]], color=INK, capsize=3)
                axes.text(high + 0.04, y, f"{value:.2f}x", color=INK, **CLEAR)
            if memory:
                axes.text(1.03, y, f"{memory['value']:.2f}x", transform=beside, color=INK, **CLEAR)
            if loss:
                words, color = f"{loss['value']:+.2f} % {loss['verdict'].lower()}", VERDICTS.get(loss["verdict"], QUIET)
                axes.text(1.17, y, words, transform=beside, color=color, **CLEAR)
        y += 1.3 * bool(arms)
    for x, words in ((1.03, "memory"), (1.17, "validation loss")):
        axes.text(x, -0.3, words, transform=beside, color=QUIET, **CLEAR)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set(xlabel="speed over fp32, faster →", xlim=(0, 2.5), ylim=(y - 0.5, -0.8))
    axes.set_yticks(list(rows), list(rows.values()), color=INK)
    axes.grid(axis="x", color=RULE)
    axes.spines[:].set_visible(False)
    figure.set_size_inches(8, 0.7 + 0.28 * y)
    figure.savefig(path, metadata={"Software": None})
