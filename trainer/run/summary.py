"""``summary.json``: how a run ended, and what it measured; and the table of it at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mantissa.display import duration, finite, loss, quantity, size
from trainer.hardware import peak_memory_bytes
from trainer.precision.kernels import in_short, not_timed_here
from trainer.profiling.rates import forget_rate
from trainer.profiling.utilisation import text as mfu_text
from trainer.run.provenance import versions
from trainer.terminal import Rows
from trainer.trainer import Trainer

if TYPE_CHECKING:
    from trainer.run.run import Run


def run_summary(run: Run, status: str) -> dict[str, Any]:
    """Return the content of a run's summary.json so far, in plain JSON types; ``status`` is MLflow's."""
    config, trainer, scores, monitor = run.config, run.trainer, run.scores, run.monitor
    units_per_s, step_time_s = monitor.throughput() or (None, None)
    memory, ledger = peak_memory_bytes(trainer.device), run.profiler.ledger
    if monitor.utilisation.exceeded(units_per_s):
        forget_rate(trainer.hardware, monitor.utilisation.format)
    return {
        "status": status,
        "failure": run.failure,
        "run": run.folder.path.name,
        "recipe": config.recipe.name,
        "precision": config.precision.mode,
        "seed": config.seed,
        "tags": config.tags,
        "note": config.note,
        "step": trainer.step,
        "steps": trainer.plan.steps,
        "final": finite(scores.final),
        "test": {},  # with the best weights, at the end
        "best": scores.best,
        "best_metric": scores.metric,
        "best_is": "lowest" if scores.lowest else "highest",
        "stopped_early": scores.why if scores.exhausted and trainer.step < trainer.plan.steps else None,
        "unit": config.recipe.unit,
        "units_per_s": units_per_s,
        "step_time_s": step_time_s,
        "utilisation": monitor.utilisation.facts(units_per_s),
        **run.totals(),
        # Speed above, memory and checkpoints: since this process started or resumed the run.
        "peak_memory_bytes": memory if trainer.hardware.is_gpu else ledger and ledger.peak_bytes,
        "process_memory_bytes": None if trainer.hardware.is_gpu else memory,
        "not_timed": not_timed_here(
            config.precision.mode, trainer.hardware, config.precision.kernels, trainer.convolves
        ),
        "parallel": config.parallel.kind,
        "processes": trainer.world.size,
        "checkpoints": run.writer.facts(),
        "skipped_steps": monitor.skipped_steps,  # of the whole run
        "unreadable_samples": 0,  # counted at the end
        "resume": run.command,
        "mlflow": run.metric_log.run.address if run.metric_log else "",
        "hardware": trainer.hardware.facts(),
        "versions": versions(),
        "git": run.git,
    }


def unreadable_samples(trainer: Trainer) -> int:
    """Return how many samples could not be read, on any rank, each of which has to call this."""
    data = trainer.datasets
    marks = [getattr(part, "unreadable", torch.zeros(1)) for part in (data.train, data.valid, data.test)]
    return sum(int(trainer.world.all_reduce_sum(mark.float()).count_nonzero()) for mark in marks)


def summary_rows(summary: dict[str, Any]) -> Rows:
    """Return the table at the end of a run."""
    rows = [(name.removeprefix("valid/") + " (validation)", loss(value)) for name, value in summary["final"].items()]
    if best := summary["best"]:
        name = summary["best_metric"].removeprefix("valid/")
        rows.append((f"best {name}", f"{loss(best['value'])} at step {best['step']:.0f}"))
    rows += [(f"{name} (test)", loss(value)) for name, value in summary["test"].items()]
    if summary["stopped_early"]:
        rows.append(("stopped early", summary["stopped_early"]))
    if summary["units_per_s"]:
        how = in_short(summary["not_timed"])
        rows.append(("throughput", f"{quantity(summary['units_per_s'])} {summary['unit']}/s{how}"))
    if summary["step_time_s"]:
        rows.append(("step time", f"{quantity(1e3 * summary['step_time_s'])} ms"))
    if share := mfu_text(summary["utilisation"], summary["processes"]):
        rows.append(("MFU", share))
    for name in ("peak_memory", "process_memory"):
        if summary[f"{name}_bytes"]:
            rows.append((name.replace("_", " "), size(summary[f"{name}_bytes"])))
    rows.append(("skipped steps", str(summary["skipped_steps"])))
    if summary["unreadable_samples"]:
        rows.append(("unreadable samples", f"{summary['unreadable_samples']}, replaced by the next ones"))
    rows.append(("time", f"{duration(summary['wall_time_s'])}, of which training {duration(summary['train_time_s'])}"))
    if summary["mlflow"]:
        rows.append(("MLflow", summary["mlflow"]))
    return rows
