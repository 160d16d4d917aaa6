"""The plots of a diagnosis: error by module, exponents of gradients, losses that diverge, lost updates over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.divergence import TIMES
from mantissa.doctor.pairs import Row
from mantissa.doctor.range import HIGHEST, LOWEST, Exponents
from mantissa.finding import BACKWARD, FORWARD
from mantissa.page import COLORS, NOISE
from trainer.tracking.plots import ALARM, INK, QUIET, Series, bare_figure

MOST = 40
"""Modules, or gradients, of one plot."""
_LONGEST = 48
"""Characters of a name; of a longer one the middle is left out."""
_WIDTH, _HEIGHT = 6.4, 3.8
"""Inches."""

Plot = tuple[str, Any]
"""A title and a matplotlib figure."""


def figures(diagnosis: Diagnosis, series: Mapping[str, Series]) -> dict[str, list[Plot]]:
    """Return the plots by check; ``series`` are of the run's metric log."""
    step, found = diagnosis.replay.step, diagnosis.range
    layers = found.layers if found is not None else []
    scales = {}
    if found is not None and found.highest is not None:
        scales = {f"scale {step.scale:.10g}": step.scale} | {f"scale 2^{found.highest}": 2.0**found.highest}
    outputs = [layer for layer in layers if layer.tensor == "output"]
    weights = [layer for layer in reversed(layers) if layer.tensor != "output"]  # they came in backward order
    rows = diagnosis.pairs.rows if diagnosis.pairs is not None else []
    losses = diagnosis.losses
    return {
        "range": [plot for part in (outputs, weights) if (plot := _exponents(part, scales))],
        "pairs": [plot for direction in (FORWARD, BACKWARD) if (plot := _errors(rows, direction))],
        "divergence": [_divergence(losses, diagnosis.replay.precision, step.number)] if losses else [],
        "updates": [plot] if (plot := _updates(series, step.number)) else [],
    }


def _errors(rows: Iterable[Row], direction: str) -> Plot | None:
    """Draw the local error of each module beside its bound, of the row that is nearest to it; None: there is none."""

    def nearness(row: Row) -> tuple[float, float]:
        return row.ratio, row.e / row.bound

    worst: dict[str, Row] = {}
    for row in rows:
        if row.direction == direction and 0 < row.e < math.inf:
            worst[row.module] = max(worst.get(row.module, row), row, key=nearness)
    if not worst:
        return None
    nearest = sorted(worst.values(), key=nearness, reverse=True)[:MOST]
    shown = [row for row in worst.values() if row in nearest]
    figure, axes = bare_figure(_WIDTH, 1.1 + 0.21 * len(shown))
    for label, color, marker, values in (
        ("accumulated (not judged)", NOISE, ".", [row.accumulated for row in shown]),
        ("error", COLORS[0], "o", [row.e if row.ratio <= 1 else math.nan for row in shown]),
        ("error beyond its bound", ALARM, "o", [row.e if row.ratio > 1 else math.nan for row in shown]),
        ("bound", INK, "|", [row.bound for row in shown]),
    ):
        axes.plot(values, range(len(shown)), marker, color=color, markersize=7, label=label)
    axes.set_xscale("log")
    _label_rows(axes, [row.module for row in shown])
    axes.set_xlabel("relative error", color=QUIET)
    _legend(figure, 4)
    of = f", the {MOST} of {len(worst)} modules nearest to their bounds" if len(worst) > MOST else ""
    return f"Error by module, {direction}{of}", figure


def _label_rows(axes: Any, names: list[str]) -> None:
    """Write the names of modules at the rows, the first one at the top."""
    shown = [name if len(name) <= _LONGEST else f"{name[:9]}…{name[10 - _LONGEST :]}" for name in names]
    axes.set_yticks(range(len(names)), [name or "(the model itself)" for name in shown], color=INK, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="#e8eaed")


def _legend(figure: Any, columns: int) -> None:
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, labelcolor=INK, fontsize=9)


def _exponents(layers: Sequence[Exponents], scales: Mapping[str, float]) -> Plot | None:
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
    figure, axes = bare_figure(_WIDTH, 1.5 + 0.21 * len(shown))
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
    _label_rows(axes, [f"{layer.module}.{layer.tensor}".removesuffix(".output") for layer in shown])
    axes.grid(visible=False)  # it would lie above the image
    axes.set_xlabel("exponent of the gradient, to base 2", color=QUIET)
    label = "share of the nonzero elements"
    figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, aspect=40, label=label).outline.set_visible(False)
    if scales:
        _legend(figure, 2)
    of = f", {len(shown)} of {len(drawn)}: the largest, and those that lose most" if len(drawn) > len(shown) else ""
    return f"Gradients of {'outputs' if shown[0].tensor == 'output' else 'weights'}{of}", figure


def _nearest(layers: list[Exponents], scale: float) -> list[Exponents]:
    """Return the layers that are nearest to fp16's limits, in their order."""
    if len(layers) <= MOST:
        return layers
    by_size = sorted(layers, key=lambda layer: layer.amax)
    by_loss = sorted(layers, key=lambda layer: layer.lost(scale)[1])
    return [layer for layer in layers if layer in by_size[-MOST // 2 :] + by_loss[-MOST // 2 :]]


def _divergence(losses: Mapping[str, Sequence[float]], own: str, step: int) -> Plot:
    """Draw how far the losses of the next steps are from those of fp32, and how far they may be.

    Args:
        losses: by name.
        own: the name of the run's format; the others are fp32's.
        step: the first one.
    """
    references = np.array([values for name, values in losses.items() if name != own])
    spread = np.maximum.accumulate(references.max(0) - references.min(0))
    steps = np.arange(step, step + len(spread))
    figure, axes = bare_figure(_WIDTH, _HEIGHT)
    label = f"within {TIMES:g} × the spread of fp32"
    axes.fill_between(steps, TIMES * spread, color=NOISE, alpha=0.25, label=label)
    axes.plot(steps, np.abs(np.array(losses[own]) - references.mean(0)), "o-", color=COLORS[0], markersize=3, label=own)
    axes.set_yscale("log")
    _over_steps(axes)
    _legend(figure, 2)
    return f"Distance of the loss from that of fp32, whose weights are changed by {own}'s rounding", figure


def _updates(series: Mapping[str, Series], step: int) -> Plot | None:
    """Draw the lost updates of a run and their quality over time; None: they were not measured."""
    names = {"numerics/lost_updates": "lost updates", "numerics/edq": "effective descent quality"}
    if not names.keys() & series.keys():
        return None
    figure, axes = bare_figure(_WIDTH, _HEIGHT)
    for (name, label), color in zip(names.items(), (COLORS[4], COLORS[0]), strict=True):
        if name in series:
            axes.plot(*series[name], "o-", color=color, linewidth=1.8, markersize=3, label=label)
    axes.axvline(step, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), label=f"step {step}")
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(1.1, axes.get_ylim()[1]))
    _over_steps(axes)
    _legend(figure, 3)
    return "Lost updates, as a share of all, and effective descent quality", figure


def _over_steps(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step", color=QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(axis="y", color="#e8eaed")
