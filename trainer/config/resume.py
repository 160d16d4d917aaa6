"""Resuming: which earlier run a command continues, and what may differ from it.

``resume=FOLDER`` composes the command line on the folder's config.json, which is complete: ``auto`` has become a
number, for example. ``resume=auto`` and ``resume=same`` compose the command line as it is, and find the run by its
name. In every case ``check_same`` refuses what ``may_change`` does not allow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from trainer.checkpoint import store as checkpoint
from trainer.config import external_recipes
from trainer.config.command_line import CommandLine
from trainer.config.explain import explained
from trainer.config.registration import CONF, flatten, groups, register, root
from trainer.config.schema import Config
from trainer.config.step import Plan
from trainer.data.loader import OnDeviceLoader
from trainer.errors import UserError
from trainer.files import CONFIG_FILE, NO_FOLDER, SAME, check_output_dir, final_status, read_object
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
    if line.value("recipe_path") is None and recorded is not None:
        external_recipes.use_folder(recorded.get("recipe_path"))
    register()
    arguments = list(line.arguments)
    if searched := external_recipes.config_folders():
        arguments.append(f"hydra.searchpath={[f'file://{path}' for path in searched]}")
    if recorded is None:
        return "config", {}, arguments
    _register(recorded)
    return _NAME, recorded, arguments


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
                raise UserError(f"config.json names {group}={kind:.60}, which this version does not have")
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


def may_change(key: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a key may differ between a run (``before``, by dotted keys) and its continuation."""
    if key == "loader":  # the one that repeats a single batch is other training data
        return OnDeviceLoader.kind not in (before.get(key), now.get(key))
    if key == "checkpoint.best":  # another measure of quality
        return False
    if key in ("micro_batch_size", "precision.kernels"):  # rounding; and of the first what batch norm sees
        return not now.get("deterministic")
    return key == "data.on_error" or key.partition(".")[0] in MAY_CHANGE


def check_same(folder: RunFolder, flat: dict[str, Any]) -> None:
    """Refuse to continue a run under a config (``flat``, by dotted keys) that would make it another run.

    Raises:
        UserError: names the keys that differ, the recipe first.
    """
    before = folder.config()
    different = {
        key: values
        for key, values in _differences(before, flat).items()
        if not may_change(key, before, flat) and not folder.is_gone(key, values[0])
    }
    if different:
        keys = ["recipe"] if "recipe" in different else list(different)[:4]
        changes = ", ".join(f"{key} was {different[key][0]}, now {different[key][1]}" for key in keys)
        restore = "restore it" if len(keys) == 1 else "restore them"
        raise UserError(f"cannot resume {folder.path}: {changes}; {restore} or start a new run")


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two configs by dotted key: before, now. A path may be written in another way."""
    values = {key: (before.get(key), now.get(key)) for key in dict.fromkeys([*before, *now])}
    return {
        key: (one, other)
        for key, (one, other) in values.items()
        # The last of optimizer.groups that matches decides, so their order counts.
        if (one != other or (key == "optimizer.groups" and json.dumps(one) != json.dumps(other)))
        and not same_place(key, one, other)
    }


def earlier_folder(config: Config, plan: Plan[Config]) -> RunFolder | None:
    """Return the folder of the run to resume, if any: what torchrun's restart interrupted, or what ``resume`` says.

    ``resume`` is a folder, an address in MLflow, ``auto``: the newest folder of this run name with a checkpoint, or
    ``same``: see ``_same_run``.

    Raises:
        UserError: ``resume`` names no run, or the output folder cannot be written.
    """
    check_output_dir(config.output_dir)
    if found := to_continue(config.output_dir, config.name, config.resume):
        return found
    if config.resume == SAME:
        return _same_run(config, plan)
    if config.resume in NO_FOLDER:
        return None
    return RunFolder.open("resume", config.resume, config.output_dir, config.tracking.uri)


def _same_run(config: Config, plan: Plan[Config]) -> RunFolder | None:
    """Return the folder of the run with this name and these options: one that is settled, else the newest to resume.

    None: there is none, or only runs that ended before their first checkpoint. Stricter than ``check_same``: another
    number of steps, another loader or profiler would give other results. What is still ``auto`` follows from the rest.
    """
    found = []
    for folder in named(config.output_dir, config.name):
        if os.path.lexists(folder.path / CONFIG_FILE) and (state := state_of(folder)) is not None:
            now = flatten(as_before(folder, config, plan).config)
            if all(
                (key.partition(".")[0] in _ELSEWHERE and key != "checkpoint.best")
                or (value == "auto" and key != "augment")
                for key, (_, value) in _differences(folder.config(), now).items()
            ):
                found.append((state == "interrupted", folder))
    return min(found, key=lambda each: each[0], default=(False, None))[1]


def state_of(folder: RunFolder) -> State | None:
    """Return how the run in a folder ended; None: before its first checkpoint."""
    status = final_status(folder.path)
    if status == "FINISHED":
        return "complete"
    if status == "FAILED" and folder.summary().get("failure"):
        return "not finite"
    return "interrupted" if checkpoint.steps(folder.checkpoints) else None


def as_before(folder: RunFolder, config: Config, plan: Plan[Config]) -> Plan[Config]:
    """Return the plan with what ``auto`` became when the run in ``folder`` was started.

    That is where data, memory or a measurement decides it. The weights are the checkpoint's. ``config`` is as composed,
    ``plan`` what it became now.
    """
    before, batching = folder.config(), plan.batching
    size = before.get("micro_batch_size", 0)
    other = isinstance(size, int) and 0 < size != batching.micro_batch_size
    if config.micro_batch_size == "auto" and other and batching.batch_size % (size * batching.ranks) == 0:
        plan = plan.with_micro_batch_size(size, "as at the start of the run")
    saving = [each._replace(value=before[each.key]) for each in config.recipe.memory_overrides() if each.key in before]
    now = replace(plan.config, source=None, recipe=plan.config.recipe.chosen(saving))
    if before.get("recipe") == now.recipe.name and before.get("data") == now.data.kind:
        tokenizer = read_object(folder.path / CONFIG_FILE).get("data.tokenizer")
        if tokenizer is not None and getattr(now.data, "tokenizer", None) == tokenizer:
            where: Any = {"tokenizer": before["data.tokenizer"]}  # that of another run is kept in this one's folder
            now = replace(now, data=replace(now.data, **where))
        now = replace(now, augment=now.augment.as_before(str(before.get("augment"))))
    return replace(plan, config=now)
