"""A diagnosis as text for a terminal, as JSON and as tables."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mantissa.display import finite
from mantissa.doctor.diagnosis import FOUND, HEALTHY, INCOMPLETE, Diagnosis, TakenStep
from mantissa.doctor.fp16_range import LOWEST, Exponents
from mantissa.doctor.sweep import DIFFERENT
from mantissa.finding import FORWARD, MEANINGS, OVERFLOW, Finding
from mantissa.verdict.page import Plot, Report, Section, measured_on

VERDICT = "verdict.json"


def opening(replay: TakenStep) -> str:
    """Return what was replayed, and how it ended."""
    number = replay.step.number
    how = f"loss {replay.loss:.6g}, gradient norm {replay.grad_norm:.4g}" + (", skipped" if replay.skipped else "")
    if replay.failed:
        outcome = "replayed and finite" if replay.finite else "reproduced"
        return f"step {number} {outcome} ({how}) from {replay.began}"
    place = f"one more step ({number}) after the last, taken" if replay.finished else f"step {number} taken"
    return f"{place} from {replay.began} ({how})"


def lines(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as text."""
    replay, found = diagnosis.taken, diagnosis.range
    losses = [trial.loss for trial in diagnosis.sweep if math.isfinite(trial.loss)]
    differ = bool(losses) and max(losses) - min(losses) > DIFFERENT * max(map(abs, losses))
    text = [" · ".join(trial.text(differ) for trial in diagnosis.sweep)] if diagnosis.sweep else []
    for finding in diagnosis.findings:
        text += finding.lines()
    if found is not None and found.highest is not None:
        helps = not any(each.direction == FORWARD and each.kind == OVERFLOW for each in diagnosis.findings)
        text.append(found.text() + ("" if helps else "; no scale cures a forward overflow"))
    text += [f"note: {note}" for note in diagnosis.notes]
    text += [f"left out: {item}" for item in diagnosis.budget.left_out]
    if diagnosis.verdict in (HEALTHY, INCOMPLETE):
        number = replay.step.number
        text += [f"not asked for: {', '.join(diagnosis.not_asked)}"] if diagnosis.not_asked else []
        text.append(f"{diagnosis.verdict} at {f'the last step, {number - 1}' if replay.finished else f'step {number}'}")
        text[-1] += ": no fault in what was examined" if diagnosis.verdict == INCOMPLETE else ""
    elif diagnosis.verdict != FOUND:
        text.append(diagnosis.verdict)
    return text


def _facts(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON holds it: ``scales`` are exponents; a number that is not finite is null."""
    replay, budget, islands, found = diagnosis.taken, diagnosis.budget, diagnosis.islands, diagnosis.range
    return {
        "verdict": diagnosis.verdict,
        "exit_code": diagnosis.exit_code,
        "run": None if replay.folder is None else str(replay.folder),
        "precision": replay.precision,
        "step": replay.step.number,
        "began": replay.began,
        "failed": replay.failed,
        **finite({"loss": replay.loss, "grad_norm": replay.grad_norm}),
        "skipped": replay.skipped,
        "loss_scale": diagnosis.step.scale,
        "formats": [
            {name: getattr(trial, name) for name in ("name", "status", "scale", "why")}
            | finite({"loss": trial.loss})
            | {"nonfinite": trial.nonfinite}
            for trial in diagnosis.sweep
        ],
        "scales": None if found is None else {"highest": found.highest, "lowest": found.lowest},
        "findings": [_row(finding) for finding in diagnosis.findings],
        "islands": None
        if islands is None
        else {name: getattr(islands, name) for name in ("modules", "minimal", "own", "cost")}
        | {"override": replay.step.remedies.modules(islands.step.fp32_modules)},
        "notes": diagnosis.notes,
        "left_out": budget.left_out,
        "crashes": budget.crashes,
        "time_budget_s": budget.seconds,
        "seconds": budget.spent,
    }


def _tables(diagnosis: Diagnosis) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of what was examined, by check."""
    examined = diagnosis.examined
    tables = {}
    if "manifest" in examined:
        tables["manifest"] = [row._asdict() for row in examined["manifest"].rows]
    if "range" in examined:
        tables["range"] = [_exponents(layer) for layer in examined["range"].rows]
    if "modules" in examined:
        tables["modules"] = [asdict(row) | {"ratio": row.ratio} for row in examined["modules"].rows]
    return tables


def _row(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON holds it."""
    return {of.name: getattr(finding, of.name) for of in fields(finding) if of.name != "cures"}


def write_report(
    diagnosis: Diagnosis, folder: Path, subject: str, record: dict[str, Any], plots: Sequence[Plot] = ()
) -> Path:
    """Write the page and its text, ``verdict.json`` and the tables as CSV into a folder; return the page's path.

    Args:
        diagnosis: of the step.
        folder: which is made.
        subject: what was trained.
        record: ``command``, and what ``mantissa.verdict.page.measured_on`` takes.
        plots: for the page.
    """
    taken, tables = diagnosis.taken, _tables(diagnosis)
    found = [
        f"{finding.kind.capitalize()} in {finding.place}, {finding.direction}"
        + f"{f', at {finding.line}' if finding.line else ''}."
        + (f" Cure: {finding.cure[0]}" if finding.cure else "")
        for finding in diagnosis.findings
    ]
    means = dict.fromkeys(MEANINGS[finding.kind] for finding in diagnosis.findings)
    sections = [
        Section("Diagnosis", text="\n".join([opening(taken), *lines(diagnosis)])),
        Section("Plots", plots=plots),
    ]
    sections += [Section(f"The crash of check {part}", text=trace) for part, trace in diagnosis.budget.crashes.items()]
    title = f"{diagnosis.verdict}: {subject} {taken.precision}, step {taken.step.number}"
    origin = measured_on(record["hardware"], record["versions"], record["git"])
    answer = [*found, *means] or [f"No fault: {opening(taken)}."]
    page = Report("Doctor", title, answer, record["command"], origin, sections).write(folder)
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    (folder / VERDICT).write_text(json.dumps(_facts(diagnosis) | record, indent=2), encoding="utf-8")
    return page


def _exponents(layer: Exponents) -> dict[str, Any]:
    """Return a row: how many elements there are of each exponent."""
    counts = {f"2^{LOWEST + place}": int(count) for place, count in enumerate(layer.counts.tolist())}
    place = {"module": layer.module, "tensor": layer.tensor, "fp16": layer.half, "amax": layer.amax}
    return place | {"zeros": layer.zeros} | counts
