"""What MLflow gets of a run that has ended, from the files in its folder: metrics to sort by, and a description.

| metric | is | at step |
|---|---|---|
| ``best/valid_loss`` | the best value of the metric that marks the best checkpoint | of that evaluation |
| ``final/valid_loss``, ``final/valid_…`` | each validation metric of the last evaluation | of that evaluation |
| ``test/loss``, ``test/…`` | each metric of the test data, with the best weights | the last |
| ``final/throughput`` | units (tokens, images …) per second, without warm-up and evaluation | the last |
| ``final/step_time_ms`` | milliseconds per optimizer step, likewise | the last |
| ``final/mfu`` | MFU, the share of the measured matmul throughput, likewise (0 to 1) | the last |
| ``final/peak_memory_mib`` | MiB: allocated on a GPU, else of a step's tensors (``profiler=memory``) | the last |
| ``final/skipped_steps`` | steps skipped for an overflow | the last |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.checkpoint.schema import steps
from trainer.files import BEST, CHECKPOINTS, SUMMARY_FILE, read_json_lines, read_object
from trainer.tracking.models import architecture
from trainer.tracking.tracked_run import TrackedRun

VALID = "valid/"
NOTE_TAG = "mlflow.note.content"
"""The description on MLflow's page."""


def summary_lines(log: Path, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of a run as a whole, as lines of a metric log: ``step``, ``time`` and values by name.

    Args:
        log: its ``metrics.jsonl``; an incomplete last line (after a kill) is skipped.
        summary: the content of its ``summary.json``; of a run that was killed it is empty, and validation is all.
    """
    lines = list(read_json_lines(log))
    if not lines:
        return []
    last = {key: line for line in lines for key in line if key.startswith(VALID) and not key.endswith("_nonfinite")}
    """The last line that has a metric."""
    final = [_line(line, **{f"final/{key.replace('/', '_')}": line[key]}) for key, line in last.items()]
    step_time_s, peak_bytes = summary.get("step_time_s"), summary.get("peak_memory_bytes")
    numbers = {
        "final/throughput": summary.get("units_per_s"),
        "final/step_time_ms": step_time_s and 1e3 * step_time_s,
        "final/mfu": summary.get("utilisation", {}).get("mfu"),
        "final/peak_memory_mib": peak_bytes and peak_bytes / 2**20,
        "final/skipped_steps": summary.get("skipped_steps"),
    }
    numbers |= {f"test/{name}": value for name, value in summary.get("test", {}).items()}
    return [*final, *_best(lines, summary), _line(lines[-1], **numbers)]


def _best(lines: list[dict[str, Any]], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the best evaluation: the one that the run has chosen, else the lowest loss."""
    best, key = summary.get("best"), summary.get("best_metric", f"{VALID}loss")
    chosen = [line for line in lines if best and line["step"] == best["step"] and line.get(key) == best["value"]]
    if not chosen:
        key = f"{VALID}loss"
        chosen = [line for line in lines if line.get(key) is not None]
    line = min(chosen, key=lambda line: (line[key], line["step"]), default=None)
    return [_line(line, **{f"best/{key.replace('/', '_')}": line[key]})] if line else []


def _line(of: dict[str, Any], **values: float | None) -> dict[str, Any]:
    return {"step": of["step"], "time": of["time"], **values}


def description(folder: Path, run: TrackedRun) -> str | None:
    """Return how a run went, how to use the weights and to continue it, in Markdown; None: it has no summary."""
    summary = read_object(folder / SUMMARY_FILE)
    if "resume" not in summary:
        return None
    how = {"FINISHED": "finished", "KILLED": "was stopped", "FAILED": "failed"}[summary["status"]]
    said = f"**{summary['recipe']}** in {summary['precision']} {how} at step {summary['step']} of {summary['steps']}"
    if summary["best"]:
        metric = summary.get("best_metric", "valid/loss").removeprefix("valid/")
        said += f"; best {metric}: {summary['best']['value']:.4g} at step {summary['best']['step']}"
    parts = [run.tags["note"]] if "note" in run.tags else []
    parts.append(f"{said}.")
    if (folder / "plots" / "loss.png").exists():
        parts.append(f"![loss](get-artifact?path=plots%2Floss.png&run_uuid={run.run_id})")
    if (folder / BEST).exists():
        opens = "transformers.load_model" if architecture(folder) else "artifacts.download_artifacts"
        parts.append(f'The best weights: `mlflow.{opens}("{run.address}/{BEST}")`.')
    if run.checkpoints != "none" and steps(folder / CHECKPOINTS):
        more = " with more `steps=`" if summary["status"] == "FINISHED" else ""
        parts.append(f"To continue it: `python scripts/train.py resume=mlflow:{run.run_id}`{more}.")
    return "\n\n".join(parts)
