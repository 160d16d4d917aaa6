"""The results of a run as metrics to sort by, ``best/…`` and ``final/…``, from the files in its folder.

| metric | is | at step |
|---|---|---|
| ``best/valid_loss`` | the best value of the metric that marks the best checkpoint | of that evaluation |
| ``final/valid_loss``, ``final/valid_…`` | each validation metric of the last evaluation | of that evaluation |
| ``test/loss``, ``test/…`` | each metric of the test data, with the best weights | the last |
| ``final/throughput`` | units (tokens, images …) per second, without warm-up and evaluation | the last |
| ``final/step_time_ms`` | milliseconds per optimizer step, likewise | the last |
| ``final/mfu`` | MFU, the share of the measured rate of products, likewise (0 to 1) | the last |
| ``final/peak_memory_mib`` | MiB: allocated on a GPU, else of the process | the last |
| ``final/skipped_steps`` | steps skipped for an overflow | the last |
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from trainer.files import read_json_lines, read_object
from trainer.tracking.mlflow.store import valid_key

VALID = "valid/"


class SummaryMetric(NamedTuple):
    """One metric of a run as a whole."""

    name: str
    value: float
    step: int
    time_s: float
    """Seconds since the epoch."""


def summary_metrics(log: Path, summary: dict[str, Any]) -> list[SummaryMetric]:
    """Return the summary metrics of a run.

    Args:
        log: its ``metrics.jsonl``; an incomplete last line (after a kill) is skipped.
        summary: the content of its ``summary.json``; empty for a run that was killed.
    """
    lines = list(read_json_lines(log))
    if not lines:
        return []
    last = lines[-1]
    result = []
    evaluations = [line for line in lines if any(key.startswith(VALID) for key in line)]
    for key in dict.fromkeys(key for line in evaluations for key in line if key.startswith(VALID)):
        found = [line for line in evaluations if key in line]
        value = found[-1][key]
        if value is not None and not key.endswith("_nonfinite"):
            result.append(SummaryMetric(f"final/{_name(key)}", value, found[-1]["step"], found[-1]["time"]))
    result += _best(evaluations, summary)
    windows = [line for line in lines if "step_time_s" in line]
    rates = [key for line in windows for key in line if key.endswith("_per_s") and not key.startswith(VALID)]
    numbers = {
        "final/throughput": summary.get("units_per_s") or (_median(windows, rates[0]) if rates else None),
        "final/step_time_ms": _scaled(summary.get("step_time_s") or _median(windows, "step_time_s"), 1e3),
        "final/mfu": summary.get("utilisation", {}).get("mfu") or _median(windows, "mfu"),
        "final/peak_memory_mib": _scaled(_peak(windows, summary), 1 / 2**20),
        "final/skipped_steps": windows[-1].get("skipped_steps") if windows else None,
    }
    numbers |= {f"test/{name}": value for name, value in summary.get("test", {}).items()}
    result += [
        SummaryMetric(key, value, last["step"], last["time"]) for key, value in numbers.items() if value is not None
    ]
    return result


def unsent_summary_metrics(log: Path, summary: Path, stored: dict[str, int]) -> list[Any]:
    """Return the summary metrics of a run as MLflow's metrics, but for those whose step ``stored`` has reached."""
    from mlflow.entities import Metric

    return [
        Metric(valid_key(metric.name), float(metric.value), int(metric.time_s * 1000), metric.step)
        for metric in summary_metrics(log, read_object(summary))
        if metric.step > stored.get(valid_key(metric.name), -1)
    ]


def _best(evaluations: list[dict[str, Any]], summary: dict[str, Any]) -> list[SummaryMetric]:
    """Return the best evaluation: the one that the run has chosen, else the lowest loss."""
    best, key = summary.get("best"), summary.get("best_metric", f"{VALID}loss")
    for line in evaluations:
        if best and line["step"] == best["step"] and line.get(key) == best["value"]:
            return [SummaryMetric(f"best/{_name(key)}", best["value"], line["step"], line["time"])]
    found = [line for line in evaluations if line.get(f"{VALID}loss") is not None]
    if not found:
        return []
    line = min(found, key=lambda line: (line[f"{VALID}loss"], line["step"]))
    return [SummaryMetric("best/valid_loss", line[f"{VALID}loss"], line["step"], line["time"])]


def _name(key: str) -> str:
    return key.replace("/", "_")


def _median(lines: list[dict[str, Any]], key: str) -> float | None:
    """Return the median without the first line, which is of the warm-up, where there are more."""
    values = [line[key] for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    return statistics.median(values[1:] or values) if values else None


def _peak(lines: list[dict[str, Any]], summary: dict[str, Any]) -> float | None:
    values = [line["memory_bytes"] for line in lines if line.get("memory_bytes")]
    return max([*values, summary.get("peak_memory_bytes") or 0]) or None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
