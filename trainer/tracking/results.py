"""What MLflow gets of a run that has ended, from the files in its folder: its numbers as a whole, and a description.

| metric | is | at step |
|---|---|---|
| ``best_loss`` | the lowest validation loss after a training step | of that evaluation |
| ``best_…`` | the metric that marks the best checkpoint, where it is another one | of that evaluation |
| ``test_loss``, ``test_…`` | each metric of the test data, with the best weights | the last |
| ``throughput`` | units (tokens, images …) per second, without warm-up and evaluation | the last |
| ``step_time_ms`` | milliseconds per optimizer step, likewise | the last |
| ``mfu`` | MFU, the share of the measured matmul throughput, likewise (0 to 1) | the last |
| ``peak_memory_mib`` | MiB: allocated on a GPU, else of a step's tensors (``profiler=memory``) | the last |
| ``reserved_memory_mib`` | MiB that torch has taken of a GPU, freed blocks included | the last |
| ``process_memory_mib`` | MiB that the process held, not on a GPU | the last |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.checkpoint.schema import steps
from trainer.files import BEST, CHECKPOINTS, SUMMARY_FILE, read_json_lines, read_object
from trainer.tracking.models import architecture
from trainer.tracking.tracked_run import TrackedRun

LOSS = "valid/loss"
NOTE_TAG = "mlflow.note.content"
"""The description on MLflow's page."""


def summary_lines(log: Path, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of a run as a whole, as lines of a metric log: ``step``, ``time`` and values by name.

    Args:
        log: its ``metrics.jsonl``; an incomplete last line (after a kill) is skipped.
        summary: the content of its ``summary.json``; of a run that was killed it is empty, and the best loss is all.
    """
    lines = list(read_json_lines(log))
    if not lines:
        return []
    step_time_s = summary.get("step_time_s")
    numbers = {
        "throughput": summary.get("units_per_s"),
        "step_time_ms": step_time_s and 1e3 * step_time_s,
        "mfu": summary.get("utilisation", {}).get("mfu"),
    }
    for name in ("peak_memory", "reserved_memory", "process_memory"):
        held_bytes = summary.get(f"{name}_bytes")
        numbers[f"{name}_mib"] = held_bytes and held_bytes / 2**20
    numbers = {name: float(f"{value:.4g}") for name, value in numbers.items() if value}
    numbers |= {f"test_{name}": value for name, value in summary.get("test", {}).items()}
    found = [_line(lines[-1], **numbers)]
    evaluated = [line for line in lines if line.get(LOSS) is not None and line["step"]]
    if lowest := min(evaluated, key=lambda line: line[LOSS], default=None):
        found.append(_line(lowest, best_loss=float(f"{lowest[LOSS]:.6g}")))  # a column shows few digits
    best, metric = summary.get("best"), summary.get("best_metric", LOSS)
    if best and metric != LOSS:
        name = metric.removeprefix("valid/").replace("/", "_")
        found.append({"step": best["step"], "time": lines[-1]["time"], f"best_{name}": best["value"]})
    return found


def best_lines(log: Path, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of the best weights, of validation and of test data, as lines of a metric log; none if none.

    Arguments are those of ``summary_lines``.
    """
    lines, best = list(read_json_lines(log)), summary.get("best")
    evaluated = [line for line in lines if best and line["step"] == best["step"] and LOSS in line]
    valid = [_line(line, **{name: line[name] for name in line if name.startswith("valid/")}) for line in evaluated[-1:]]
    test = {f"test_{name}": value for name, value in summary.get("test", {}).items()}
    return [*valid, *([_line(lines[-1], **test)] if valid and test else [])]  # a run may have ended before any line


def _line(of: dict[str, Any], **values: float | None) -> dict[str, Any]:
    return {"step": of["step"], "time": of["time"], **values}


def description(folder: Path, run: TrackedRun) -> str | None:
    """Return how a run went, how to use the weights and to continue it, in Markdown; None: it has no summary."""
    summary = read_object(folder / SUMMARY_FILE)
    if "resume" not in summary:
        return None
    how = {"FINISHED": "finished", "KILLED": "was stopped", "FAILED": "failed"}[summary["status"]]
    mode = summary["precision"]
    if then := summary.get("precision_then"):
        mode += f", after step {summary['precision_until']} in {then},"
    failed = summary.get("failure") or summary  # at a step before the last one, whose values the host read later
    said = f"**{summary['recipe']}** in {mode} {how} at step {failed['step']} of {summary['steps']}"
    if summary["best"]:
        metric = summary["best_metric"].removeprefix("valid/")
        said += f"; best {metric}: {summary['best']['value']:.4g} at step {summary['best']['step']}"
    if worse := summary.get("worse_than_before"):
        said += f"; {worse}"
    parts = [run.tags["note"]] if "note" in run.tags else []
    parts.append(f"{said}. Reason: {summary['error']}." if summary.get("error") else f"{said}.")
    if (folder / "plots" / "loss.png").exists():
        parts.append(f"![loss](get-artifact?path=plots%2Floss.png&run_uuid={run.run_id})")
    if (folder / BEST).exists():
        opens = "transformers.load_model" if architecture(folder) else "artifacts.download_artifacts"
        parts.append(f'The best weights: `mlflow.{opens}("{run.address}/{BEST}")`.')
    if run.checkpoints != "none" and steps(folder / CHECKPOINTS):
        more = " with more `steps=`" if summary["status"] == "FINISHED" else ""
        parts.append(f"To continue it: `python scripts/train.py resume=mlflow:{run.run_id}`{more}.")
    return "\n\n".join(parts)
