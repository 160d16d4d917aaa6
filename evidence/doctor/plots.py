"""The plots of a diagnosis: error by module, exponents of gradients."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from mantissa.doctor.checks import MODULES
from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.fp16_range import HIGHEST, LOWEST, Exponents
from mantissa.doctor.module_errors import LocalError
from mantissa.step.trace import BACKWARD, FORWARD
from mantissa.verdict.page import Plot
from trainer.tracking.plots import ALARM, COLORS, INK, QUIET, RULE, bare_figure

MOST = 40
"""Modules, or gradients, of one plot."""
_LONGEST = 30
"""Characters of a name; of a longer one the middle is left out."""
_WIDTH = 4.8
"""Inches."""


def figures(diagnosis: Diagnosis) -> list[Plot]:
    """Return the plots of what was examined."""
    drawn = []
    if (scales := diagnosis.range) is not None:
        scale = diagnosis.step.scale if scales.highest is not None else None
        layers = [layer for layer in scales.rows if layer.amax]
        outputs = [layer for layer in layers if layer.tensor == "output"]
        weights = [layer for layer in reversed(layers) if layer.tensor != "output"]  # they came in backward order
        drawn += [_exponents(what, part, scale) for what, part in (("outputs", outputs), ("weights", weights)) if part]
    if (errors := diagnosis.examined.get(MODULES)) is not None:
        for direction in (FORWARD, BACKWARD):
            rows = [row for row in errors.rows if 0 < row.e < math.inf and row.direction == direction]
            drawn += [_errors(direction, rows)] if rows else []
    return drawn


def _errors(direction: str, rows: list[LocalError]) -> Plot:
    """Draw the local error of each module beside its bound, of the row that is nearest to it; red: beyond it."""
    worst: dict[str, LocalError] = {}
    for row in rows:
        if row.ratio >= worst.setdefault(row.module, row).ratio:
            worst[row.module] = row
    nearest = heapq.nlargest(MOST, worst.values(), key=lambda row: row.ratio)
    shown = [row for row in worst.values() if row in nearest]
    figure, axes = _by_name([row.module or "(the model itself)" for row in shown])
    places, colors = range(len(shown)), [ALARM if row.ratio > 1 else COLORS[0] for row in shown]
    axes.scatter([row.e for row in shown], places, c=colors, label="error")
    axes.plot([row.bound for row in shown], places, "|", color=INK, markersize=7, label="bound")
    axes.set_xscale("log")
    axes.grid(axis="x", color=RULE)
    axes.set_xlabel("relative error", color=QUIET)
    _legend(figure)
    of = f", the {MOST} of {len(worst)} modules nearest to their bounds" if len(worst) > MOST else ""
    return f"Error by module, {direction}{of}", figure


def _exponents(what: str, layers: list[Exponents], scale: float | None) -> Plot:
    """Draw how the base-2 exponents of each gradient are distributed, and what fp16 holds of them at a loss scale.

    Args:
        what: the gradients are of.
        layers: one row each, the largest and those that lose most if they are many.
        scale: the loss scale; None: the run's format has no need of one.
    """
    from matplotlib.colors import LogNorm

    largest = sorted(layers, key=lambda layer: layer.amax)[-MOST // 2 :]
    losing = sorted(layers, key=lambda layer: layer.lost(scale or 1.0))[-MOST // 2 :]
    shown = [layer for layer in layers if len(layers) <= MOST or layer in largest + losing]
    shares = np.array([(layer.counts / layer.counts.sum()).tolist() for layer in shown])
    figure, axes = _by_name([layer.name.removesuffix(".output") for layer in shown])
    extent = (LOWEST, HIGHEST + 1, len(shown) - 0.5, -0.5)
    image = axes.imshow(
        np.ma.masked_equal(shares, 0), extent=extent, aspect="auto", norm=LogNorm(1e-4, 1), cmap="YlGnBu"
    )
    used = np.flatnonzero(shares.any(0)) + LOWEST
    limits = [used[0], used[-1] + 1.0]
    if scale is not None:
        for size, exponent, color in (("small", -24, COLORS[4]), ("large", 16, INK)):
            limits.append(exponent - math.log2(scale))
            axes.axvline(limits[-1], color=color, linewidth=1.4, label=f"too {size} for fp16, scale {scale:.10g}")
        _legend(figure)
    axes.set_xlim(min(limits) - 1, max(limits) + 1)
    axes.set_xlabel("exponent of the gradient, to base 2", color=QUIET)
    figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, label="share of the nonzero elements")
    of = f", {len(shown)} of {len(layers)}: the largest, and those that lose most" if len(layers) > len(shown) else ""
    return f"Gradients of {what}{of}", figure


def _by_name(names: list[str]) -> tuple[Any, Any]:
    """Return a figure and its axes, with one row for each name, the first one at the top."""
    figure, axes = bare_figure(_WIDTH, 1.5 + 0.21 * len(names))
    shown = [name if len(name) <= _LONGEST else f"{name[:9]}…{name[10 - _LONGEST :]}" for name in names]
    axes.set_yticks(range(len(names)), shown, color=INK, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    return figure, axes


def _legend(figure: Any) -> None:
    figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
