"""The files of a diagnosis: the page, the verdict as JSON, the manifest, and the tables as CSV."""

from __future__ import annotations

import csv
import io
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evidence.doctor.diagnosis import Diagnosis
from evidence.doctor.measured.range import LOWEST, Exponents
from evidence.doctor.page import page
from trainer.files import METRICS_FILE, make_folder, write_json, write_text
from trainer.run.provenance import git_facts, versions
from trainer.tracking.plots import read_series

PAGE, VERDICT, MANIFEST = "report.html", "verdict.json", "manifest.json"
TABLES = ("manifest", "range", "pairs")
"""Written as CSV, those that were examined."""


def folder_of(diagnosis: Diagnosis) -> Path:
    """Return the folder of the files: below the run's, or where there is no run below ``output_dir``."""
    replay = diagnosis.replay
    step = f"step-{replay.case.step}"
    if replay.folder is not None:
        return replay.folder / "doctor" / step
    config = replay.case.config
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
    facts, tables = verdict(diagnosis, command), _tables(diagnosis)
    texts = {PAGE: page(diagnosis, facts, read_series(run / METRICS_FILE) if run is not None else {})}
    texts |= {f"{name}.csv": _csv(rows) for name, rows in tables.items()}
    contents = {VERDICT: facts} | ({MANIFEST: tables["manifest"]} if "manifest" in tables else {})
    for name in (PAGE, VERDICT, MANIFEST, *(f"{name}.csv" for name in TABLES)):
        if name not in texts and name not in contents:
            (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        write_text(folder / name, text)
    for name, content in contents.items():
        write_json(folder / name, content)
    return [folder / name for name in (*texts, *contents)]


def verdict(diagnosis: Diagnosis, command: list[str]) -> dict[str, Any]:
    """Return the content of ``verdict.json``: ``scales`` are exponents; a number that is not finite is null."""
    replay, budget, islands = diagnosis.replay, diagnosis.budget, diagnosis.islands
    case, found = replay.case, diagnosis.range
    return {
        "verdict": diagnosis.verdict,
        "exit_code": diagnosis.exit_code,
        "run": None if replay.folder is None else str(replay.folder),
        "recipe": case.config.recipe.name,
        "precision": replay.precision,
        "step": case.step,
        "began": replay.began,
        "failed": replay.failed,
        "loss": _number(replay.loss),
        "grad_norm": _number(replay.grad_norm),
        "skipped": replay.skipped,
        "loss_scale": case.scale,
        "ladder": [
            {
                "name": rung.name,
                "status": rung.status,
                "scale": rung.scale,
                "loss": _number(rung.loss),
                "harmed": rung.harmed or [],
                "why": rung.why,
            }
            for rung in diagnosis.ladder
        ],
        "scales": None if found is None else {"highest": found.highest, "lowest": found.lowest},
        "findings": [finding.to_dict() for finding in diagnosis.findings],
        "islands": None if islands is None else asdict(islands) | {"override": islands.override},
        "notes": diagnosis.notes,
        "left_out": budget.left_out,
        "budget_s": budget.seconds,
        "seconds": budget.spent,
        "hardware": case.hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
        "command": shlex.join(command),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _tables(diagnosis: Diagnosis) -> dict[str, list[dict[str, Any]]]:
    found = {}
    if diagnosis.manifest is not None:
        found["manifest"] = [row._asdict() for row in diagnosis.manifest.rows]
    if diagnosis.range is not None:
        found["range"] = [_exponents(layer) for layer in diagnosis.range.layers]
    if diagnosis.pairs is not None:
        found["pairs"] = [asdict(row) | {"ratio": row.ratio} for row in diagnosis.pairs.rows]
    return found


def _exponents(layer: Exponents) -> dict[str, Any]:
    """Return a row: how many elements there are of each exponent."""
    facts = {"module": layer.module, "tensor": layer.tensor, "fp16": layer.half, "amax": layer.amax}
    counts = {f"2^{LOWEST + place}": int(count) for place, count in enumerate(layer.counts.tolist())}
    return facts | {"zeros": layer.zeros} | counts


def _csv(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return buffer.getvalue()
