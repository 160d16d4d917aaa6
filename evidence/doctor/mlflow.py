"""A diagnosis in MLflow: its files and its verdict, on the run that was examined."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence import mlflow
from mantissa.doctor.diagnosis import Diagnosis
from trainer.errors import UserError
from trainer.files import TRACKING_FILE
from trainer.tracking.store import cut
from trainer.tracking.sync import send
from trainer.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient


def publish(diagnosis: Diagnosis, page: Path) -> list[str]:
    """Log the files and the tags on the run in MLflow, after what MLflow lacks of it.

    Args:
        diagnosis: of a step; one without a run is not sent, nor one of a run that is not in MLflow (tracking=local).
        page: of the report, in the folder of its files.

    Returns:
        Lines to print: the address of MLflow's page, or why it was not sent.
    """
    folder = diagnosis.taken.folder
    if folder is None or not (folder / TRACKING_FILE).exists() or (uri := TrackedRun.read(folder).uri) is None:
        return []

    def log(client: MlflowClient) -> Any:
        sent = send(folder, named=True)
        if sent.status in ("incomplete", "skipped"):
            raise UserError(sent.message)
        run = client.get_run(str(TrackedRun.read(folder).run_id))
        client.log_artifacts(run.info.run_id, str(page.parent), f"doctor/{page.parent.name}")
        for name, value in tags(diagnosis).items():
            if value:
                client.set_tag(run.info.run_id, name, cut(value, 500))
            elif name in run.data.tags:  # of an earlier examination
                client.delete_tag(run.info.run_id, name)
        return run

    return [mlflow.publish("the report", uri, log)]


def tags(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the tags by name: the verdict, and what the first finding says; empty where there is none."""
    first = diagnosis.findings[0] if diagnosis.findings else None
    found = {"verdict": diagnosis.verdict, "step": str(diagnosis.step.number), "module": first.place if first else ""}
    found |= {name: getattr(first, name, "") for name in ("kind", "op", "direction", "format")}
    return {f"doctor.{name}": value for name, value in found.items()}
