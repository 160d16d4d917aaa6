"""The plots of a diagnosis: error by module, exponents of gradients, losses that diverge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.fp16_range import HIGHEST, LOWEST, Exponents
from mantissa.doctor.module_errors import LocalError
from mantissa.doctor.training import TIMES, Divergence
from mantissa.finding import BACKWARD, FORWARD
from mantissa.page import Plot
from trainer.tracking.plots import ALARM, COLORS, INK, NOISE, QUIET, RULE, bare_figure

MOST = 40
"""Modules, or gradients, of one plot."""
_LONGEST = 30
"""Characters of a name; of a longer one the middle is left out."""
_WIDTH, _HEIGHT = 4.8, 3.2
"""Inches."""


def figures(diagnosis: Diagnosis) -> list[Plot]:
    """Return the plots of what was examined."""
    step, drawn = diagnosis.replay.step, []
    if (found := diagnosis.range) is not None:
        scales = {f"scale {step.scale:.10g}": step.scale} if found.highest is not None else {}
        scales |= {f"scale 2^{found.highest}": 2.0**found.highest} if found.highest is not None else {}
        layers = [layer for layer in found.layers if layer.amax]
        outputs = [layer for layer in layers if layer.tensor == "output"]
        weights = [layer for layer in reversed(layers) if layer.tensor != "output"]  # they came in backward order
        drawn += [_exponents(what, part, scales) for what, part in (("outputs", outputs), ("weights", weights)) if part]
    if diagnosis.modules is not None:
        rows = [row for row in diagnosis.modules.rows if 0 < row.e < math.inf]
        parts = {direction: [row for row in rows if row.direction == direction] for direction in (FORWARD, BACKWARD)}
        drawn += [_errors(direction, part) for direction, part in parts.items() if part]
    if diagnosis.divergence is not None:
        drawn.append(_divergence(diagnosis.divergence, diagnosis.replay.precision, step.number))
    return drawn


def _errors(direction: str, rows: Iterable[LocalError]) -> Plot:
    """Draw the local error of each module beside its bound, of the row that is nearest to it."""

    def nearness(row: LocalError) -> tuple[float, float]:
        return row.ratio, row.e / row.bound

    from matplotlib.ticker import NullFormatter

    worst: dict[str, LocalError] = {}
    for row in rows:
        worst[row.module] = max(worst.get(row.module, row), row, key=nearness)
    nearest = sorted(worst.values(), key=nearness)[-MOST:]
    shown = [row for row in worst.values() if row in nearest]
    figure, axes = _by_name([row.module or "(the model itself)" for row in shown])
    for label, color, marker, values in (
        ("accumulated (not judged)", NOISE, ".", [row.accumulated for row in shown]),
        ("error", COLORS[0], "o", [row.e if row.ratio <= 1 else math.nan for row in shown]),
        ("error beyond its bound", ALARM, "o", [row.e if row.ratio > 1 else math.nan for row in shown]),
        ("bound", INK, "|", [row.bound for row in shown]),
    ):
        axes.plot(values, range(len(shown)), marker, color=color, markersize=7, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim()
    axes.set_xlim(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)))
    axes.grid(axis="x", color=RULE)
    axes.set_xlabel("relative error", color=QUIET)
    _legend(figure, 2)
    of = f", the {MOST} of {len(worst)} modules nearest to their bounds" if len(worst) > MOST else ""
    return f"Error by module, {direction}{of}", figure


def _exponents(what: str, layers: Sequence[Exponents], scales: Mapping[str, float]) -> Plot:
    """Draw how the base-2 exponents of each gradient are distributed, and what fp16 holds of them.

    Args:
        what: the gradients are of.
        layers: one row each, the largest and those that lose most if they are many.
        scales: the loss scales whose limits are drawn, by name; none where the run's format has no need of one.
    """
    from matplotlib.colors import LogNorm

    shown, scale = layers, next(iter(scales.values()), 1.0)
    if len(layers) > MOST:
        largest = sorted(layers, key=lambda layer: layer.amax)[-MOST // 2 :]
        losing = sorted(layers, key=lambda layer: layer.lost(scale))[-MOST // 2 :]
        shown = [layer for layer in layers if layer in largest + losing]
    shares = np.array([(layer.counts / layer.counts.sum()).tolist() for layer in shown])
    used = np.flatnonzero(shares.any(0)) + LOWEST
    figure, axes = _by_name([f"{layer.module}.{layer.tensor}".removesuffix(".output") for layer in shown])
    image = axes.imshow(
        np.ma.masked_equal(shares, 0),
        extent=(LOWEST, HIGHEST + 1, len(shown) - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        norm=LogNorm(1e-4, 1),
        cmap="YlGnBu",
    )
    limits = [used[0], used[-1] + 1.0]
    for (name, value), style in zip(scales.items(), ("-", (0, (2, 2))), strict=False):
        least, largest_exponent = -24 - math.log2(value), 16 - math.log2(value)
        axes.axvline(least, color=COLORS[4], linewidth=1.4, linestyle=style, label=f"0 below, {name}")
        axes.axvline(largest_exponent, color=INK, linewidth=1.4, linestyle=style, label=f"infinite above, {name}")
        limits += [least, largest_exponent]
    axes.set_xlim(min(limits) - 1, max(limits) + 1)
    axes.set_xlabel("exponent of the gradient, to base 2", color=QUIET)
    label = "share of the nonzero elements"
    figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, aspect=40, label=label).outline.set_visible(False)
    if scales:
        _legend(figure, 2)
    of = f", {len(shown)} of {len(layers)}: the largest, and those that lose most" if len(layers) > len(shown) else ""
    return f"Gradients of {what}{of}", figure


def _divergence(found: Divergence, own: str, step: int) -> Plot:
    """Draw how far the losses of the steps from ``step`` on are from those of fp32 in the run's ``own`` format."""
    steps = range(step, step + len(found.away))
    figure, axes = bare_figure(_WIDTH, _HEIGHT)
    axes.fill_between(steps, found.limit, color=NOISE, alpha=0.25, label=f"within {TIMES:g} × the spread of fp32")
    axes.plot(steps, found.away, "o-", color=COLORS[0], markersize=3, label=own)
    axes.set_yscale("log")
    axes.set_xlabel("optimizer step", color=QUIET)
    axes.locator_params(axis="x", integer=True, nbins=8)
    axes.grid(axis="y", color=RULE)
    _legend(figure, 2)
    return f"Distance of the loss from fp32 with weights perturbed by {own}'s rounding", figure


def _by_name(names: list[str]) -> tuple[Any, Any]:
    """Return a figure and its axes, with one row for each name, the first one at the top."""
    figure, axes = bare_figure(_WIDTH, 1.5 + 0.21 * len(names))
    shown = [name if len(name) <= _LONGEST else f"{name[:9]}…{name[10 - _LONGEST :]}" for name in names]
    axes.set_yticks(range(len(names)), shown, color=INK, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _legend(figure: Any, columns: int) -> None:
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, labelcolor=INK, fontsize=9)
