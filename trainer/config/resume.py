"""Resuming: which earlier run a command continues, and what may differ from it.

One rule: what is recorded counts as typed. ``resume=FOLDER`` composes the command line on the folder's config.json.
``resume=auto`` and ``resume=same`` compose the command line as it is, find the run by its name, and take from its
record what is still ``auto`` (``settle.plan_of``). In every case ``check_same`` refuses what ``may_change`` does not
allow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import mantissa
from trainer.checkpoint import store as checkpoint
from trainer.config import external_recipes
from trainer.config.command_line import CommandLine
from trainer.config.explain import explained
from trainer.config.registration import CONF, flatten, groups, register, root
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.config.step import Plan
from trainer.data.loader import OnDeviceLoader
from trainer.errors import UserError
from trainer.files import CONFIG_FILE, NO_FOLDER, SAME, check_output_dir, final_status
from trainer.hardware import Hardware
from trainer.parallel.world import World
from trainer.run_folder import RunFolder, named, same_place, to_continue

State = Literal["complete", "not finite", "interrupted"]

_ELSEWHERE = (
    *("checkpoint", "tracking", "resume", "recipe_path", "output_dir", "run_name"),
    *("tags", "note", "quiet", "why"),
)
"""Keys and groups that change nothing about a run but where its results are, and what is said of it."""
MAY_CHANGE = (
    *("steps", "epochs"),  # make the run longer, and with it the schedule
    *("device", "threads", "parallel", "loader", "activation_checkpointing"),
    *("log_every", "eval_every", "metrics", "early_stopping", "profiler", "diagnostics", "debug"),
    *_ELSEWHERE,
)
"""Keys and groups that may differ between a run and its continuation: they do not change what is learnt.

``may_change`` has the exceptions, in both directions.
"""
_NAME = "recorded"


def base(line: CommandLine, recorded: Mapping[str, Any] | None = None) -> tuple[str, Mapping[str, Any], list[str]]:
    """Register what a command line is composed on; every process of a job does so before they know each other.

    Args:
        line: the command line; with ``resume=FOLDER`` it is composed on what that run has recorded.
        recorded: options to compose on in the place of the defaults, by dotted key; those of a group all together. A
            choice on the command line, such as ``loader=plain``, takes the place of its group's.

    Returns:
        The name of the config for Hydra; the options that are in it, none where it is conf/config.yaml; the arguments.

    Raises:
        UserError: ``resume`` names no run to continue, or the options are not those of this version.
    """
    if not line.is_multirun:
        line.check_single("add -m to run one after the other")
    if (resume := line.value("resume")) == "true":
        raise UserError("resume=true: write resume=auto, which continues the newest run of this name, or a run folder")
    if resume not in NO_FOLDER:
        output_dir = str(line.value("output_dir", "outputs"))
        folder = RunFolder.open("resume", str(resume), output_dir, line.value("tracking.uri"))
        if line.is_multirun:
            raise UserError(f"resume={folder.path} continues one run, but -m starts several; remove -m")
        recorded = options_of(folder) | {"resume": str(folder.path)}
        if line.value("epochs") is not None:  # in the place of the steps that epochs became
            del recorded["steps"]
        external_recipes.use_folder(line.value("recipe_path", recorded.get("recipe_path")))
        register()
        try:
            _register(recorded)
        except UserError as error:
            raise _of_another_version(folder, str(error)) from error
    elif recorded is not None:
        external_recipes.use_folder(line.value("recipe_path", recorded.get("recipe_path")))
        register()
        _register(recorded)
    else:
        register()
    arguments = list(line.arguments)
    if searched := external_recipes.config_folders():
        arguments.append(f"hydra.searchpath={[f'file://{path}' for path in searched]}")
    return ("config", {}, arguments) if recorded is None else (_NAME, recorded, arguments)


def options_of(folder: RunFolder) -> dict[str, Any]:
    """Return a run's options as those of a run in the same place; its tracking.json has the whole ``tracking.uri``.

    Raises:
        UserError: config.json cannot be read.
    """
    kept = {key: value for key, value in folder.config().items() if key not in ("resume", "tracking.uri")}
    return kept | {"output_dir": str(folder.path.absolute().parent)}


def _register(recorded: Mapping[str, Any]) -> None:
    """Register options as choices of their groups, and a config with these choices."""
    config, chosen = OmegaConf.structured(root()), set()
    for group, choices in groups().items():
        if any(key.partition(".")[0] == group for key in recorded):
            kind = str(recorded.get(group)) if len(choices) > 1 else next(iter(choices))
            if kind not in choices:
                raise UserError(f"config.json: there is no {group}={kind:.60}")
            config[group] = choices[kind]
            chosen.add(group)
    with explained("config.json: "):
        for key, value in recorded.items():
            if key not in chosen:
                literal = value.replace("${", "\\${") if isinstance(value, str) else value
                OmegaConf.update(config, key, literal, merge=False)
    store, choice = ConfigStore.instance(), f"{_NAME}_schema"
    for group in chosen:
        store.store(choice, config[group], group)
    main = OmegaConf.load(CONF / "config.yaml")
    for entry in main.defaults:
        if OmegaConf.is_dict(entry) and chosen & set(entry):
            entry.update(dict.fromkeys(entry, choice))
    others = {key.partition(".")[0] for key in recorded} - chosen
    store.store(_NAME, OmegaConf.merge(main, OmegaConf.masked_copy(config, list(others))))


def may_change(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a key may differ between a run (``before``, by dotted keys) and its continuation."""
    if key == "loader":  # the one that repeats a single batch is other training data
        return OnDeviceLoader.kind not in (before.get(key), now.get(key))
    if key == "checkpoint.best":  # another measure of quality
        return False
    if key in ("micro_batch_size", "precision.kernels"):  # rounding; and of the first what batch norm sees
        return not now.get("deterministic")
    return key == "data.on_error" or key.partition(".")[0] in MAY_CHANGE


def check_same(folder: RunFolder, before: Mapping[str, Any], flat: dict[str, Any]) -> None:
    """Refuse to continue a run under a config that would make it another run; both by dotted keys.

    Raises:
        UserError: names the keys that differ, the recipe first.
    """
    different = {
        key: values
        for key, values in _differences(before, flat).items()
        if not may_change(key, before, flat) and not folder.is_gone(key, values[0])
    }
    if new := [key for key in different if _is_of_one(key, before, flat)]:
        where = "config.json has" if new[0] in flat else "there is"
        raise _of_another_version(folder, f"{where} no {new[0]}")
    if different:
        keys = ["recipe"] if "recipe" in different else list(different)[:4]
        changes = ", ".join(f"{key} was {different[key][0]}, now {different[key][1]}" for key in keys)
        restore = "restore it" if len(keys) == 1 else "restore them"
        raise UserError(f"cannot resume {folder.path}: {changes}; {restore} or start a new run")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two configs by dotted key: before, now. A path may be written in another way."""
    values = {key: (before.get(key), now.get(key)) for key in dict.fromkeys([*before, *now])}
    return {
        key: (one, other)
        for key, (one, other) in values.items()
        # The last of optimizer.groups that matches decides, so their order counts.
        if (one != other or (key == "optimizer.groups" and json.dumps(one) != json.dumps(other)))
        and not same_place(key, one, other)
    }


class Earlier(NamedTuple):
    """A run that may be continued."""

    folder: RunFolder
    recorded: Mapping[str, Any]
    """Its options, by dotted key."""
    state: State | None
    must_be_same: bool = False
    """Whether it is meant only if it has the very options of the new command."""


def earlier_runs(config: Config) -> list[Earlier]:
    """Return the runs that ``resume``, or torchrun's restart, may mean, the first choice first; rank 0 calls it.

    ``resume`` is a folder; ``auto``: the newest one of this run name with a checkpoint; or ``same``: those of this
    name, first the ones that are settled, then the newest to be resumed.

    Raises:
        UserError: the output folder cannot be written, or a record cannot be read.
    """
    check_output_dir(config.output_dir)
    if (folder := to_continue(config.output_dir, config.name, config.resume)) is not None:
        return [Earlier(folder, folder.config(), state_of(folder))]
    if config.resume == SAME:
        begun = [folder for folder in named(config.output_dir, config.name) if _is_recorded(folder)]
        states = [(folder, state_of(folder)) for folder in begun]
        runs = [Earlier(folder, folder.config(), state, True) for folder, state in states if state is not None]
        return sorted(runs, key=lambda run: run.state == "interrupted")
    if config.resume is None or config.resume in NO_FOLDER:
        return []
    folder = RunFolder.open("resume", config.resume, config.output_dir, config.tracking.uri)
    recorded = config.recorded or folder.config()  # a YAML may name the folder, on which the config is not composed
    return [Earlier(folder, recorded, state_of(folder))]


class Continued(NamedTuple):
    """The run that a command continues."""

    folder: RunFolder
    recorded: Mapping[str, Any]
    """See ``Earlier``."""
    state: State | None
    plan: Plan[Config]
    """What the command becomes with this record."""


def find_earlier(config: Config, hardware: Hardware, world: World) -> Continued | None:
    """Return the run that is continued; None: a new run begins. Every rank calls it.

    Of ``resume=same`` that is a run with these very options. Stricter than ``check_same``: another number of steps,
    another loader or profiler would give other results. What is still ``auto`` follows from the rest.

    Raises:
        UserError: see ``earlier_runs`` and ``settle.plan_of``.
    """
    for earlier in world.run_on_main(partial(earlier_runs, config)):
        planned = plan_of(config, hardware, world, earlier.recorded)
        different = _differences(earlier.recorded, flatten(planned.config))
        if not earlier.must_be_same or all(
            (key.partition(".")[0] in _ELSEWHERE and key != "checkpoint.best") or (now == "auto" and key != "augment")
            for key, (_, now) in different.items()
        ):
            return Continued(earlier.folder, earlier.recorded, earlier.state, planned)
    return None


def _of_another_version(folder: RunFolder, why: str) -> UserError:
    return UserError(
        f"cannot resume {folder.path}: it was written by {folder.version}, whose options are not those of this "
        f"version, {mantissa.__version__} ({why}); start a new run from its weights with init_from={folder.path}"
    )


def _is_of_one(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether only one of two versions has a key, for the same choice of its group."""
    group, dot, _ = key.partition(".")
    return (key in before) != (key in now) and (not dot or before.get(group) == now.get(group))


def _is_recorded(folder: RunFolder) -> bool:
    return os.path.lexists(folder.path / CONFIG_FILE)


def state_of(folder: RunFolder) -> State | None:
    """Return how the run in a folder ended; None: before its first checkpoint."""
    status = final_status(folder.path)
    if status == "FINISHED":
        return "complete"
    if status == "FAILED" and folder.summary().get("failure"):
        return "not finite"
    return "interrupted" if checkpoint.steps(folder.checkpoints) else None
