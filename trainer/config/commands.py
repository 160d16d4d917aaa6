"""The commands that are printed: all that makes a run what it is, quoted for the shell, from the current folder.

They are made of what was typed to start a run, see ``typed``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mantissa.formats import FP32
from trainer.config.command_line import as_typed
from trainer.config.compose import refusal
from trainer.config.registration import key_of
from trainer.config.schema import Config
from trainer.config.typed import launcher, overrides_of
from trainer.files import command, run_facts
from trainer.hardware import detect
from trainer.run_folder import RunFolder

_NOT_COMPARED = ("seed", "run_name", "parallel", "checkpoint", "profiler", "tags", "note")
"""Keys and groups that scripts/compare.py sets itself, and what is said of one run."""


def new_run_command(folder: Path, changed: Sequence[str] = ()) -> str:
    """Return the command line of a new run that is the one in ``folder`` but for what is ``changed``.

    Where train.py refuses it, options of the choices that are changed are left out, and with the precision those of the
    loss scaling. Empty where it refuses that, too, or where it is not known how the run was started.
    """
    if not (facts := run_facts(folder, "command")):
        return ""
    whole, keys = overrides_of(RunFolder(folder), changed), {key_of(each) for each in changed}
    gone = (*(f"{key}." for key in keys), *["scaler"] * ("precision" in keys))
    without = [each for each in whole if each in changed or not key_of(each).startswith(gone)]
    accepted = next((line for line in (whole, without) if refusal(line) is None), None)
    return command("train.py", accepted, facts["launcher"]) if accepted else ""


def compare_command(folder: Path, config: Config) -> str:
    """Return the command line that compares the run in ``folder`` with fp32, or one in fp32 with 16 bits.

    Empty where it has no steps to be timed, or where it is not known how the run was started.
    """
    typed = overrides_of(RunFolder(folder))
    if not typed or int(config.steps) <= config.log_every:
        return ""
    mode, group = config.precision.mode, lambda each: key_of(each).partition(".")[0]
    own = [each for each in typed if group(each) in ("precision", "scaler") and key_of(each) != "precision"]
    if config.precision.then is not None:  # a share of fewer steps than there are since would be another one
        until = "precision.until"
        own = [f"{until}={config.precision.until}" if key_of(each) == until else each for each in own]
    arms = dict.fromkeys([FP32.name, detect(config.device).half.name if mode == FP32.name else mode])
    alike = [name for name in arms if name != mode or not own]
    text = [f"arm.{mode}={' '.join([f'precision={mode}', *own])}"] if own else []
    common = [each for each in typed if group(each) not in ("precision", "scaler", *_NOT_COMPARED)]
    return command("compare.py", [*common, f"arms={','.join(alike)}", *text, "seeds=5"])


def resume_command(folder: Path) -> str:
    """Return the command line that continues the run in ``folder``."""
    if Path(sys.argv[0]).name == "train.py":  # as the user has called it
        return shlex.join([*launcher(), sys.argv[0], _resume(folder)])
    return command("train.py", [_resume(folder)], launcher())


def doctor_command(folder: Path) -> str:
    """Return the command line that looks for the cause of a failure of the run in ``folder``.

    It replays all ranks in one process.
    """
    return command("doctor.py", [_resume(folder)])


def _resume(folder: Path) -> str:
    return f"resume={as_typed(str(folder))}"
