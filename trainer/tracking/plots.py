"""The curves of one run as PNG files, drawn from its metric log."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.verdict.page import ALARM, INK, QUIET, RULE
from trainer.files import LAYERS, METRICS_FILE, MODE_PREFIX, read_json_lines

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", INK)
"""Distinguishable with any colour vision (Okabe and Ito 2008)."""
SMOOTH_FROM = 100
"""From this many points on, the raw curve is drawn faintly below its running mean."""
COLUMNS = 200
"""Steps of a plot of layers × steps, at most."""
_SQNR = f"{LAYERS}sqnr_db/"
_OPERANDS = {
    "input": "forward: input",
    "weight": "forward: weight",
    "dgrad": "gradient, in dgrad",
    "wgrad": "gradient, in wgrad",
}

Series = tuple[np.ndarray, np.ndarray]
"""Steps (int64) and values (float64; NaN where the value was not finite), in the order logged."""


def plot_run(folder: Path) -> None:
    """Draw ``plots/loss.png`` of a run, and ``plots/layers.png``, if its metric log has what they show."""
    series = read_series(folder / METRICS_FILE)
    layers = {name: each for name, each in series.items() if name.startswith(_SQNR)}
    if layers or "loss" in series or "valid/loss" in series:
        (folder / "plots").mkdir(exist_ok=True)
    if "loss" in series or "valid/loss" in series:
        _loss_figure(series, folder.name).savefig(folder / "plots" / "loss.png")
    if layers:
        _layers_figure(layers, folder.name).savefig(folder / "plots" / "layers.png")


def read_series(metrics_file: Path) -> dict[str, Series]:
    """Read a metric log into one series per metric."""
    points: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in read_json_lines(metrics_file):
        step = line.pop("step")
        for name, value in line.items():
            points[name].append((step, float("nan") if value is None else value))
    return {
        name: (np.array([step for step, _ in pairs]), np.array([value for _, value in pairs], dtype=float))
        for name, pairs in points.items()
    }


def bare_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of so many inches, and its axes with quiet lines on the left and at the bottom only."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(colors=QUIET, length=0)
    axes.set_axisbelow(True)
    return figure, axes


def plain(text: str) -> str:
    """Return a user's text so that matplotlib reads no formula between two ``$``."""
    return text.replace("$", r"\$")


def _loss_figure(series: dict[str, Series], title: str) -> Any:
    figure, axes = bare_figure(8, 4.5)
    axes.set_title(f"{plain(title)}: loss", loc="left", color=INK, fontsize=12)
    axes.set_xlabel("optimizer step", color=QUIET)
    axes.set_ylabel("loss", color=QUIET)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.locator_params(axis="x", integer=True, nbins=8)
    if "loss" in series:
        steps, values = series["loss"]
        _training_curve(axes, steps, values)
        broken = steps[~np.isfinite(values)]
        if broken.size:
            place, label = axes.get_xaxis_transform(), f"not finite ({broken.size})"
            axes.plot(broken, np.full(broken.size, 0.02), "|", color=ALARM, markersize=9, transform=place, label=label)
    if "valid/loss" in series:
        steps, values = series["valid/loss"]
        trained = values[(steps > 0) & np.isfinite(values)]
        best = f", best {trained.min():.4g}" if trained.size else ""
        axes.plot(steps, values, "o-", color=COLORS[4], linewidth=1.8, markersize=4, label=f"validation{best}")
    for name, (steps, _) in series.items():
        if name.startswith(MODE_PREFIX):
            mode = name.removeprefix(MODE_PREFIX)
            axes.axvline(steps[0] - 0.5, color=QUIET, linestyle="--", linewidth=1, label=f"{mode} from step {steps[0]}")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def layer_maps(series: dict[str, Series]) -> tuple[list[str], list[str], np.ndarray, np.ndarray]:
    """Return operands, layers, steps, and signal to quantisation noise: operands × layers × steps; NaN: none."""
    found = {tuple(name.removeprefix(_SQNR).split("/", 1)): each for name, each in series.items()}
    there, layers = {operand for operand, _ in found}, list(dict.fromkeys(layer for _, layer in found))
    operands = [operand for operand in _OPERANDS if operand in there]
    steps = np.unique(np.concatenate([steps for steps, _ in found.values()]))
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, COLUMNS).round().astype(int))]
    maps = np.full((len(operands), len(layers), len(steps)), np.nan)
    for (operand, layer), (at, values) in found.items():
        shown = np.isin(at, steps)
        maps[operands.index(operand), layers.index(layer), np.searchsorted(steps, at[shown])] = values[shown]
    return operands, layers, steps, maps


def _layers_figure(series: dict[str, Series], title: str) -> Any:
    """Return heat maps of layers × steps, one of each operand."""
    from matplotlib.figure import Figure

    operands, layers, steps, maps = layer_maps(series)
    height = min(40, 1.6 + 0.16 * len(layers))
    figure = Figure(figsize=(2.6 + 2.4 * len(operands), height), dpi=120, layout="constrained")
    figure.suptitle(f"{plain(title)}: signal to quantisation noise", x=0.01, ha="left", color=INK, fontsize=12)
    low, high = np.nanmin(maps), np.nanmax(maps)
    edges = np.concatenate([steps[:1] - 0.5, (steps[1:] + steps[:-1]) / 2, steps[-1:] + 0.5])
    for number, operand in enumerate(operands):
        axes = figure.add_subplot(1, len(operands), number + 1)
        image = axes.pcolormesh(edges, np.arange(len(layers) + 1), maps[number], vmin=low, vmax=high, cmap="viridis")
        axes.set_title(_OPERANDS[operand], loc="left", color=QUIET, fontsize=9)
        axes.set_xlabel("optimizer step", color=QUIET, fontsize=8)
        axes.set_yticks(np.arange(len(layers)) + 0.5, [plain(layer) for layer in layers] if number == 0 else [])
        axes.invert_yaxis()
        axes.set_xticks(steps[:: -(-len(steps) // 4)])
        axes.tick_params(colors=QUIET, length=0, labelsize=7)
        axes.spines[:].set_color(RULE)
    figure.colorbar(image, ax=figure.axes, label="dB", pad=0.01, aspect=30)
    return figure


def _training_curve(axes: Any, steps: np.ndarray, values: np.ndarray) -> None:
    if len(values) < SMOOTH_FROM:
        axes.plot(steps, values, "o" if len(values) == 1 else "-", color=COLORS[0], linewidth=1.8, label="training")
        return
    width, finite = max(3, len(values) // 50) | 1, np.isfinite(values)
    count, total = (np.convolve(part, np.ones(width), "same") for part in (finite, np.where(finite, values, 0)))
    mean = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    axes.plot(steps, values, color=COLORS[0], linewidth=0.8, alpha=0.3)
    axes.plot(steps, mean, color=COLORS[0], linewidth=1.8, label=f"training, mean of {width} points")
