"""The files of a diagnosis: the page, the verdict as JSON, and the tables as CSV."""

from __future__ import annotations

import csv
import io
import shlex
from pathlib import Path
from typing import Any

from evidence.doctor.plots import figures
from evidence.doctor.step import TrainerStep
from evidence.page import Section, measured_on, page
from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.report import facts, lines, opening, tables
from mantissa.finding import MEANINGS
from trainer.files import make_folder, remove_folder, write_json, write_text
from trainer.run.provenance import git_facts, versions

PAGE, VERDICT = "report.html", "verdict.json"


def folder_of(diagnosis: Diagnosis) -> Path:
    """Return the folder of the files: below the run's, or where there is no run below ``output_dir``."""
    replay = diagnosis.replay
    step = f"step-{replay.step.number}"
    if replay.folder is not None:
        return replay.folder / "doctor" / step
    assert isinstance(replay.step, TrainerStep)
    config = replay.step.config
    return Path(config.output_dir).expanduser() / "doctor" / f"{config.recipe.name}-{replay.precision}-{step}"


def write(diagnosis: Diagnosis, command: list[str]) -> list[Path]:
    """Write the files in the place of those of an earlier examination.

    Args:
        diagnosis: of the step.
        command: that examined it.

    Returns:
        The files, the page first.

    Raises:
        OSError: they cannot be written.
    """
    folder, step = folder_of(diagnosis), diagnosis.replay.step
    assert isinstance(step, TrainerStep)
    record = facts(diagnosis) | {
        "recipe": step.config.recipe.name,
        "hardware": step.hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
        "command": shlex.join(command),
    }
    texts = {PAGE: _page(diagnosis, record)}
    texts |= {f"{name}.csv": _csv(rows) for name, rows in tables(diagnosis).items()}
    remove_folder(folder)
    make_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    write_json(folder / VERDICT, record)
    return [folder / name for name in (*texts, VERDICT)]


def _page(diagnosis: Diagnosis, record: dict[str, Any]) -> str:
    replay, checked = diagnosis.replay, tables(diagnosis)
    found = [f"{each.kind.capitalize()} in {each.place}, {each.direction}." for each in diagnosis.findings]
    means = dict.fromkeys(MEANINGS[finding.kind] for finding in diagnosis.findings)
    sections = [Section("Diagnosis", text="\n".join([opening(replay), *lines(diagnosis)]))]
    if plots := figures(diagnosis):
        sections.append(Section("Plots", plots=plots))
    if rows := checked.get("manifest"):
        cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        sections.append(Section(f"What ran in which format ({len(rows):,} rows)", table=cells, folded=True))
    return page(
        "Doctor",
        f"{diagnosis.verdict}: {record['recipe']} {replay.precision}, step {replay.step.number}",
        [*found, *means] or [f"No fault: {opening(replay)}."],
        record["command"],
        measured_on(record["hardware"], record["versions"], record["git"]),
        sections,
    )


def _csv(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return buffer.getvalue()
