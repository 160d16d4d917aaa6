"""Resuming: which earlier run a command continues, and what may differ from it.

``resume=FOLDER`` composes the command line on top of the folder's config.json (``trainer/config/recorded.py``), which
is complete: ``auto`` has become a number, for example. ``resume=auto`` and ``resume=same`` compose the command line as
it is, and find the run by its name. In every case ``check_same`` refuses what ``may_change`` does not allow.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any, Literal

from trainer.checkpoint import store as checkpoint
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.config.step import Resolved
from trainer.data.loader import OnDeviceLoader
from trainer.debug import Overfit
from trainer.errors import UserError
from trainer.files import CONFIG_FILE, NO_FOLDER, SAME, check_output_dir, final_status, read_object
from trainer.run_folder import RunFolder, named, same_place, to_continue

State = Literal["complete", "not finite", "interrupted"]

_WORDS = ("tags", "note", "group")
MAY_CHANGE = (
    *("steps", "epochs"),  # make the run longer, and with it the schedule
    *("device", "threads", "parallel", "loader", "activation_checkpointing"),
    *("log_every", "eval_every", "metrics", "early_stopping", "profiler", "diagnostics", "debug"),
    *("checkpoint", "tracking", "resume", "recipe_path", "output_dir", "run_name", *_WORDS),
)
"""Keys and groups that may differ between a run and its continuation: they do not change what is learnt.

``may_change`` has the exceptions, in both directions.
"""
_ELSEWHERE = ("checkpoint", "tracking", "resume", "recipe_path", "output_dir", "run_name", *_WORDS)
"""Those that change nothing about a run but where its results are, and what is said of it."""


def may_change(key: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a key may differ between a run (``before``, by dotted keys) and its continuation."""
    if key in ("loader", "debug"):  # those that repeat a single batch are other training data
        return not {before.get(key), now.get(key)} & {OnDeviceLoader.kind, Overfit.kind}
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


def earlier_folder(config: Config, resolved: Resolved) -> RunFolder | None:
    """Return the folder of the run to resume, if any: what torchrun's restart interrupted, or what ``resume`` says.

    ``resume`` is a folder, an address in MLflow, ``auto``: the newest folder of this run name with a checkpoint, or
    ``same``: see ``same_run``.

    Raises:
        UserError: ``resume`` names no run, or the output folder cannot be written.
    """
    check_output_dir(config.output_dir)
    if found := to_continue(config.output_dir, resolved.config.name, config.resume):
        return found
    if config.resume == SAME:
        return same_run(config, resolved)
    if config.resume in NO_FOLDER:
        return None
    return RunFolder.open("resume", config.resume, config.output_dir, config.tracking.uri)


def same_run(config: Config, resolved: Resolved) -> RunFolder | None:
    """Return the folder of the run with this name and these options: one that is settled, else the newest to resume.

    None: there is none, or only runs that ended before their first checkpoint. Stricter than ``check_same``: another
    number of steps, another loader or profiler would give other results. What is still ``auto`` follows from the rest.

    Args:
        config: as composed.
        resolved: what it became.
    """
    unfinished = None
    for folder in named(config.output_dir, resolved.config.name):
        if not os.path.lexists(folder.path / CONFIG_FILE):
            continue
        state, before = state_of(folder), folder.config()
        now = flatten(as_before(folder, before, config, resolved).config)
        same = all(
            (key.partition(".")[0] in _ELSEWHERE and key != "checkpoint.best") or (other == "auto" and key != "augment")
            for key, (_, other) in _differences(before, now).items()
        )
        if same and state in ("complete", "not finite"):
            return folder
        if same and state == "interrupted":
            unfinished = unfinished or folder
    return unfinished


def state_of(folder: RunFolder) -> State | None:
    """Return how the run in a folder ended; None: before its first checkpoint."""
    status = final_status(folder.path)
    if status == "FINISHED":
        return "complete"
    if status == "FAILED" and folder.summary().get("failure"):
        return "not finite"
    return "interrupted" if checkpoint.steps(folder.checkpoints) else None


def as_before(folder: RunFolder, before: dict[str, Any], config: Config, resolved: Resolved) -> Resolved:
    """Return the resolved config with what ``auto`` became when the run in ``folder`` was started.

    That is where data, memory or a measurement decides it. The weights are the checkpoint's.

    Args:
        folder: of the run.
        before: its recorded config.
        config: as composed.
        resolved: what it became now.
    """
    batching, size = resolved.plan.batching, before.get("micro_batch_size", 0)
    other = isinstance(size, int) and 0 < size != batching.micro_batch_size
    if config.micro_batch_size == "auto" and other and batching.batch_size % (size * batching.ranks) == 0:
        resolved = resolved.with_micro_batch_size(size, "as at the start of the run")
    now = replace(resolved.config, source=None)
    saving = [each._replace(value=before[each.key]) for each in config.recipe.memory_overrides() if each.key in before]
    now = replace(now, recipe=now.recipe.chosen(saving))
    if before.get("recipe") == now.recipe.name and before.get("data") == now.data.kind:
        tokenizer = read_object(folder.path / "config.json").get("data.tokenizer")
        if tokenizer is not None and getattr(now.data, "tokenizer", None) == tokenizer:
            where: Any = {"tokenizer": before["data.tokenizer"]}  # that of another run is kept in this one's folder
            now = replace(now, data=replace(now.data, **where))
        now = replace(now, augment=now.augment.as_before(str(before.get("augment"))))
    return resolved._replace(config=now)
