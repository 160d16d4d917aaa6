"""The command line of scripts/doctor.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from evidence.doctor.diagnosis import CHECKS, FOUND, HEALTHY, Diagnosis, diagnose
from evidence.doctor.mlflow import publish
from evidence.doctor.report import write
from evidence.doctor.step.replay import Replay, of_overrides, of_run
from trainer.config.options import parse
from trainer.errors import UserError, nearest


@dataclass
class DoctorOptions:
    """Of the command line; see scripts/doctor.py."""

    resume: str = ""
    step: int = 0
    check: list[str] = field(default_factory=list)
    reference: str = ""
    budget_s: int = 60


def main(arguments: list[str]) -> int:
    """Examine a step of a run, or of a run to be; print what is found and write the report."""
    options, overrides = parse(arguments, DoctorOptions, "overrides")
    checks = tuple(options.check or ["all"])
    if unknown := [name for name in checks if name not in (*CHECKS, "all")]:
        raise UserError(f"check={unknown[0]} is not a check{nearest(unknown[0], CHECKS)} (all, {', '.join(CHECKS)})")
    checks = CHECKS if "all" in checks else checks
    if options.resume:
        replay = of_run(options.resume, overrides, options.step)
    else:
        replay = of_overrides(overrides, options.step)
    print(opening(replay))
    diagnosis = diagnose(replay, checks, options.budget_s)
    print("\n".join(lines(diagnosis)))
    try:
        files = write(diagnosis, ["python", "scripts/doctor.py", *arguments])
    except OSError as error:  # what was found is printed already, and the exit code stays that of the verdict
        print(f"the report could not be written ({error})", file=sys.stderr)
        return diagnosis.exit_code
    for line in publish(diagnosis, files):
        print(line)
    print(f"report {files[0]}")
    return diagnosis.exit_code


def opening(replay: Replay) -> str:
    """Return what was taken again, and how it ended."""
    step = replay.case.step
    how = f"loss {replay.loss:.6g}, gradient norm {replay.grad_norm:.4g}" + (", skipped" if replay.skipped else "")
    if replay.failed:
        outcome = "taken again and finite" if replay.finite else "reproduced"
        return f"step {step} {outcome} ({how}) from {replay.began}"
    place = f"the step after the last one, {step - 1}" if replay.finished else f"step {step}"
    return f"{place} taken from {replay.began} ({how})"


def lines(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as text."""
    text = [" · ".join(rung.text() for rung in diagnosis.ladder)] if diagnosis.ladder else []
    for finding in diagnosis.findings:
        text += finding.lines()
    text += [f"note: {note}" for note in diagnosis.notes]
    text += [f"left out: {item}" for item in diagnosis.budget.left_out]
    if diagnosis.verdict == HEALTHY:
        step = diagnosis.replay.case.step
        text.append(f"HEALTHY at the last step, {step - 1}" if diagnosis.replay.finished else f"HEALTHY at step {step}")
    elif diagnosis.verdict != FOUND:
        text.append(diagnosis.verdict)
    return text
