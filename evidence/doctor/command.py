"""The command line of scripts/doctor.py: examine a step, print what is found, and write its report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch

from evidence.doctor.mlflow import publish
from evidence.doctor.plots import figures
from evidence.doctor.replay import of_overrides, of_run
from evidence.doctor.step import Setting
from evidence.options import DoctorOptions
from evidence.runs import recorded
from mantissa.doctor.diagnosis import CHECKS, Diagnosis, diagnose
from mantissa.doctor.report import files_of, lines, opening
from mantissa.errors import UsageError
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.files import make_folder, remove_folder, write_text
from trainer.run.provenance import git_facts, versions

REFERENCES = {"auto": None, "fp32": torch.float32, "fp64": torch.float64}


def main(arguments: list[str]) -> int:
    """Examine a step of a run, or of a run to be; return the exit code of its verdict."""
    options, overrides = parse(arguments, DoctorOptions, "overrides")
    checks = CHECKS if "all" in options.check else tuple(options.check)
    try:
        if options.resume:
            taken, setting = of_run(options.resume, overrides, options.step)
        else:
            taken, setting = of_overrides(overrides, options.step)
    except UsageError as error:  # of a step that cannot be replayed
        raise UserError(str(error)) from error
    reference = REFERENCES[options.reference]
    if reference == taken.step.format.number.dtype:
        name = taken.precision
        raise UserError(f"reference=fp32 is no reference for precision={name}; use reference=fp64, or leave it out")
    print(opening(taken))
    diagnosis = diagnose(taken, checks, options.budget_s, reference, _progress)
    if diagnosis.budget.spent:
        print(file=sys.stderr)  # after the names of the parts
    print("\n".join(lines(diagnosis)))
    try:
        files = write(diagnosis, setting, ["python", "scripts/doctor.py", *recorded(arguments)])
    except OSError as error:  # what was found is printed already, and the exit code stays that of the verdict
        print(f"the report could not be written ({error})", file=sys.stderr)
        return diagnosis.exit_code
    for line in publish(diagnosis, files):
        print(line)
    print(f"report {files[0]}")
    return diagnosis.exit_code


def _progress(part: str) -> None:
    print(part, end=" … ", file=sys.stderr, flush=True)


def write(diagnosis: Diagnosis, setting: Setting, command: list[str]) -> list[Path]:
    """Write the page, the verdict as JSON and the tables as CSV, in the place of those of an earlier examination.

    They are below the run's folder, or where there is no run below ``output_dir``.

    Args:
        diagnosis: of the step.
        setting: of the run.
        command: that examined it.

    Returns:
        The files, the page first.

    Raises:
        OSError: they cannot be written.
    """
    taken, config = diagnosis.replay, setting.config
    folder, step = taken.folder, f"step-{taken.step.number}"
    if folder is not None:
        folder = folder / "doctor" / step
    else:
        name = f"{config.recipe.name}-{taken.precision}-{step}"
        folder = Path(config.output_dir).expanduser() / "doctor" / name
    record = {
        "recipe": config.recipe.name,
        "hardware": setting.hardware.facts(),
        "versions": versions(),
        "git": git_facts(),
        "command": shlex.join(command),
    }
    texts = files_of(diagnosis, config.recipe.name, record, figures(diagnosis))
    remove_folder(folder)
    make_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]
