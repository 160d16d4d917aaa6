"""Resuming: which earlier run a command continues, and what may differ from it.

``resume=FOLDER`` composes the command line on the folder's config.json: what is recorded counts as typed
(``compose.prepare``). ``resume=auto`` and ``resume=same`` compose the command line as it is, find the run by its name,
and take from its record only what the hardware or the data might decide otherwise today (``settle.plan_of``). In every
case ``check_same`` refuses what ``may_change`` does not allow.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from trainer.checkpoint import store as checkpoint
from trainer.config.command_line import as_typed
from trainer.config.registration import PATTERNS, flatten, key_of
from trainer.config.schema import Config
from trainer.config.settle import Plan, plan_of
from trainer.config.typed import anew, of_another_version
from trainer.data.loader import OnDeviceLoader
from trainer.errors import UserError
from trainer.files import CONFIG_FILE, NO_FOLDER, SAME, check_output_dir, final_status, read_object
from trainer.hardware import Hardware
from trainer.parallel.world import World
from trainer.recipe import Decision
from trainer.run_folder import PATHS, RunFolder, named, same_place, to_continue

State = Literal["complete", "not finite", "interrupted"]

ELSEWHERE = (
    *("checkpoint", "tracking", "resume", "recipe_path", "output_dir", "run_name"),
    *("tags", "note", "quiet", "why"),
)
"""Keys and groups that change nothing about a run but where its results are, and what is said of it."""
MAY_CHANGE = (
    *("steps", "epochs"),  # make the run longer, and with it the schedule
    *("device", "threads", "parallel", "loader", "activation_checkpointing"),
    *("log_every", "eval_every", "metrics", "early_stopping", "profiler", "diagnostics", "debug"),
    *ELSEWHERE,
)
"""Keys and groups that may differ between a run and its continuation: but for the number of steps, over which the
schedule spans, they do not change what is learnt.

``may_change`` has the exceptions, in both directions.
"""


class Earlier(NamedTuple):
    """A run that may be continued."""

    folder: RunFolder
    recorded: Mapping[str, Any]
    """Its options, by dotted key."""
    must_be_same: bool = False
    """Whether it is meant only if it has the very options of the new command; not that of torchrun's restart, which may
    have lost ranks, so that ``auto`` is another microbatch."""


def planned(config: Config, hardware: Hardware, world: World, fitted: Decision | None) -> tuple[Plan, RunFolder | None]:
    """Return what the command becomes, and the folder of the run that it continues; None: a new one begins.

    Every rank calls it. The arguments are those of ``settle.plan_of``; ``fitted`` is for a new run.

    Raises:
        UserError: see ``earlier_runs`` and ``settle.plan_of``.
    """
    for earlier in world.run_on_main(partial(earlier_runs, config)):
        plan = plan_of(config, hardware, world, earlier.recorded)
        if not earlier.must_be_same or _has_these_options(earlier.recorded, flatten(plan.config)):
            return plan, earlier.folder
    return plan_of(config, hardware, world, fitted=fitted), None


def earlier_runs(config: Config) -> list[Earlier]:
    """Return the runs that ``resume``, or torchrun's restart, may mean, the first choice first; rank 0 calls it.

    ``resume`` is a folder; ``auto``: the newest one of this run name with a checkpoint; or ``same``: those of this
    name, first the ones that are settled, then the newest to be resumed.

    Raises:
        UserError: the output folder cannot be written, or a record cannot be read.
    """
    check_output_dir(config.output_dir)
    # The newest with a checkpoint: by torchrun's restart, or resume=auto.
    if (folder := to_continue(config.output_dir, config.name, config.resume)) is not None:
        return [Earlier(folder, folder.config())]
    # All of this name: ``planned`` takes the first one that has the options of the command.
    if config.resume == SAME:
        folders = named(config.output_dir, config.name)
        begun = [folder for folder in folders if os.path.lexists(folder.path / CONFIG_FILE)]
        states = {folder: state for folder in begun if (state := state_of(folder)) is not None}
        runs = [Earlier(folder, folder.config(), must_be_same=True) for folder in states]
        return sorted(runs, key=lambda run: states[run.folder] == "interrupted")
    if config.resume is None or config.resume in NO_FOLDER:
        return []
    # A folder; ``prepare`` has opened that of the command line, but a YAML may name one, too.
    folder = RunFolder.open("resume", config.resume, config.output_dir, config.tracking.uri)
    return [Earlier(folder, folder.config())]


def state_of(folder: RunFolder) -> State | None:
    """Return how the run in a folder ended; None: before its first checkpoint."""
    status = final_status(folder.path)
    if status == "FINISHED":
        return "complete"
    if status == "FAILED" and folder.summary().get("failure"):
        return "not finite"
    return "interrupted" if checkpoint.steps(folder.checkpoints) else None


def check_same(folder: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any], typed: Sequence[str] = ()) -> None:
    """Refuse to continue a run under options that would make it another run; both by dotted keys.

    ``typed`` is the command line.

    Raises:
        UserError: names the keys that differ, the recipe first.
    """
    different = {
        key: values
        for key, values in differences(before, now).items()
        if not may_change(key, before, now) and not folder.is_gone(key, values[0])
    }
    if new := [key for key in different if _is_of_one(key, before, now)]:
        where = "config.json has" if new[0] in now else "there is"
        raise of_another_version(folder, f"{where} no {new[0]}")
    if different:
        keys = ["recipe"] if "recipe" in different else list(different)[:4]
        changes = ", ".join(f"{key} was {different[key][0]}, now {different[key][1]}" for key in keys)
        wrong = [
            each for each in typed if key_of(each) in ("resume", *{key.removesuffix(".mode") for key in different})
        ]
        kept = [each for each in wrong if key_of(each) == "resume"]
        if kept == ["resume=auto"]:  # which finds the run by its name and its folder, where these are typed
            kept = [f"resume={as_typed(str(folder.path))}"]
        raise UserError(
            f"cannot resume {folder.path}: {changes}; continue it as it was, or start a new one from its weights",
            *([shlex.join(kept)] if kept and kept != wrong else []),
            *anew(folder, folder.path, typed),
            mistake=shlex.join(wrong),
        )


def check_record(folder: RunFolder, trained: Mapping[str, Any] | None) -> None:
    """Refuse a config.json that was edited since: ``trained`` has the options that a checkpoint was trained with.

    Paths are passed over: data may be moved. None: the checkpoint is of a version that has not kept them.

    Raises:
        UserError: names the options that differ.
    """
    if trained is None:
        return
    record = read_object(folder.path / CONFIG_FILE)
    changed = {
        key: values
        for key, values in differences(trained, record).items()
        if key not in PATHS and not may_change(key, trained, record)
    }
    if changed:
        edits = ", ".join(f"{key} is {record}, and was {trained}" for key, (trained, record) in [*changed.items()][:4])
        raise UserError(
            f"{folder.path / CONFIG_FILE} was edited since the run's last checkpoint: {edits}; put back what it was"
        )


def may_change(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a key may differ between a run (``before``, by dotted keys) and its continuation."""
    if key == "loader":  # the one that repeats a single batch is other training data
        return OnDeviceLoader.kind not in (before.get(key), now.get(key))
    if key == "checkpoint.best":  # another measure of quality
        return False
    if key in ("micro_batch_size", "precision.kernels"):  # rounding; and of the first what batch norm sees
        return not now.get("deterministic")
    return key == "data.on_error" or key.partition(".")[0] in MAY_CHANGE


def _has_these_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a run has the very options of a command: ``resume=same`` continues no other.

    Stricter than ``check_same``: another number of steps, another loader or profiler would give other results. What is
    still ``auto`` follows from the rest; but the augmentation, whose ``auto`` is the record's choice by now.
    """
    return all(
        (key.partition(".")[0] in ELSEWHERE and key != "checkpoint.best") or (value == "auto" and key != "augment")
        for key, (_, value) in differences(before, now).items()
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two configs by dotted key: before, now. A path may be written in another way."""
    values = {key: (before.get(key), now.get(key)) for key in dict.fromkeys([*before, *now])}
    return {
        key: (one, other)
        for key, (one, other) in values.items()
        # The last pattern that matches decides, so their order counts.
        if (one != other or (key in PATTERNS and json.dumps(one) != json.dumps(other)))
        and not same_place(key, one, other)
    }


def _is_of_one(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether only one of two versions has a key, for the same choice of its group."""
    group, dot, _ = key.partition(".")
    return (key in before) != (key in now) and (not dot or before.get(group) == now.get(group))
