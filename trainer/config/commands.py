"""The commands that are printed: all that makes a run what it is, quoted for the shell, from the current folder.

What was typed to start a run is recorded in its run.json, and of a resumed one what was typed since.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mantissa.formats import BF16, FP32
from trainer.config.command_line import as_typed, value_of
from trainer.config.compose import accepts
from trainer.config.registration import key_of
from trainer.config.schema import Config
from trainer.errors import redacted
from trainer.files import PROJECT, add_run_facts, run_facts
from trainer.parallel.world import launched_processes
from trainer.recipe import UserRecipe
from trainer.run_folder import PATHS, RunFolder

_FOLDERS = ("recipe_path", "output_dir")
"""Options that are folders on this machine, also where there is none yet."""
_OF_ONE_COMMAND = ("resume", "why")
"""What another run is not given."""
_INSTEAD = {"steps": "epochs", "epochs": "steps"}
"""Keys of which a run has one: what is typed later takes the place of the other."""
_NOT_COMPARED = ("seed", "run_name", "parallel", "checkpoint", "profiler", "tags", "note")
"""Keys and groups that scripts/compare.py sets itself, and what is said of one run."""


def command(script: str, overrides: Sequence[str] = (), launcher: Sequence[str] = ("python",)) -> str:
    """Return the line of a shell that calls one of ``scripts/``."""
    folder = PROJECT / "scripts"
    return shlex.join([*launcher, min(os.path.relpath(folder / script), str(folder / script), key=len), *overrides])


def record_command(folder: RunFolder, typed: Sequence[str]) -> None:
    """Record what is typed to start or to resume a run, but for secrets: run.json goes to MLflow."""
    if f"recipe={UserRecipe.name}" in typed:  # no command has it
        return
    public = [each for each in overrides_of(folder, typed) if redacted(each) == each]
    add_run_facts(folder.path, command={"launcher": _launcher(), "overrides": public})


def overrides_of(folder: RunFolder, changed: Sequence[str] = ()) -> list[str]:
    """Return what starts this run anew, with paths that are valid in the present folder.

    Args:
        folder: of the run.
        changed: overrides that take the place of those with the same keys.
    """
    kept: dict[str, str] = {}
    is_elsewhere = folder.place("") not in (Path(), Path.cwd())
    for typed in run_facts(folder.path, "command").get("overrides", []):
        key, value = key_of(typed), value_of(typed)
        if is_elsewhere and isinstance(value, str):
            path = folder.place(value)
            if key in _FOLDERS or (key in PATHS and path.exists()):
                typed = f"{key}={as_typed(str(path))}"
        kept[key] = typed
    for typed in changed:
        kept.pop(_INSTEAD.get(key_of(typed), ""), None)
        kept[key_of(typed)] = typed
    return [typed for key, typed in kept.items() if key not in _OF_ONE_COMMAND]


def new_run_command(folder: Path, changed: Sequence[str] = ()) -> str:
    """Return the command line of a new run that is the one in ``folder`` but for what is ``changed``.

    Empty where the parser of train.py refuses it, or where it is not known how the run was started.
    """
    facts = run_facts(folder, "command")
    overrides = overrides_of(RunFolder(folder), changed)
    if not facts or not accepts(overrides):
        return ""
    return command("train.py", overrides, facts["launcher"])


def compare_command(folder: Path, config: Config) -> str:
    """Return the command line that compares the run in ``folder`` with fp32, or one in fp32 with bf16.

    Empty where it has no steps to be timed, or where it is not known how the run was started.
    """
    typed = overrides_of(RunFolder(folder))
    if not typed or int(config.steps) <= config.log_every:
        return ""
    mode, group = config.precision.mode, lambda each: key_of(each).partition(".")[0]
    own = [each for each in typed if group(each) in ("precision", "scaler") and key_of(each) != "precision"]
    arms = dict.fromkeys([FP32.name, BF16.name if mode == FP32.name else mode])
    alike = [name for name in arms if name != mode or not own]
    text = [f"arm.{mode}={' '.join([f'precision={mode}', *own])}"] if own else []
    common = [each for each in typed if group(each) not in ("precision", "scaler", *_NOT_COMPARED)]
    return command("compare.py", [*common, f"arms={','.join(alike)}", *text, "seeds=5"])


def resume_command(folder: Path) -> str:
    """Return the command line that continues the run in ``folder``."""
    if Path(sys.argv[0]).name == "train.py":  # as the user has called it
        return shlex.join([*_launcher(), sys.argv[0], _resume(folder)])
    return command("train.py", [_resume(folder)], _launcher())


def doctor_command(folder: Path) -> str:
    """Return the command line that looks for the cause of a failure of the run in ``folder``.

    It replays all ranks in one process.
    """
    return command("doctor.py", [_resume(folder)])


def _launcher() -> list[str]:
    """Return what starts this program: Python, or torchrun."""
    if not launched_processes():
        return ["python"]
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = launched_processes() // here
    return ["torchrun", f"--nproc-per-node={here}", *([f"--nnodes={nodes}"] if nodes > 1 else [])]


def _resume(folder: Path) -> str:
    return f"resume={as_typed(str(folder))}"
