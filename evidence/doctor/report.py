"""The files of a diagnosis: the page, the verdict as JSON, the manifest, and the tables as CSV."""

from __future__ import annotations

import csv
import io
import shlex
from pathlib import Path
from typing import Any

from evidence.doctor.plots import figures
from evidence.doctor.step import TrainerStep
from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.page import page
from mantissa.doctor.report import TABLES, facts, tables
from trainer.files import METRICS_FILE, make_folder, write_json, write_text
from trainer.run.provenance import git_facts, versions
from trainer.tracking.plots import read_series

PAGE, VERDICT, MANIFEST = "report.html", "verdict.json", "manifest.json"


def folder_of(diagnosis: Diagnosis) -> Path:
    """Return the folder of the files: below the run's, or where there is no run below ``output_dir``."""
    replay = diagnosis.replay
    step = f"step-{replay.step.number}"
    if replay.folder is not None:
        return replay.folder / "doctor" / step
    assert isinstance(replay.step, TrainerStep)
    config = replay.step.config
    asked_for = replay.missing or replay.precision
    return Path(config.output_dir).expanduser() / "doctor" / f"{config.recipe.name}-{asked_for}-{step}"


def write(diagnosis: Diagnosis, command: list[str]) -> list[Path]:
    """Write the files, and remove those of an earlier examination that this one does not have.

    Args:
        diagnosis: of the step.
        command: that examined it.

    Returns:
        The files, the page first.

    Raises:
        OSError: they cannot be written.
    """
    folder, run = folder_of(diagnosis), diagnosis.replay.folder
    make_folder(folder)
    rows, record = tables(diagnosis), verdict(diagnosis, command)
    drawn = figures(diagnosis, read_series(run / METRICS_FILE) if run is not None else {})
    texts = {PAGE: page(diagnosis, record, drawn)}
    texts |= {f"{name}.csv": _csv(table) for name, table in rows.items()}
    contents = {VERDICT: record} | ({MANIFEST: rows["manifest"]} if "manifest" in rows else {})
    for name in (MANIFEST, *(f"{name}.csv" for name in TABLES)):
        if name not in texts and name not in contents:
            (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        write_text(folder / name, text)
    for name, content in contents.items():
        write_json(folder / name, content)
    return [folder / name for name in (*texts, *contents)]


def verdict(diagnosis: Diagnosis, command: list[str]) -> dict[str, Any]:
    """Return the content of ``verdict.json``."""
    step = diagnosis.replay.step
    assert isinstance(step, TrainerStep)
    return facts(diagnosis) | {
        "recipe": step.config.recipe.name,
        "hardware": step.hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
        "command": shlex.join(command),
    }


def _csv(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return buffer.getvalue()
