"""How well a classifier does on each class: precision, recall and F1, and the confusion matrix as CSV and PNG."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mantissa.display import columns

SHOWN = 30
"""Classes in the terminal's table; of more, those with the lowest F1."""
_NUMBERS_UP_TO = 30
"""Classes up to which the picture has the counts in its cells."""
_NAMES_UP_TO = 60


class ClassScore(NamedTuple):
    """One class. A ratio without a denominator is None: no sample of the class, or none given to it."""

    name: str
    precision: float | None
    """Of the samples given this class, the share that are of it."""
    recall: float | None
    """Of the samples of this class, the share that were given it."""
    f1: float | None
    """Their harmonic mean."""
    samples: int
    """Of this class."""


def class_scores(confusion: np.ndarray, names: list[str]) -> list[ClassScore]:
    """Return the scores of every class that occurs, or that some sample was given.

    Args:
        confusion: int64, classes × classes: samples of the row's class that were given the column's.
        names: of the classes; the model may have more outputs.
    """
    right, of, given = confusion.diagonal(), confusion.sum(1), confusion.sum(0)

    def ratio(part: int, whole: int) -> float | None:
        return float(part / whole) if whole else None

    return [
        ClassScore(
            _name(index, names),
            ratio(right[index], given[index]),
            ratio(right[index], of[index]),
            ratio(2 * right[index], of[index] + given[index]),
            int(of[index]),
        )
        for index in np.flatnonzero(of + given).tolist()
    ]


def _name(index: int, names: list[str]) -> str:
    """Return the name of an output; one beyond the classes of the data has its number."""
    return names[index] if index < len(names) else str(index)


def table(scores: list[ClassScore]) -> str:
    """Return the scores as lines of text: all of them, or the lowest ``SHOWN``."""
    shown, title = scores, "class"
    if len(scores) > SHOWN:
        shown = sorted(scores, key=lambda score: score.f1 or 0)[:SHOWN]
        title = f"class (the lowest {SHOWN} of {len(scores)})"
    rows = [[title, "precision", "recall", "F1", "samples"]]
    for name, *ratios, samples in shown:
        rows.append([name, *("–" if value is None else f"{value:.3f}" for value in ratios), str(samples)])
    return columns(rows)


def write_classes(folder: Path, confusion: np.ndarray, names: list[str], scores: list[ClassScore]) -> None:
    """Write classes.csv, confusion.csv (rows: the samples' class) and confusion.png."""
    with (folder / "classes.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(ClassScore._fields), *scores])
    labels = [_name(index, names) for index in range(len(confusion))]
    with (folder / "confusion.csv").open("w", newline="", encoding="utf-8") as file:
        rows = [[label, *row] for label, row in zip(labels, confusion.tolist(), strict=True)]
        csv.writer(file).writerows([["class \\ given", *labels], *rows])
    _draw(folder / "confusion.png", confusion, labels)


def _draw(path: Path, confusion: np.ndarray, labels: list[str]) -> None:
    """Draw each row as shares of its class, so that small classes show, with the counts in the cells."""
    from matplotlib.figure import Figure

    classes = len(labels)
    side = min(14.0, 3 + 0.42 * classes)
    figure = Figure(figsize=(side, side), dpi=110, layout="constrained")
    axes: Any = figure.subplots()
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if classes <= _NUMBERS_UP_TO:
        for row, column in zip(*np.nonzero(confusion), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "#202124"
            axes.text(column, row, str(confusion[row, column]), ha="center", va="center", color=colour, fontsize=8)
    if classes <= _NAMES_UP_TO:
        turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if max(map(len, labels)) > 3 else {}
        axes.set_xticks(range(classes), labels, fontsize=8, **turned)
        axes.set_yticks(range(classes), labels, fontsize=8)
    axes.set_xlabel("class given by the model")
    axes.set_ylabel("class of the image")
    right = int(confusion.diagonal().sum())
    axes.set_title(f"{right:,} of {int(confusion.sum()):,} right; colour: share of the row", fontsize=10)
    figure.savefig(path)
