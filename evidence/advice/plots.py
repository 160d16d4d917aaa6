"""The picture of the advice: speed against memory, and which candidates no other one beats in both."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from evidence.advice.schema import MEASURED, Advice, Entry
from evidence.page import COLORS, NOISE
from trainer.files import make_folder
from trainer.formats import mebibytes
from trainer.profiling.ledger import MIB
from trainer.tracking.plots import INK, QUIET, bare_figure

SIZE = (9, 5)
"""Inches."""
WINNER, BASELINE, FRONT = COLORS[2], COLORS[0], COLORS[1]
LONGEST = 36
"""Characters of a label in one line."""
MOST_LINES = 26
"""Of the list beside the axes."""


def picture(advice: Advice, path: Path) -> Path | None:
    """Draw the measured candidates into a PNG, and return its path; None: there is nothing to draw.

    Raises:
        OSError: it cannot be written.
    """
    figure = draw(advice)
    if figure is None:
        return None
    make_folder(path.parent)
    figure.savefig(path)
    return path


def draw(advice: Advice) -> Any:
    """Return the figure: peak memory to the right, throughput over the baseline's upwards; None: too little measured.

    The winner and the baseline have labels, the others on the Pareto front numbers, which a list beside explains. The
    rest is faint.
    """
    shown = drawn(advice)
    if len(shown) < 2:
        return None
    figure, axes = bare_figure(*SIZE)
    better = front(shown)
    axes.set_title(f"{advice.recipe} on {advice.hardware.get('name', advice.machine)}", loc="left", color=INK)
    axes.set_xlabel("peak memory of a step, MiB", color=QUIET)
    axes.set_ylabel(f"throughput of steps, times that of {advice.baseline}", color=QUIET)
    axes.grid(color="#e8eaed", linewidth=0.8)
    axes.axhline(1, color="#bdc1c6", linewidth=1)
    corners = _corners(better)
    axes.plot(*zip(*corners, strict=True), color=FRONT, linewidth=1.4, zorder=1)
    named, numbered = [], []
    for entry in shown:
        label = entry.candidate.label
        if label == advice.winner:
            _point(axes, entry, WINNER, "D", 9)
            named.append((entry, f"{label}: {_speed(entry):.2f}x"))
        elif label == advice.baseline:
            _point(axes, entry, BASELINE, "s", 9)
            named.append((entry, label))
        elif entry in better:
            _point(axes, entry, FRONT, "o", 11)
            numbered.append(entry)
        else:
            _point(axes, entry, NOISE, "o", 6, alpha=0.45)
    listed: list[str] = []
    for number, entry in enumerate(sorted(numbered, key=_speed, reverse=True), 1):
        lines = _key(number, entry)
        if len(listed) + len(lines) > MOST_LINES:
            break
        listed += lines
        style = {"ha": "center", "va": "center_baseline", "fontsize": 7, "color": INK, "zorder": 5}
        axes.text(_memory(entry), _speed(entry), str(number), **style)
    if listed:
        style = {"transform": axes.transAxes, "va": "top", "fontsize": 8, "linespacing": 1.5, "color": INK}
        axes.text(1.03, 1.0, "\n".join(listed), **style)
    _limits(axes, shown)
    apart = advice.winner != advice.baseline
    _legend(figure, axes, apart, bool(numbered), len(named) + len(numbered) < len(shown))
    _label(figure, axes, named, shown, corners)
    return figure


def _key(number: int, entry: Entry) -> list[str]:
    lines = textwrap.wrap(entry.candidate.label, LONGEST, break_on_hyphens=False)
    figures = f"{_speed(entry):.2f}x, {mebibytes(_memory(entry) * MIB)} MiB"
    return [f"{number}   {lines[0]}", *(f"     {line}" for line in [*lines[1:], figures])]


def _legend(figure: Any, axes: Any, apart: bool, numbered: bool, others: bool) -> None:
    kinds = [("D", WINNER, "advised")] + [("s", BASELINE, "default")] * apart
    kinds += [("o", FRONT, "Pareto front")] * numbered + [("o", NOISE, "others")] * others
    for marker, color, name in kinds:
        axes.plot([], [], marker, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=9)


def drawn(advice: Advice) -> list[Entry]:
    """Return the entries whose speed and memory were measured, the baseline among them."""
    return [
        entry for entry in advice.entries if entry.status == MEASURED and entry.speed is not None and entry.memory_bytes
    ]


def front(entries: list[Entry]) -> list[Entry]:
    """Return the Pareto front: those that no other one beats in both speed and memory, by their memory."""
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda each: (_memory(each), -_speed(each))):
        if not found or _speed(entry) > _speed(found[-1]):
            found.append(entry)
    return found


def _corners(better: list[Entry]) -> list[tuple[float, float]]:
    """Return the corners of the front's line: the highest speed that so much memory allows."""
    corners: list[tuple[float, float]] = []
    for entry in better:
        if corners:
            corners.append((_memory(entry), corners[-1][1]))
        corners.append((_memory(entry), _speed(entry)))
    return corners


def _speed(entry: Entry) -> float:
    assert entry.speed is not None
    return entry.speed.mean


def _memory(entry: Entry) -> float:
    assert entry.memory_bytes is not None
    return entry.memory_bytes / MIB


def _point(axes: Any, entry: Entry, color: str, marker: str, size: float, alpha: float = 1.0) -> None:
    assert entry.speed is not None
    axes.errorbar(
        _memory(entry),
        entry.speed.mean,
        yerr=[[entry.speed.mean - entry.speed.low], [entry.speed.high - entry.speed.mean]],
        fmt=marker,
        color=color,
        markersize=size,
        capsize=3,
        linewidth=1,
        alpha=alpha,
        zorder=2 if alpha < 1 else 3,
    )


def _limits(axes: Any, shown: list[Entry]) -> None:
    """Leave room for labels: both axes from below the lowest to above the highest point, 0 where that is near."""
    for values, set_limits in (
        ([_memory(entry) for entry in shown], axes.set_xlim),
        ([_speed(entry) for entry in shown], axes.set_ylim),
    ):
        low, high = min(values), max(values)
        room = max(high - low, 0.1 * high)
        set_limits(max(0.0, low - 0.2 * room), high + 0.2 * room)


_PLACES = [
    (dx * reach, dy * reach, "left" if dx > 0 else "right" if dx < 0 else "center")
    for reach in (1, 2, 3.5, 5.5, 8)
    for dx, dy in ((10, 6), (10, -14), (-10, 6), (-10, -14), (12, -4), (-12, -4), (0, 11), (0, -19))
]
"""Offsets of a label from its point in points of 1/72 inch, and how it is aligned; the nearest come first."""


def _label(
    figure: Any, axes: Any, named: list[tuple[Entry, str]], shown: list[Entry], corners: list[tuple[float, float]]
) -> None:
    """Write each label where it covers no other one, no point and not the front; if there is no such place, none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # the layout decides where the points are
    inside = axes.get_window_extent()
    points = axes.transData.transform([(_memory(entry), _speed(entry)) for entry in shown])
    taken = [Bbox.from_extents(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    turns = axes.transData.transform(corners)
    taken += [Bbox([turns[i : i + 2].min(0) - 2, turns[i : i + 2].max(0) + 2]) for i in range(len(turns) - 1)]
    for entry, text in named:
        lines = "\n".join(textwrap.wrap(text, LONGEST, break_on_hyphens=False))
        for dx, dy, aligned in _PLACES:
            note = axes.annotate(
                lines,
                (_memory(entry), _speed(entry)),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=aligned,
                fontsize=9,
                color=INK,
                weight="bold",
                arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 0.7, "shrinkB": 5},
                zorder=4,
            )
            note.update_positions(renderer)
            words = Text.get_window_extent(note, renderer)  # without the line to the point
            free = inside.x0 <= words.x0 and words.x1 <= inside.x1 and inside.y0 <= words.y0 and words.y1 <= inside.y1
            if free and not any(words.overlaps(other) for other in taken):
                taken.append(words)
                break
            note.remove()
