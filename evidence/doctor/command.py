"""The command line of scripts/doctor.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from evidence.doctor.diagnosis import CHECKS, FOUND, HEALTHY, Diagnosis, diagnose
from evidence.doctor.mlflow import publish
from evidence.doctor.report import VERDICT, folder_of, write
from evidence.doctor.step.finding import FORWARD, OVERFLOW
from evidence.doctor.step.replay import Replay, of_overrides, of_run
from trainer.config.options import parse
from trainer.config.schema import Config
from trainer.errors import UserError, nearest

REFERENCES = {"auto": None, "fp32": torch.float32, "fp64": torch.float64}


@dataclass
class DoctorOptions:
    """Of the command line; see scripts/doctor.py."""

    resume: str = ""
    step: int = 0
    check: list[str] = field(default_factory=list)
    reference: str = "auto"
    budget_s: int = 60
    accuracy: list[str] = field(default_factory=list)
    seeds: int = 1


def main(arguments: list[str]) -> int:
    """Examine a step of a run, or of a run to be; print what is found and write the report."""
    options, overrides = parse(arguments, DoctorOptions, "overrides")
    if options.accuracy:
        return _measure(options, overrides)
    checks = tuple(options.check or ["all"])
    if unknown := [name for name in checks if name not in (*CHECKS, "all")]:
        raise UserError(f"check={unknown[0]} is not a check{nearest(unknown[0], CHECKS)} (all, {', '.join(CHECKS)})")
    checks = CHECKS if "all" in checks else checks
    if options.reference not in REFERENCES:
        hint = nearest(options.reference, REFERENCES)
        raise UserError(f"reference={options.reference} is not a reference{hint} ({', '.join(REFERENCES)})")
    if options.reference != "auto" and "pairs" not in checks:
        raise UserError(f"reference={options.reference} is for check=pairs, which is not asked for; leave it out")
    if checks == ("islands",):
        raise UserError("check=islands cures what another check finds; set check=ladder,islands, or check=all")
    if options.seeds != 1:
        raise UserError(f"seeds={options.seeds} is for accuracy=; to examine another seed, set seed={options.seeds}")
    names = list(DoctorOptions.__dataclass_fields__)
    for override in overrides:
        key = override.partition("=")[0]
        hint = "" if key.partition(".")[0] in Config.__dataclass_fields__ else nearest(key, names)
        if options.resume and hint:
            raise UserError(f"{key} is not an option{hint}")
    if options.resume:
        replay = of_run(options.resume, overrides, options.step)
    else:
        replay = of_overrides(overrides, options.step)
    print(opening(replay))
    diagnosis = diagnose(replay, checks, options.budget_s, REFERENCES[options.reference], _progress)
    if diagnosis.budget.spent:
        print(file=sys.stderr)  # after the names of the parts
    print("\n".join(lines(diagnosis)))
    if (folder_of(diagnosis) / VERDICT).exists():
        print("the earlier report of this step is replaced")
    try:
        files = write(diagnosis, ["python", "scripts/doctor.py", *arguments])
    except OSError as error:  # what was found is printed already, and the exit code stays that of the verdict
        print(f"the report could not be written ({error})", file=sys.stderr)
        return diagnosis.exit_code
    for line in publish(diagnosis, files):
        print(line)
    print(f"report {files[0]}")
    return diagnosis.exit_code


def _progress(part: str) -> None:
    print(part, end=" … ", file=sys.stderr, flush=True)


def _measure(options: DoctorOptions, overrides: list[str]) -> int:
    """Measure the doctor itself."""
    from evidence.doctor.accuracy import PARTS, measure

    parts = list(PARTS) if options.accuracy == ["all"] else options.accuracy
    if unknown := [name for name in parts if name not in PARTS]:
        raise UserError(f"accuracy={unknown[0]} is not measured{nearest(unknown[0], PARTS)} (all, {', '.join(PARTS)})")
    if overrides or options.resume:
        given = overrides[0] if overrides else f"resume={options.resume}"
        raise UserError(
            f"{given} has no effect with accuracy=: the planted faults bring their own models; leave it out"
        )
    return measure(parts, options.seeds)


def opening(replay: Replay) -> str:
    """Return what was taken again, and how it ended."""
    step = replay.case.step
    how = f"loss {replay.loss:.6g}, gradient norm {replay.grad_norm:.4g}" + (", skipped" if replay.skipped else "")
    if replay.failed:
        outcome = "taken again and finite" if replay.finite else "reproduced"
        return f"step {step} {outcome} ({how}) from {replay.began}"
    place = f"one more step ({step}) after the last, taken" if replay.finished else f"step {step} taken"
    return f"{place} from {replay.began} ({how})"


def lines(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as text."""
    text = [" · ".join(rung.text() for rung in diagnosis.ladder)] if diagnosis.ladder else []
    for finding in diagnosis.findings:
        text += finding.lines()
    if diagnosis.range is not None and diagnosis.range.highest is not None:
        cures = not any(each.direction == FORWARD and each.kind == OVERFLOW for each in diagnosis.findings)
        text.append(diagnosis.range.text() + ("" if cures else "; no scale cures a forward overflow"))
    text += [f"note: {note}" for note in diagnosis.notes]
    text += [f"left out: {item}" for item in diagnosis.budget.left_out]
    if diagnosis.verdict == HEALTHY:
        step = diagnosis.replay.case.step
        place = f"the last step, {step - 1}" if diagnosis.replay.finished else f"step {step}"
        missing = diagnosis.replay.missing
        text.append(f"HEALTHY at {place}" + (f"; precision={missing} was not examined" if missing else ""))
    elif diagnosis.verdict != FOUND:
        text.append(diagnosis.verdict)
    return text
