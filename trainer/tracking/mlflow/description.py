"""A run's Description on MLflow's page, in Markdown: its results, how to use the weights and to continue the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mantissa.display import duration, quantity, size
from trainer.errors import redacted
from trainer.files import SUMMARY_FILE, read_object

NOTE_TAG = "mlflow.note.content"
_OWN = re.compile(r"\*\*[^*]+\*\* in \S+ (on|finished|was stopped|failed) ")
"""How the texts below begin."""


def may_replace(note: str | None) -> bool:
    """Return whether a Description is empty or one of these, and not a user's."""
    return not note or _OWN.match(note) is not None


def opening_description(tags: dict[str, str], datasets: list[dict[str, Any]]) -> str:
    """Return the Description of a run that has started."""
    said = [f"**{tags.get('recipe', 'run')}** in {tags.get('precision', '?')} on {tags.get('hardware', '?')}."]
    said += [f"Data: {datasets[0]['description']}."] if datasets else []
    return " ".join([*said, "The summary will be here when the run has ended."])


def closing_description(folder: Path, run_id: str, model_id: str | None, *, resumable: bool) -> str | None:
    """Return the Description of a run that has ended; None: it was killed before it could write a summary.

    Args:
        folder: the run's.
        run_id: MLflow's.
        model_id: of the best weights, where they are a model.
        resumable: whether MLflow gets the checkpoints.
    """
    summary = read_object(folder / SUMMARY_FILE)
    if "resume" not in summary:
        return None
    how = {"FINISHED": "finished", "KILLED": "was stopped", "FAILED": "failed"}[summary["status"]]
    parts = [
        f"**{summary['recipe']}** in {summary['precision']} {how} at step {summary['step']} of {summary['steps']}.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _rows(summary))]),
    ]
    if (folder / "plots" / "loss.png").exists():
        parts.append(f"![loss](get-artifact?path=plots%2Floss.png&run_uuid={run_id})")
    parts.append(f"```\n{redacted(summary['resume'].partition(' resume=')[0])}\n```")
    if model_id:
        parts.append(f'The best weights: `mlflow.pyfunc.load_model("models:/{model_id}")`.')
    if resumable and list(folder.glob("checkpoints/step-*")):
        more = " with more `steps=`" if summary["status"] == "FINISHED" else ""
        parts.append(f"To continue it: `python scripts/train.py resume=mlflow:{run_id}`{more}.")
    return "\n\n".join(parts)


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if summary["best"]:
        metric = summary.get("best_metric", "valid/loss").removeprefix("valid/")
        rows.append((f"best {metric}", f"**{summary['best']['value']:.4g}** at step {summary['best']['step']}"))
    for when, values in (("{} at the end", summary["final"]), ("test {}, with the best weights", summary["test"])):
        rows += [(when.format(name), "not finite" if value is None else f"{value:.4g}")
                 for name, value in values.items()]  # fmt: skip
    if summary["units_per_s"]:
        speed = f"{quantity(summary['units_per_s'])} {summary['unit']}/s"
        speed += " in fp32 arithmetic" if summary["fp32_arithmetic"] else ""
        rows.append(("throughput", f"{speed}, {quantity(1e3 * summary['step_time_s'])} ms a step"))
    if mfu := summary["utilisation"].get("mfu"):
        rows.append(("MFU", f"{mfu:.1%} of the measured rate of products"))
    rows.append(("peak memory", f"{size(summary['peak_memory_bytes'])} {summary['memory_is']}"))
    rows.append(("skipped steps", str(summary["skipped_steps"])))
    rows.append(("time", duration(summary["wall_time_s"])))
    hardware, versions = summary["hardware"], summary["versions"]
    rows.append(("hardware", f"{hardware['name']} ({hardware['device']}), {summary['processes']} process(es)"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    return rows
