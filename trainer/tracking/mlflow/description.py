"""The Description on MLflow's page of a run that has ended: how it went, how to use the weights and to continue it."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import redacted
from trainer.files import SUMMARY_FILE, read_object

NOTE_TAG = "mlflow.note.content"


def description(folder: Path, run_id: str, model_id: str | None, *, resumable: bool) -> str | None:
    """Return the Description in Markdown; None: the run was killed before it could write a summary.

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
    said = f"**{summary['recipe']}** in {summary['precision']} {how} at step {summary['step']} of {summary['steps']}"
    if summary["best"]:
        metric = summary.get("best_metric", "valid/loss").removeprefix("valid/")
        said += f"; best {metric}: {summary['best']['value']:.4g} at step {summary['best']['step']}"
    parts = [f"{said}."]
    if (folder / "plots" / "loss.png").exists():
        parts.append(f"![loss](get-artifact?path=plots%2Floss.png&run_uuid={run_id})")
    parts.append(f"```\n{redacted(summary['resume'].partition(' resume=')[0])}\n```")
    if model_id:
        parts.append(f'The best weights: `mlflow.pyfunc.load_model("models:/{model_id}")`.')
    if resumable and list(folder.glob("checkpoints/step-*")):
        more = " with more `steps=`" if summary["status"] == "FINISHED" else ""
        parts.append(f"To continue it: `python scripts/train.py resume=mlflow:{run_id}`{more}.")
    return "\n\n".join(parts)
