"""The command line of scripts/doctor.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from evidence.doctor.mlflow import publish
from evidence.doctor.replay import of_overrides, of_run
from evidence.doctor.report import write
from evidence.runs import recorded
from mantissa.doctor.diagnosis import CHECKS, diagnose
from mantissa.doctor.report import lines, opening
from trainer.config.options import parse
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


def main(arguments: list[str]) -> int:
    """Examine a step of a run, or of a run to be; print what is found and write the report."""
    options, overrides = parse(arguments, DoctorOptions, "overrides")
    checks = tuple(options.check or ["all"])
    if unknown := [name for name in checks if name not in (*CHECKS, "all")]:
        raise UserError(f"check={unknown[0]} is not a check{nearest(unknown[0], CHECKS)} (all, {', '.join(CHECKS)})")
    checks = CHECKS if "all" in checks else checks
    if options.reference not in REFERENCES:
        hint = nearest(options.reference, REFERENCES)
        raise UserError(f"reference={options.reference} is not a reference{hint} ({', '.join(REFERENCES)})")
    if checks == ("islands",):
        raise UserError("check=islands cures what another check finds; set check=ladder,islands, or check=all")
    if options.resume:
        replay = of_run(options.resume, overrides, options.step)
    else:
        replay = of_overrides(overrides, options.step)
    reference = REFERENCES[options.reference]
    if reference == replay.step.format.number.dtype:
        name = replay.precision
        raise UserError(f"reference=fp32 is no reference for precision={name}; use reference=fp64, or leave it out")
    print(opening(replay))
    diagnosis = diagnose(replay, checks, options.budget_s, reference, _progress)
    if diagnosis.budget.spent:
        print(file=sys.stderr)  # after the names of the parts
    print("\n".join(lines(diagnosis)))
    try:
        files = write(diagnosis, ["python", "scripts/doctor.py", *recorded(arguments)])
    except OSError as error:  # what was found is printed already, and the exit code stays that of the verdict
        print(f"the report could not be written ({error})", file=sys.stderr)
        return diagnosis.exit_code
    for line in publish(diagnosis, files):
        print(line)
    print(f"report {files[0]}")
    return diagnosis.exit_code


def _progress(part: str) -> None:
    print(part, end=" … ", file=sys.stderr, flush=True)
