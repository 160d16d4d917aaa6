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
from mantissa.doctor.checks import MANIFEST, MODULES, RANGE
from mantissa.doctor.diagnosis import FOUND, HEALTHY, INCOMPLETE, Diagnosis, TakenStep
from mantissa.doctor.finding import MEANINGS, OVERFLOW, Finding
from mantissa.doctor.fp16_range import LOWEST, Exponents
from mantissa.doctor.sweep import DIFFERENT
from mantissa.step.trace import FORWARD
from mantissa.verdict.page import Plot, Report, Section, measured_on

VERDICT = "verdict.json"


def opening(taken: TakenStep) -> str:
    """Return which step was taken, and how it ended."""
    number = taken.step.number
    how = f"loss {taken.loss:.6g}, gradient norm {taken.grad_norm:.4g}" + (", skipped" if taken.skipped else "")
    if taken.failed:
        outcome = "replayed and finite" if taken.finite else "reproduced"
        return f"step {number} {outcome} ({how}) from {taken.began}"
    place = f"one more step ({number}) after the last, taken" if taken.finished else f"step {number} taken"
    return f"{place} from {taken.began} ({how})"


def lines(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as text."""
    taken, scales = diagnosis.taken, diagnosis.range

    # The formats, with their losses where those differ.
    losses = [trial.loss for trial in diagnosis.formats if math.isfinite(trial.loss)]
    differ = bool(losses) and max(losses) - min(losses) > DIFFERENT * max(map(abs, losses))
    text = [" · ".join(trial.text(differ) for trial in diagnosis.formats)] if diagnosis.formats else []

    # The faults, with their cures; the loss scales that fit.
    for finding in diagnosis.findings:
        text += finding.lines()
    if scales is not None and scales.highest is not None:
        overflows = [finding for finding in diagnosis.findings if finding.kind == OVERFLOW]
        helps = not any(finding.direction == FORWARD for finding in overflows)
        text.append(scales.text() + ("" if helps else "; no scale cures a forward overflow"))

    # How the run went by its record, what is unusual, and what was not examined.
    text += [f"note: {taken.history}"] if taken.history and diagnosis.faults else []
    text += [f"note: {note}" for note in diagnosis.notes]
    text += [f"left out: {item}" for item in diagnosis.budget.left_out]
    if diagnosis.not_asked and diagnosis.not_made:  # a choice of the user's
        text.append(f"checks not made after such a finding: {', '.join(diagnosis.not_made)}")

    # The verdict, where it is not clear from the faults.
    if diagnosis.verdict in (HEALTHY, INCOMPLETE):
        number = taken.step.number
        text += [f"not asked for: {', '.join(diagnosis.not_asked)}"] if diagnosis.not_asked else []
        text.append(f"{diagnosis.verdict} at {f'the last step, {number - 1}' if taken.finished else f'step {number}'}")
        text[-1] += ": no fault in what was examined" if diagnosis.verdict == INCOMPLETE else ""
    elif diagnosis.verdict != FOUND:
        text.append(diagnosis.verdict)
    return text


def _facts(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON holds it: ``scales`` are exponents; a number that is not finite is null."""
    taken, budget, islands, scales = diagnosis.taken, diagnosis.budget, diagnosis.islands, diagnosis.range
    return {
        "verdict": diagnosis.verdict,
        "exit_code": diagnosis.exit_code,
        "run": None if taken.folder is None else str(taken.folder),
        "precision": taken.precision,
        "step": taken.step.number,
        "began": taken.began,
        "failed": taken.failed,
        **finite({"loss": taken.loss, "grad_norm": taken.grad_norm}),
        "skipped": taken.skipped,
        "loss_scale": diagnosis.step.scale,
        "formats": [
            {name: getattr(trial, name) for name in ("name", "status", "scale", "why")}
            | finite({"loss": trial.loss})
            | {"nonfinite": trial.nonfinite}
            for trial in diagnosis.formats
        ],
        "scales": None if scales is None else {"highest": scales.highest, "lowest": scales.lowest},
        "findings": [_row(finding) for finding in diagnosis.findings],
        "islands": None
        if islands is None
        else {name: getattr(islands, name) for name in ("modules", "minimal", "cost")}
        | {"override": taken.step.remedies.modules(islands.step.fp32_modules)},
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
    if MANIFEST in examined:
        tables[MANIFEST] = [row._asdict() for row in examined[MANIFEST].rows]
    if RANGE in examined:
        tables[RANGE] = [_exponents(layer) for layer in examined[RANGE].rows]
    if MODULES in examined:
        tables[MODULES] = [asdict(row) | {"ratio": row.ratio} for row in examined[MODULES].rows]
    return tables


def _row(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON holds it."""
    names = [of.name for of in fields(finding) if of.name != "candidates"]
    return {name: getattr(finding, name) for name in names}


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
    faults = [
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
    answer = [*faults, *means] or [f"No fault: {opening(taken)}."]
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
