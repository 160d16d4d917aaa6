"""The plots of a diagnosis: error by module, exponents of gradients, losses that diverge, lost updates over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from evidence.doctor.ladder.divergence import TIMES
from evidence.doctor.measured.pairs import Row
from evidence.doctor.measured.range import HIGHEST, LOWEST, Exponents
from mantissa.page import COLORS, NOISE
from trainer.tracking.plots import ALARM, INK, QUIET, Series, bare_figure

WIDTH, HEIGHT = 6.4, 3.8
"""Inches."""
MOST = 40
"""Modules, or gradients, of one plot."""
_LONGEST = 48
"""Characters of a name; of a longer one the middle is left out."""
_LOST, _EDQ = "numerics/lost_updates", "numerics/edq"


def errors(rows: Iterable[Row], direction: str) -> tuple[str, Any] | None:
    """Draw the local error of each module beside its bound, of the row that is nearest to it; None: there is none."""
    worst: dict[str, Row] = {}
    for row in rows:
        before = worst.get(row.module)
        if (
            row.direction == direction
            and 0 < row.e < math.inf
            and (before is None or _nearness(row) > _nearness(before))
        ):
            worst[row.module] = row
    if not worst:
        return None
    nearest = set(sorted(worst, key=lambda module: _nearness(worst[module]), reverse=True)[:MOST])
    shown = [row for module, row in worst.items() if module in nearest]
    figure, axes = bare_figure(WIDTH, 1.1 + 0.21 * len(shown))
    places = range(len(shown))
    least = min(min(row.e for row in shown) / 4, min(row.bound for row in shown) / 16)
    for wrong, color, label in ((False, COLORS[0], "error"), (True, ALARM, "error beyond its bound")):
        own = [place for place in places if (shown[place].ratio > 1) == wrong]
        if own:
            axes.barh(own, [shown[place].e - least for place in own], left=least, height=0.6, color=color, label=label)
    axes.plot([row.bound for row in shown], places, "|", color=INK, markersize=8, markeredgewidth=1.6, label="bound")
    run = [(row.accumulated, place) for place, row in enumerate(shown) if 0 < row.accumulated < math.inf]
    if run:
        axes.plot(*zip(*run, strict=True), "o", color=NOISE, markersize=3.5, label="accumulated (not judged)")
    axes.set_xscale("log")
    axes.set_xlim(left=least)
    _names(axes, [row.module for row in shown])
    axes.set_xlabel("relative error", color=QUIET)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, labelcolor=INK, fontsize=9)
    of = f", the {MOST} of {len(worst)} modules nearest to their bounds" if len(worst) > MOST else ""
    return f"Error by module, {direction}{of}", figure


def _nearness(row: Row) -> tuple[float, float]:
    return row.ratio, row.e / row.bound


def _names(axes: Any, names: list[str]) -> None:
    """Write the names of modules at the rows, the first one at the top."""
    shown = [name if len(name) <= _LONGEST else f"{name[:9]}…{name[10 - _LONGEST :]}" for name in names]
    axes.set_yticks(range(len(names)), [name or "(the model itself)" for name in shown], color=INK, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="#e8eaed")


def exponents(layers: Sequence[Exponents], scales: Mapping[str, float]) -> tuple[str, Any] | None:
    """Draw how the base-2 exponents of each gradient are distributed, and what fp16 holds of them.

    Args:
        layers: one row each; those that are 0 are left out.
        scales: the loss scales whose limits are drawn, by name; none where the run's format has no need of one.
    """
    from matplotlib.colors import LogNorm

    drawn = [layer for layer in layers if layer.amax]
    if not drawn:
        return None
    shown = _nearest(drawn, next(iter(scales.values()), 1.0))
    shares = np.array([(layer.counts / layer.counts.sum()).tolist() for layer in shown])
    used = np.flatnonzero(shares.any(0)) + LOWEST
    figure, axes = bare_figure(WIDTH, 1.5 + 0.21 * len(shown))
    image = axes.imshow(
        np.ma.masked_equal(shares, 0),
        extent=(LOWEST, HIGHEST + 1, len(shown) - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        norm=LogNorm(1e-4, 1),
        cmap="YlGnBu",
    )
    left, right = [used[0] - 1.0], [used[-1] + 2.0]
    for (name, value), style in zip(scales.items(), ("-", (0, (2, 2))), strict=False):
        least, largest = -24 - math.log2(value), 16 - math.log2(value)
        axes.axvline(least, color=COLORS[4], linewidth=1.4, linestyle=style, label=f"0 below, {name}")
        axes.axvline(largest, color=INK, linewidth=1.4, linestyle=style, label=f"infinite above, {name}")
        left, right = [*left, least - 1], [*right, largest + 1]
    axes.set_xlim(min(left), max(right))
    _names(axes, [f"{layer.module}.{layer.tensor}".removesuffix(".output") for layer in shown])
    axes.grid(visible=False)  # it would lie above the image
    axes.set_xlabel("exponent of the gradient, to base 2", color=QUIET)
    bar = figure.colorbar(
        image, ax=axes, location="bottom", shrink=0.5, aspect=40, label="share of the nonzero elements"
    )
    bar.outline.set_visible(False)
    if scales:
        figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
    of = f", {len(shown)} of {len(drawn)}: the largest, and those that lose most"
    what = "outputs" if shown[0].tensor == "output" else "weights"
    return f"Gradients of {what}{of if len(drawn) > len(shown) else ''}", figure


def _nearest(layers: list[Exponents], scale: float) -> list[Exponents]:
    """Return the layers that are nearest to fp16's limits, in their order."""
    if len(layers) <= MOST:
        return layers
    by_size = sorted(layers, key=lambda layer: layer.amax)
    by_loss = sorted(layers, key=lambda layer: layer.lost(scale)[1])
    chosen = set(map(id, by_size[-MOST // 2 :] + by_loss[-MOST // 2 :]))
    return [layer for layer in layers if id(layer) in chosen]


def divergence(losses: Mapping[str, Sequence[float]], own: str, step: int) -> tuple[str, Any]:
    """Draw how far the losses of the next steps are from those of fp32, and how far they may be.

    Args:
        losses: by name.
        own: the name of the run's format; the others are fp32's.
        step: the first one.
    """
    references = np.array([values for name, values in losses.items() if name != own])
    spread = np.maximum.accumulate(references.max(0) - references.min(0))
    steps = np.arange(step, step + len(spread))
    figure, axes = bare_figure(WIDTH, HEIGHT)
    label = f"within {TIMES:g} × the spread of fp32"
    axes.fill_between(steps, TIMES * spread, color=NOISE, alpha=0.25, label=label)
    axes.plot(steps, np.abs(np.array(losses[own]) - references.mean(0)), "o-", color=COLORS[0], markersize=3, label=own)
    axes.set_yscale("log")
    _over_steps(axes)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK)
    return f"Distance of the loss from that of fp32, whose weights are changed by {own}'s rounding", figure


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
    _over_steps(axes)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=INK)
    return "Lost updates, as a share of all, and effective descent quality", figure


def _over_steps(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step", color=QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(axis="y", color="#e8eaed")
