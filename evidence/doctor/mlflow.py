"""A diagnosis in MLflow: its files and its verdict, on the run that was examined."""

from __future__ import annotations

from pathlib import Path

from mantissa.doctor.diagnosis import Diagnosis
from trainer.errors import UserError, first_line
from trainer.files import TRACKING_FILE
from trainer.tracking.store import connect, cut, usable_uri
from trainer.tracking.sync import send
from trainer.tracking.tracked_run import TrackedRun
from trainer.tracking.ui import shown_at

TAGS = ("verdict", "step", "kind", "module", "op", "direction", "format")
"""Below ``doctor.``; from the kind on they are those of the first finding."""


def publish(diagnosis: Diagnosis, files: list[Path]) -> list[str]:
    """Log the files and the tags on the run in MLflow, after what MLflow lacks of it.

    Args:
        diagnosis: of a step; one without a run is not sent, nor one of a run that is not in MLflow (tracking=local).
        files: of the report.

    Returns:
        Lines to print: the address of MLflow's page, or why it was not sent.
    """
    folder = diagnosis.replay.folder
    if folder is None or not (folder / TRACKING_FILE).exists():
        return []
    try:
        stored = TrackedRun.read(folder).uri
        if stored is None:
            return []
        uri = usable_uri(stored)
        sent = send(folder, uri, named=True)
        if sent.status in ("incomplete", "skipped"):
            raise UserError(sent.message)
        run = TrackedRun.read(folder)
        _log(uri, str(run.run_id), diagnosis, files)
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return [f"the report is not in MLflow ({first_line(error)}); run the same command again to retry"]
    return [shown_at(uri, str(run.experiment_id), str(run.run_id))]


def _log(uri: str, run_id: str, diagnosis: Diagnosis, files: list[Path]) -> None:
    client = connect(uri)
    before = client.get_run(run_id).data.tags
    client.log_artifacts(run_id, str(files[0].parent), f"doctor/{files[0].parent.name}")
    wanted = tags(diagnosis)
    for name in (f"doctor.{tag}" for tag in TAGS):
        if name not in wanted and name in before:  # of an earlier examination
            client.delete_tag(run_id, name)
        elif name in wanted and wanted[name] != before.get(name):
            client.set_tag(run_id, name, wanted[name])


def tags(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the tags by name: the verdict, and what the first finding says."""
    found = {"verdict": diagnosis.verdict, "step": str(diagnosis.replay.step.number)}
    if diagnosis.findings:
        first = diagnosis.findings[0]
        found |= {"kind": first.kind, "module": first.place, "op": first.op}
        found |= {"direction": first.direction, "format": first.format}
    return {f"doctor.{name}": cut(value, 500) for name, value in found.items() if value}
