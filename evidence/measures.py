"""The measures of a run by name, read from its files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from evidence.runs import BUSY, DIVERGED, LOSS, Outcome
from trainer.hardware import kind_of


def final_loss(outcome: Outcome) -> float | None:
    """Return the validation loss after the last step, infinite where it is not finite."""
    loss: float | None = outcome.summary["final"].get(LOSS, math.nan)
    return math.inf if loss is None else None if math.isnan(loss) else loss  # null in JSON, which has no infinity


def best_loss(outcome: Outcome) -> float | None:
    """Return the lowest validation loss of the run, infinite where there was none."""
    best = outcome.summary["best"]
    if best and outcome.summary.get("best_metric", LOSS) != LOSS:  # the best checkpoint is that of another metric
        _, values = outcome.series[LOSS]
        return min((value for value in values if math.isfinite(value)), default=math.inf)
    return float(best["value"]) if best else math.inf


MEASURES: dict[str, tuple[Callable[[Outcome], float | None], str]] = {
    # Units per second in training, without warm-up, evaluation and checkpoints.
    "speed": (lambda run: run.summary["units_per_s"], "throughput"),
    # Allocated on a GPU, by the ledger elsewhere.
    "memory": (lambda run: run.summary["peak_memory_bytes"], "peak memory of a step"),
    "loss": (final_loss, "final validation loss"),
    "best_loss": (best_loss, "best validation loss"),
    "minutes": (lambda run: run.wall_time_s / 60, "minutes from start to end"),
    "skipped": (lambda run: run.summary["skipped_steps"], "skipped steps"),
}
"""Function that reads each measure of a training run, and its name in a sentence."""
TIMED = ("speed", "minutes")
"""Measures that say nothing about a format where a run computed it in fp32 arithmetic."""


def in_use(outcomes: Iterable[Outcome]) -> str:
    """Return why the times of runs on a CPU say little, and what to do: other processes used it; empty: they do."""
    arms: dict[str, list[float]] = {}
    for o in outcomes:
        device = o.summary.get("hardware", {}).get("device")
        if o.finished and o.others_cpu is not None and not (device and kind_of(device).own_memory):
            arms.setdefault(o.arm, []).append(o.others_cpu)
    share = max(map(statistics.fmean, arms.values()), default=0)
    if share < BUSY:  # the mean over an arm's runs
        return ""
    return f"other processes used {share:.0%} of the CPUs; measure again on a quiet machine, with another output_dir=…"


def measured(outcome: Outcome, name: str) -> float | None:
    """Return a measure of an outcome; None: not measured, or the run failed.

    The loss of a run that turned non-finite is infinite.
    """
    if outcome.exit_code == DIVERGED and name in ("loss", "best_loss"):
        return math.inf
    if not outcome.finished:
        return None
    return MEASURES[name][0](outcome)
