"""The plots of a diagnosis: lost updates over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from evidence.page import COLORS
from trainer.tracking.plots import INK, QUIET, Series, bare_figure

WIDTH, HEIGHT = 6.4, 3.8
"""Inches."""
_LOST, _EDQ = "numerics/lost_updates", "numerics/edq"


def updates(series: dict[str, Series], step: int) -> tuple[str, Any] | None:
    """Draw the lost updates of a run and their quality over time; None: they were not measured.

    Args:
        series: of the run's metric log.
        step: that is examined.
    """
    drawn = [
        (*series[name], color, label)
        for name, color, label in ((_LOST, COLORS[4], "lost updates"), (_EDQ, COLORS[0], "effective descent quality"))
        if name in series
    ]
    if not drawn:
        return None
    figure, axes = bare_figure(WIDTH, HEIGHT)
    for steps, values, color, label in drawn:
        axes.plot(steps, values, "o-", color=color, linewidth=1.8, markersize=3, label=label)
    axes.axvline(step, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), label=f"step {step}")
    highest = max((float(np.nanmax(values)) for _, values, *_ in drawn if np.isfinite(values).any()), default=1.0)
    axes.set_ylim(min(0.0, *(float(np.nanmin(values)) for _, values, *_ in drawn)), 1.1 * max(1.0, highest))
    axes.set_xlabel("optimizer step", color=QUIET)
    axes.grid(axis="y", color="#e8eaed")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=INK, fontsize=8)
    return "Lost updates over time, a fraction of all", figure
