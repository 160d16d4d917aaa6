"""``summary.json``: how a run ended, and what it measured; and the lines about it at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mantissa.display import counted, finite, loss, quantity, size
from mantissa.step.ledger import Ledger
from trainer.precision.kernels import in_short
from trainer.profiling.utilisation import text as mfu_text
from trainer.run.monitor import Monitor
from trainer.run.provenance import versions
from trainer.run.scores import PREFIX, Scores
from trainer.trainer import Trainer


def results(trainer: Trainer, scores: Scores, monitor: Monitor, ledger: Ledger | None) -> dict[str, Any]:
    """Return what a run has trained and measured so far, for summary.json, in plain JSON types.

    Speed, memory: since this process started or resumed the run. ``ledger``: of a step's memory, where it was recorded.
    """
    config, hardware, precision = trainer.config, trainer.hardware, trainer.config.precision
    units_per_s, step_time_s = monitor.throughput() or (None, None)
    memory = monitor.peak_memory()
    utilisation = monitor.utilisation
    if trainer.is_changed:  # each line of the log has its own
        why = f"the format changed after step {precision.until}"
        utilisation = replace(utilisation, unknown=why, measured_tflops=None, data_sheet_tflops=None)
    return {
        # what was trained
        "recipe": config.recipe.name,
        "precision": precision.mode,
        "precision_then": precision.then,
        "precision_until": precision.until,
        "seed": config.seed,
        "tags": config.tags,
        "note": config.note,
        "step": trainer.step,
        "steps": trainer.plan.steps,
        # how well
        "final": finite(scores.final),
        "test": {},  # with the best weights, at the end
        "best": scores.best,
        "best_metric": scores.metric,
        "before_training": scores.before,
        "worse_than_before": scores.worse_than_before or None,
        "best_is": "lowest" if scores.lowest else "highest",
        "stopped_early": scores.why if scores.exhausted and trainer.step < trainer.plan.steps else None,
        # how fast, in how much memory
        "unit": config.recipe.unit,
        "units_per_s": units_per_s,
        "step_time_s": step_time_s,
        "utilisation": utilisation.facts(units_per_s),
        "not_timed": precision.not_timed(hardware, trainer.convolves),
        "peak_memory_bytes": memory if hardware.is_gpu else ledger and ledger.peak_bytes,
        "reserved_memory_bytes": monitor.reserved_memory(),
        "process_memory_bytes": None if hardware.is_gpu else memory,
        "skipped_steps": monitor.skipped_steps,  # of the whole run
        "unreadable_samples": 0,  # counted at the end
        # where
        "parallel": config.parallel.kind,
        "processes": trainer.world.size,
        "hardware": hardware.facts(),
        "versions": versions(),
    }


def unreadable_samples(trainer: Trainer) -> int:
    """Return how many samples could not be read, on any rank, each of which has to call this."""
    data = trainer.datasets
    marks = [getattr(part, "unreadable", torch.zeros(1)) for part in (data.train, data.valid, data.test)]
    return sum(int(trainer.world.all_reduce_sum(mark.float()).count_nonzero()) for mark in marks)


def scores_in_short(summary: dict[str, Any]) -> str:
    """Return ``valid loss 2.5390, perplexity 12.6700 (best, step 200)``; where another step was the best, both.

    And that training has made it worse, where it has.
    """
    best, step = summary["best"], summary["step"]
    is_best = best and best["step"] == step
    parts = [f"valid {_named(summary['final'])} ({'best, ' if is_best else ''}step {step})"]
    if best and not is_best:
        parts.append(f"best {_named({summary['best_metric']: best['value']})} (step {best['step']:.0f})")
    return "; ".join(filter(None, [*parts, summary["worse_than_before"]]))


def _named(scores: dict[str, float | None]) -> str:
    return ", ".join(f"{name.removeprefix(PREFIX)} {loss(value)}" for name, value in scores.items())


def rate_in_short(summary: dict[str, Any]) -> str:
    """Return ``13.6k tokens/s median``, and what does not compute in the run's format; empty: no step was timed."""
    rate = summary["units_per_s"]
    return f"{quantity(rate)} {summary['unit']}/s median{in_short(summary['not_timed'])}" if rate else ""


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Return what a run has achieved, and what it took."""
    lines = [scores_in_short(summary)]
    if summary["test"]:
        lines.append(f"test {_named(summary['test'])}")
    if summary["stopped_early"]:
        lines.append(f"stopped early: {summary['stopped_early']}")
    if unreadable := summary["unreadable_samples"]:
        lines.append(f"{counted(unreadable, 'unreadable sample')}, replaced by the next ones")
    names = ("peak_memory_bytes", "reserved_memory_bytes", "process_memory_bytes", "skipped_steps")
    tensors, reserved, process, skipped = map(summary.get, names)
    cost = [
        rate_in_short(summary),
        mfu_text(summary["utilisation"]),
        tensors and f"{size(tensors)} peak ({f'GPU, {size(reserved)} reserved' if reserved else 'tensors'})",
        process and f"{size(process)} peak (process)",
        skipped and counted(skipped, "skipped step"),
    ]
    return [*lines, " · ".join(filter(None, cost))]
