"""The numbers of a training run by name, read from its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mantissa.verdict.runs import Curve
from trainer.tracking.plots import Series

LOSS = "valid/loss"
MEASURES = {
    "speed": "throughput",
    "memory": "peak memory of a step",
    "loss": "final validation loss",
    "best_loss": "best validation loss",
    "minutes": "minutes from start to end",
    "skipped": "skipped steps",
}
"""Names of the numbers that a claim may bound, and what they are called in a sentence."""


def values_of(summary: Mapping[str, Any], series: Mapping[str, Series], seconds: float) -> dict[str, float | None]:
    """Return the numbers of a run that finished; None: not finite.

    Args:
        summary: content of its summary.json.
        series: its metric log.
        seconds: from its start to its end.
    """
    measured = {
        # Units per second in training, without warm-up, evaluation and checkpoints.
        "speed": summary["units_per_s"],
        "step_s": summary["step_time_s"],
        # Allocated on a GPU, by the ledger elsewhere.
        "memory": summary["peak_memory_bytes"],
        "minutes": seconds / 60,
        "skipped": summary["skipped_steps"],
    }
    values = {name: value for name, value in measured.items() if value is not None}
    if LOSS in summary["final"]:
        values["loss"] = summary["final"][LOSS]  # null where it is not finite, as JSON has no infinity
    return values | {"best_loss": _best_loss(summary, series)}


def curve_of(steps: Iterable[float], losses: Iterable[float]) -> Curve:
    """Return the evaluations with finite losses, since JSON has no others; empty where the last loss is not finite."""
    points = [(int(step), float(loss)) for step, loss in zip(steps, losses, strict=True)]
    finite = [point for point in points if math.isfinite(point[1])]
    kept = finite if points[-1:] == finite[-1:] else []
    return [step for step, _ in kept], [loss for _, loss in kept]


def _best_loss(summary: Mapping[str, Any], series: Mapping[str, Series]) -> float | None:
    """Return the lowest validation loss after a training step; None: none was finite."""
    best = summary["best"]
    if best and summary["best_metric"] != LOSS:  # the best checkpoint is that of another metric
        points = zip(*(column.tolist() for column in series[LOSS]), strict=True)
        return min((loss for step, loss in points if step and math.isfinite(loss)), default=None)
    return float(best["value"]) if best else None
