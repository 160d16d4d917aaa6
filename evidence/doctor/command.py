"""The command line of scripts/doctor.py: examine a step, print what is found, and write its report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evidence.doctor.plots import figures
from evidence.doctor.replay import of_overrides, of_run
from evidence.doctor.step import Typed
from evidence.runs import merge_overrides, redacted_arguments
from mantissa.commands import say_part, seconds_of
from mantissa.doctor.checks import CHECKS, ISLANDS
from mantissa.doctor.diagnosis import Diagnosis, diagnose
from mantissa.doctor.report import lines, opening, write_report
from trainer.config.command_line import as_typed
from trainer.config.commands import command, new_run_command
from trainer.config.compose import refusal
from trainer.config.options import Overriding, parse
from trainer.config.schema import Config
from trainer.errors import UserError, nearest
from trainer.files import BEST, SUMMARY_FILE, read_object, remove_folder
from trainer.hardware import detect
from trainer.run.provenance import git_facts, versions


@dataclass
class DoctorOptions(Overriding):
    """Options of scripts/doctor.py."""

    positional = "resume"

    resume: str = ""
    step: int = 0
    check: list[str] = field(default_factory=lambda: ["all"])
    time_budget: str = "60s"

    def __post_init__(self) -> None:
        if unknown := [name for name in self.check if name not in (*CHECKS, "all")]:
            near = nearest(unknown[0], CHECKS)
            raise UserError(f"check={unknown[0]} is not a check{near} (all, {', '.join(CHECKS)})")
        if self.check == [ISLANDS]:
            raise UserError("check=islands cures what another check finds", "check=formats,islands", "check=all")


def main(arguments: list[str]) -> int:
    """Examine a step of a run, or of a run to be; return the exit code of its verdict."""
    options, overrides = parse(arguments, DoctorOptions, "overrides")
    time_budget_s = seconds_of("time_budget=", options.time_budget)
    checks = CHECKS if "all" in options.check else tuple(options.check)
    print("building the model and taking the step …", file=sys.stderr)
    if options.resume:
        taken, config = of_run(options.resume, overrides, options.step)
    else:
        taken, config = of_overrides(overrides, options.step)
    print(opening(taken))
    diagnosis = diagnose(taken, checks, time_budget_s, say=say_part)
    if diagnosis.budget.spent:
        print(file=sys.stderr)  # after the names of the parts
    print("\n".join(lines(diagnosis)))
    if following := cured_command(diagnosis, overrides):
        print(f"train with the cure:\n  {following}")
    try:
        page = write(diagnosis, config, command("doctor.py", redacted_arguments(arguments)))
    except OSError as error:  # what was found is printed already, and the exit code stays that of the verdict
        print(f"the report could not be written ({error})", file=sys.stderr)
        return diagnosis.exit_code
    print(f"report {page}")
    return diagnosis.exit_code


def cured_command(diagnosis: Diagnosis, overrides: Sequence[str]) -> str:
    """Return the command line of a new run with the first cure that is an override; empty: none is.

    Its weights are kept where the run had learned, far from its beginning, before the fault.
    """
    taken, typed = diagnosis.taken, [cure.text for cure in diagnosis.held if isinstance(cure.text, Typed)]
    changed = [word for text in typed[: 1 if diagnosis.beside is None else 2] for word in shlex.split(text)]
    if not changed:
        return ""
    if taken.folder is None:
        merged = merge_overrides(overrides, changed)
        return command("train.py", merged) if refusal(merged) is None else ""
    kept = taken.start is not None and taken.start.number > 1 and _has_learned(taken.folder)
    weights = [f"init_from={as_typed(str(taken.folder))}"] if kept else []
    return new_run_command(taken.folder, [*weights, *changed])


def _has_learned(folder: Path) -> bool:
    """Return whether the best weights of a run are kept, and are not those that it began with."""
    best = read_object(folder / SUMMARY_FILE).get("best") or {}
    return (folder / BEST).is_dir() and best.get("step", 0) > 0


def write(diagnosis: Diagnosis, config: Config, typed: str) -> Path:
    """Write the report in the place of that of an earlier examination with the same checks, and return its page.

    It is below the run's folder, or where there is no run below ``output_dir``.

    Raises:
        OSError: it cannot be written.
    """
    folder, step, recipe = diagnosis.taken.folder, f"step-{diagnosis.step.number}", config.recipe.name
    if diagnosis.not_asked:
        step += f"-{'-'.join(name for name in CHECKS if name not in diagnosis.not_asked)}"
    if folder is None:
        folder, step = Path(config.output_dir).expanduser(), f"{recipe}-{diagnosis.taken.precision}-{step}"
    hardware = detect(config.device).facts()
    record = {"command": typed, "recipe": recipe, "hardware": hardware, "versions": versions(), "git": git_facts()}
    remove_folder(folder / "doctor" / step)
    return write_report(diagnosis, folder / "doctor" / step, recipe, record, figures(diagnosis))
