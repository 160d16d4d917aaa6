"""A run's Description on MLflow's page, in Markdown: what it was, its results, how to use and to continue it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.formats import duration, quantity, size

if TYPE_CHECKING:
    from mlflow import MlflowClient

NOTE_TAG = "mlflow.note.content"
HASH_TAG = "mantissa.note_sha256"
"""The hash of the text that was written last: a Description that a user has changed is not overwritten."""


def write_description(client: MlflowClient, run: Any, text: str) -> None:
    """Set a run's Description, unless a user has changed it."""
    before, own = run.data.tags.get(NOTE_TAG), run.data.tags.get(HASH_TAG)
    if before == text or (before and _digest(before) != own):
        return
    client.set_tag(run.info.run_id, HASH_TAG, _digest(text))
    client.set_tag(run.info.run_id, NOTE_TAG, text)


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
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = _rows(summary)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    how = {"FINISHED": "finished", "KILLED": "was stopped", "FAILED": "failed"}.get(summary["status"], "ended")
    command = re.sub(r"(://[^\s:/@]*):[^\s/]*@", r"\1:***@", str(summary["resume"]))
    parts = [
        f"**{summary['recipe']}** in {summary['precision']} {how} at step {summary['step']} of {summary['steps']}.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]),
    ]
    if (folder / "plots" / "loss.png").exists():
        parts.append(f"![loss](get-artifact?path=plots%2Floss.png&run_uuid={run_id})")
    parts.append(f"```\n{re.sub(r' resume=.*', '', command)}\n```")
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
    for name, value in summary["final"].items():
        rows.append((f"{name} at the end", "not finite" if value is None else f"{value:.4g}"))
    for name, value in summary.get("test", {}).items():
        rows.append((f"test {name}, with the best weights", "not finite" if value is None else f"{value:.4g}"))
    if summary["units_per_s"]:
        speed = f"{quantity(summary['units_per_s'])} {summary['unit']}/s"
        speed += " in fp32 arithmetic" if summary.get("fp32_arithmetic") else ""
        rows.append(("throughput", f"{speed}, {quantity(1e3 * summary['step_time_s'])} ms a step"))
    if mfu := summary.get("utilisation", {}).get("mfu"):
        rows.append(("MFU", f"{mfu:.1%} of the measured rate of products"))
    rows.append(("peak memory", f"{size(summary['peak_memory_bytes'])} {summary['memory_is']}"))
    rows.append(("skipped steps", str(summary["skipped_steps"])))
    rows.append(("time", duration(summary["wall_time_s"])))
    hardware = summary["hardware"]
    rows.append(("hardware", f"{hardware['name']} ({hardware['device']}), {summary['processes']} process(es)"))
    rows.append(
        ("versions", ", ".join(f"{name} {version}" for name, version in summary["versions"].items() if version))
    )
    return rows


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
