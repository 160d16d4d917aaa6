"""The earlier run that a command continues: which folder it has, and whether there is anything left to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import hydra
from omegaconf import OmegaConf

from trainer.checkpoint import store as checkpoint
from trainer.config.compose import CONF, quoted
from trainer.config.registration import flatten
from trainer.config.schema import Config, default_name
from trainer.config.step import Resolved
from trainer.errors import NonFiniteError, UserError
from trainer.files import check_output_dir, final_status, read_object
from trainer.parallel.world import launch_id, restarted
from trainer.run.folder import LAUNCH_FILE, RunFolder, local_folder
from trainer.run.memory.fit import earlier_plan
from trainer.run.record import FAILURE
from trainer.run.resume import NO_FOLDER, SAME, is_same, parse_override

State = Literal["complete", "not finite", "interrupted"]


def earlier_folder(config: Config, resolved: Resolved) -> RunFolder | None:
    """Return the folder of the run to resume, if any: what torchrun's restart interrupted, or what ``resume`` says.

    ``resume`` is a folder, an address in MLflow, ``auto``: the newest folder of this run name with a checkpoint, or
    ``same``: see ``same_run``.

    Raises:
        UserError: ``resume`` names no run, or the output folder cannot be written.
    """
    check_output_dir(config.output_dir)
    if found := _found(Path(config.output_dir).expanduser(), resolved.config.name, config.resume):
        return found
    if config.resume == SAME:
        return same_run(config, resolved)
    if config.resume in NO_FOLDER:
        return None
    return local_folder(config.resume, config.output_dir, config.tracking.uri)


def _found(root: Path, name: str, resume: str | None) -> RunFolder | None:
    """Return the run of this name that torchrun's restart interrupted, or that ``resume=auto`` continues."""
    if restarted():
        marks = root.glob(f"{name}*/{LAUNCH_FILE}")
        ours = [mark for mark in marks if read_object(mark).get("launch") == launch_id()]
        saved = [mark for mark in ours if checkpoint.steps(mark.parent / "checkpoints")]
        if saved:
            return RunFolder(max(saved, key=lambda mark: mark.stat().st_mtime).parent)
    if resume != "auto":
        return None
    saved = [path for path in _named(root, name) if checkpoint.steps(path / "checkpoints")]
    return RunFolder(max(saved, key=lambda path: path.stat().st_mtime)) if saved else None


def without_source(arguments: list[str]) -> list[str]:
    """Return the command line of a run with ``init_from`` as it is continued, if it has a checkpoint of its own.

    It then names the run's folder, and the options that were taken over are those recorded there: the run that it
    started from is not needed again. Every process of a job does so for itself, before they know each other.

    Args:
        arguments: with ``resume=auto``, or started again by torchrun. Any others are returned as they are.

    Raises:
        HydraException: what Hydra refuses.
    """
    typed = {argument: parsed for argument in arguments if (parsed := parse_override(argument)) is not None}
    values = {
        override.key_or_group: override.value() for override in typed.values() if not override.is_sweep_override()
    }
    if not values.get("init_from") or {"-m", "--multirun"} & set(arguments):
        return arguments
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("config", [argument for argument in typed if not argument.startswith("hydra")])
    cls: Any = OmegaConf.get_type(composed.recipe)
    name = composed.run_name or default_name(cls.name, composed.precision.mode, composed.seed)
    folder = _found(Path(composed.output_dir).expanduser(), name, composed.resume)
    if folder is None:
        return arguments
    recorded, before = folder.config(), read_object(folder.path / "config.json")
    options = {"resume": str(folder.path)}
    for key in (*(f"recipe.{option}" for option in (*cls.architecture, *cls.adjustable)), "data.tokenizer"):
        group, _, option = key.rpartition(".")
        if key in recorded and option in composed[group] and (key not in values or values[key] == before[key]):
            options[key] = recorded[key]  # where it is now
    kept = [each for each in arguments if each not in typed or typed[each].key_or_group not in options]
    return [*kept, *(f"{key}={quoted(value)}" for key, value in options.items())]


def same_run(config: Config, resolved: Resolved) -> RunFolder | None:
    """Return the folder of the run with this name and these options: one that is settled, else the newest to resume.

    None: there is none, or only runs that ended before their first checkpoint.

    Args:
        config: as composed.
        resolved: what it became.
    """
    found: dict[Path, State] = {}
    for path in _named(Path(config.output_dir).expanduser(), resolved.config.name):
        folder = RunFolder(path)
        if (state := state_of(folder)) and _is_same(folder, config, resolved):
            found[path] = state
    settled = [path for path, state in found.items() if state != "interrupted"]
    return RunFolder(max(settled or found, key=lambda path: path.stat().st_mtime)) if found else None


def state_of(folder: RunFolder) -> State | None:
    """Return how the run in a folder ended; None: before its first checkpoint."""
    status = final_status(folder.path)
    if status == "FINISHED":
        return "complete"
    if status == "FAILED" and (folder.path / f"{FAILURE}.json").exists():
        return "not finite"
    return "interrupted" if checkpoint.steps(folder.checkpoints) else None


def earlier_result(folder: RunFolder) -> dict[str, Any] | None:
    """Return the summary of a complete run; None: there is something left to do.

    Raises:
        NonFiniteError: the run turned non-finite, as it would again.
    """
    state = state_of(folder)
    if state == "not finite":
        step = read_object(folder.path / f"{FAILURE}.json").get("step")
        raise NonFiniteError(f"{folder.path} turned non-finite at step {step}; remove the folder to repeat the run")
    return folder.summary() if state == "complete" else None


def continued(folder: RunFolder, before: dict[str, Any], config: Config, resolved: Resolved) -> Resolved:
    """Return the resolved config with what ``auto`` became when the run in ``folder`` was started.

    That is where data, memory or a measurement decides it. The weights are the checkpoint's.

    Args:
        folder: of the run.
        before: its recorded config.
        config: as composed.
        resolved: what it became now.
    """
    if config.micro_batch_size == "auto":
        resolved = earlier_plan(folder.path, resolved)
    return resolved._replace(config=_as_before(before, resolved.config))


def _as_before(before: dict[str, Any], config: Config) -> Config:
    recipe, config = config.recipe, replace(config, source=None)
    if before.get("recipe") != recipe.name:
        return config  # another run, which check_same will report
    taken_over = config.init_from is not None and config.resume in NO_FOLDER
    if taken_over and hasattr(config.data, "tokenizer") and "data.tokenizer" in before:
        tokenizer: Any = {"tokenizer": before["data.tokenizer"]}  # where it is now
        config = replace(config, data=replace(config.data, **tokenizer))
    if before.get("data") != config.data.kind:
        return config
    return replace(config, augment=config.augment.as_before(str(before.get("augment"))))


def _is_same(folder: RunFolder, config: Config, resolved: Resolved) -> bool:
    try:
        now = continued(folder, folder.config(), config, resolved).config
    except UserError:  # a folder without a config, or of another version
        return False
    return is_same(folder, flatten(now))


def _named(root: Path, name: str) -> list[Path]:
    """Return the folders of a run name: with a number, where the name was taken."""
    suffixes = {path: path.name.removeprefix(name) for path in root.glob(f"{name}*")}
    return [path for path, end in suffixes.items() if end == "" or (end.startswith("-") and end[1:].isdigit())]
