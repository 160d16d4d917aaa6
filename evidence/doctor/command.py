"""The command line of scripts/doctor.py."""

from __future__ import annotations

import sys

import torch

from evidence.doctor.mlflow import publish
from evidence.doctor.replay import of_overrides, of_run
from evidence.doctor.report import write
from evidence.options import DoctorOptions
from evidence.runs import recorded
from mantissa.doctor.diagnosis import CHECKS, diagnose
from mantissa.doctor.report import lines, opening
from trainer.config.options import parse
from trainer.errors import UserError

REFERENCES = {"auto": None, "fp32": torch.float32, "fp64": torch.float64}


def main(arguments: list[str]) -> int:
    """Examine a step of a run, or of a run to be; print what is found and write the report."""
    options, overrides = parse(arguments, DoctorOptions, "overrides")
    checks = CHECKS if "all" in options.check else tuple(options.check)
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
