"""What was typed to start a run, and of a resumed one what was typed since: its run.json has it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import mantissa
from trainer.config.command_line import as_typed, value_of
from trainer.config.registration import key_of
from trainer.errors import UserError, redacted
from trainer.files import add_run_facts, read_object, run_facts
from trainer.parallel.world import launched_processes
from trainer.run_folder import PATHS, RunFolder

_FOLDERS = ("recipe_path", "output_dir")
"""Options that are folders on this machine, also where there is none yet."""
_OF_ONE_COMMAND = ("resume", "why")
"""What another run is not given."""
_INSTEAD = {"steps": "epochs", "epochs": "steps"}
"""Keys of which a run has one: what is typed later takes the place of the other."""


def record_command(folder: RunFolder, typed: Sequence[str]) -> None:
    """Record what is typed to start or to resume a run, but for secrets: run.json goes to MLflow."""
    if "recipe=own" in typed:  # no command has it
        return
    public = [each for each in overrides_of(folder, typed) if redacted(each) == each]
    add_run_facts(folder.path, command={"launcher": launcher(), "overrides": public})


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
            if key in _FOLDERS or (key in PATHS and folder.has(value)):
                typed = f"{key}={as_typed(str(path))}"
        kept[key] = typed
    for typed in changed:
        kept.pop(_INSTEAD.get(key_of(typed), ""), None)
        kept[key_of(typed)] = typed
    return [typed for key, typed in kept.items() if key not in _OF_ONE_COMMAND]


def launcher() -> list[str]:
    """Return what starts this program: Python, or torchrun."""
    if not launched_processes():
        return ["python"]
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = launched_processes() // here
    return ["torchrun", f"--nproc-per-node={here}", *([f"--nnodes={nodes}"] if nodes > 1 else [])]


def anew(folder: RunFolder, weights: Path, typed: Sequence[str] = ()) -> list[str]:
    """Return the remedy of a run that cannot be resumed: a new run of all its options from its weights; or none.

    Args:
        folder: of the run.
        weights: the folder that has them.
        typed: the command line that would resume it.
    """
    if not run_facts(folder.path, "command"):
        return []
    overrides = overrides_of(folder, [*typed, f"init_from={as_typed(str(weights))}"])
    if "architectures" in read_object(weights / "config.json"):  # of transformers: it brings its size and tokenizer
        brought = ("recipe.", "data.vocab_size", "data.tokenizer")
        overrides = [each for each in overrides if not key_of(each).startswith(brought)]
    return [shlex.join(overrides)]


def of_another_version(folder: RunFolder, why: str) -> UserError:
    """Return why a run cannot be resumed by this version, and what to do."""
    return UserError(
        f"cannot resume {folder.path}: it was written by {folder.version}, whose options are not those of this code, "
        f"version {mantissa.__version__} ({why}); a new run can start from its weights, by init_from",
        *anew(folder, folder.path),
        mistake="resume=",
    )
