"""Resuming: the command line that ``resume=FOLDER`` stands for, and what may differ from the run in that folder.

The recorded config is complete (``auto`` has become a number, for example), so it is the base, on any machine. The
overrides of the command line are applied to it; ``check_same`` then refuses what would make another run. Choices such
as ``precision=bf16`` or an experiment stand for many values: they have to agree with the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainer.config.compose import CONF, quoted
from trainer.config.early_stopping import EarlyStopping
from trainer.config.registration import groups
from trainer.config.schema import Config
from trainer.data.loader import OnDeviceLoader
from trainer.debug import Overfit
from trainer.errors import UserError
from trainer.run.folder import RunFolder, local_folder

# What may differ between a run and its continuation, because it does not change what is learnt; and ``steps``, which
# makes the run longer (and with it the schedule).
_FREE = ("steps", "epochs", "eval_every", "log_every", "resume", "output_dir", "run_name", "device", "threads")
_FREE_GROUPS = (
    *("loader", "profiler", "diagnostics", "checkpoint", "tracking", "parallel", "activation_checkpointing"),
    *("early_stopping", "debug"),
)
SAME = "same"
"""``resume=same``: the run of this name with the same options; a new one where there is none. Sweeps do so."""
NO_FOLDER = (None, "auto", SAME)
"""Values of ``resume`` that name no folder: the run has to be found, if there is one."""
_KEPT_ELSEWHERE = ("resume", "output_dir", "run_name")
_KEPT_ELSEWHERE_GROUPS = ("tracking", "checkpoint")
"""Options that change nothing about a run but where its results are."""
_OWN = ("resume", "output_dir", "tracking.uri")
"""Keys that are not taken from the record: where the folder is now is known, and tracking.json has the URI."""


def complete(arguments: list[str]) -> list[str]:
    """Return the command line that one with ``resume=FOLDER`` stands for; any other one as it is.

    Every process of a job does so for itself, before they know each other.

    Raises:
        UserError: the folder holds no run to resume, or a given choice differs from that of the run.
    """
    typed = {argument: parsed for argument in arguments if (parsed := parse_override(argument)) is not None}
    named = [override.value() for override in typed.values() if override.key_or_group == "resume"]
    if not named or named[-1] in NO_FOLDER or not isinstance(named[-1], str):
        return arguments
    if {"-m", "--multirun"} & set(arguments):
        raise UserError(f"resume={named[-1]} continues one run, but -m starts several; remove -m, or leave resume= out")
    if any(override.key_or_group == "init_from" and override.value() is not None for override in typed.values()):
        raise UserError(f"init_from starts a new run, resume={named[-1]} continues one; remove one of them")
    plain = {override.key_or_group: str(override.value()) for override in typed.values() if not _is_choice(override)}
    folder = local_folder(named[-1], plain.get("output_dir", "outputs"), plain.get("tracking.uri"))
    recorded = folder.config()
    choices = {override.key_or_group: argument for argument, override in typed.items() if _is_choice(override)}
    checked = [choice for group, choice in choices.items() if group not in _FREE_GROUPS]
    _check_choices(folder, recorded, checked, {override.key_or_group for override in typed.values()} - choices.keys())
    names = [argument for argument, override in typed.items() if override.key_or_group == "resume"]
    kept = [argument for argument in arguments if argument not in (*checked, *names)]
    if "epochs" in plain:
        del recorded["steps"]
    base = _base(folder, folder.located(recorded), choices.keys() & set(_FREE_GROUPS))
    return [*base, *kept, f"resume={quoted(str(folder.path))}"]


def recorded_overrides(folder: RunFolder, only: Collection[str] | None = None) -> list[str]:
    """Return overrides that make up the config that the run in ``folder`` was started with.

    Args:
        folder: of the run.
        only: the groups, and the keys of no group, that are wanted; None: all of them.

    Raises:
        UserError: its config.json cannot be read, or is of another version.
    """
    recorded = folder.config()
    recorded = folder.located(recorded)
    if only is None:
        return _base(folder, recorded, set())
    wanted = {key: value for key, value in recorded.items() if key.partition(".")[0] in only}
    return _base(folder, wanted, groups().keys() - set(only))


def check_same(folder: RunFolder, flat: dict[str, Any], defaults: dict[str, Any] | None = None) -> None:
    """Refuse to continue a run under a config that would make it another run.

    Args:
        folder: of the run.
        flat: the config by dotted keys.
        defaults: of options that the run's record may lack, because they were added later.

    Raises:
        UserError: names the keys that differ, the recipe first.
    """
    before = folder.config()
    before = {key: value for key, value in (defaults or {}).items() if key in flat} | before
    different = {
        key: (before.get(key), flat.get(key))
        for key in dict.fromkeys([*before, *flat])
        if before.get(key) != flat.get(key)
        and not _is_free(key, before, flat)
        and not folder.is_place(key, before, flat.get(key))
        and not folder.is_gone(key, before)
    }
    if different:
        raise _another_run(folder, different)


def is_same(folder: RunFolder, flat: dict[str, Any]) -> bool:
    """Return whether the run in ``folder`` was started with this config (``flat``, by dotted keys).

    Stricter than ``check_same``: another number of steps, another loader or profiler would give other results. What is
    still ``auto`` now follows from the rest.

    Raises:
        UserError: its config.json cannot be read.
    """
    before = folder.config()
    return all(
        _equal(before.get(key), flat.get(key))
        or folder.is_place(key, before, flat.get(key))
        or (flat.get(key) == "auto" and key != "augment")
        for key in dict.fromkeys([*before, *flat])
        if key not in _KEPT_ELSEWHERE
        and (key == "checkpoint.best" or key.partition(".")[0] not in _KEPT_ELSEWHERE_GROUPS)
    )


def _equal(before: Any, now: Any) -> bool:
    """Compare two values; of a mapping also the order (the last of ``optimizer.groups`` that matches decides)."""
    same = isinstance(before, dict) and isinstance(now, dict) and [*before] != [*now]
    return not same and bool(before == now)


def _another_run(folder: RunFolder, different: dict[str, tuple[Any, Any]]) -> UserError:
    """Return the error that names what differs between a run and what is to continue it, by key: before, now."""
    keys = ["recipe"] if "recipe" in different else list(different)[:4]
    changes = ", ".join(f"{key} was {different[key][0]}, now {different[key][1]}" for key in keys)
    restore = "restore it" if len(keys) == 1 else "restore them"
    return UserError(f"cannot resume {folder.path}: {changes}; {restore} or start a new run")


def _is_free(key: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Tell whether this key may differ between a run and its continuation."""
    if key == "loader":  # one that repeats a single batch is other training data
        return OnDeviceLoader.kind not in (before.get(key), now.get(key))
    if key in ("parallel.param_dtype", "checkpoint.best"):  # a precision of its own; another measure of quality
        return False
    if key == "debug":  # one that trains on a single batch is other training data
        return Overfit.kind not in (before.get(key), now.get(key))
    if key in ("micro_batch_size", "precision.kernels"):  # rounding; and of the first what batch norm sees
        return not now.get("deterministic")
    return key in _FREE or key.partition(".")[0] in _FREE_GROUPS


def parse_override(argument: str) -> Override | None:
    """Return an override; None for options such as ``-m`` and for what Hydra is going to refuse."""
    if argument.startswith("-") or "=" not in argument:
        return None
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def _is_choice(override: Override) -> bool:
    return (CONF / override.key_or_group).is_dir()


def _base(folder: RunFolder, recorded: dict[str, Any], leave_out: set[str]) -> list[str]:
    """Return overrides that make up the recorded config: a schema for every group, and every value."""
    classes: dict[str, type] = {"": Config, "early_stopping": EarlyStopping}
    result = []
    for group, choices in groups().items():
        if group in leave_out:
            continue
        kind = recorded.get(group) if len(choices) > 1 else next(iter(choices))
        if kind not in choices:
            if kind is None:  # from before there was this group
                continue
            raise UserError(f"{folder.path}/config.json names {group}={kind!s:.60}, which this version does not have")
        classes[group] = choices[kind]
        for entry in dataclasses.fields(choices[kind]):
            inner: Any = entry.default_factory
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):  # options within an option
                classes[f"{group}.{entry.name}"] = inner
        result.append(f"{group}={kind}_schema")
    for key, value in recorded.items():
        group, _, name = key.rpartition(".")
        fields = dataclasses.fields(classes[group]) if group in classes else ()
        if key not in (*_OWN, *groups()) and any(entry.name == name and entry.init for entry in fields):
            result.append(f"{'++' if isinstance(value, dict) else ''}{key}={quoted(value)}")  # with keys of its own
    return [*result, f"output_dir={quoted(str(folder.path.absolute().parent))}"]


def _check_choices(folder: RunFolder, recorded: dict[str, Any], choices: list[str], typed: set[str]) -> None:
    """Refuse a given choice, or an experiment, that sets something to another value than the run has.

    Values that are given individually are checked later.
    """
    if not choices:
        return
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("config", choices)
    keys: dict[str, None] = {}
    for choice in choices:
        group, _, name = choice.partition("=")
        keys |= _set_by(group, name)
    different = {}
    for key in keys:
        node = OmegaConf.select(composed, key)
        now = _kind(node) if isinstance(node, DictConfig) and key in groups() else _plain(node)
        before = _find(recorded, key)
        if before != now and now != "auto" and key not in typed and not _is_free(key, recorded, recorded):
            different[key] = (before, now)
    if different:
        raise _another_run(folder, different)


def _set_by(group: str, name: str) -> dict[str, None]:
    """Return the keys that make a choice what it is: all that an experiment sets; else a kind, or a first value."""
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        return {}
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    defaults = content.pop("defaults", [])
    if group != "experiment":
        several = len(groups()[group]) > 1
        return dict.fromkeys([group] if several else _leaves({group: content})[:1])
    keys: dict[str, None] = {}
    for entry in defaults:
        if isinstance(entry, dict):
            for key, choice in entry.items():
                keys |= _set_by(str(key).removeprefix("override ").lstrip("/"), str(choice))
    return keys | dict.fromkeys(_leaves(content))


def _leaves(content: dict[Any, Any], prefix: str = "") -> list[str]:
    result = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        result += _leaves(value, f"{name}.") if isinstance(value, dict) and value else [name]
    return result


def _find(recorded: dict[str, Any], key: str) -> Any:
    """Return a recorded value, also of a key within one (``optimizer.options.betas``)."""
    if key in recorded:
        return recorded[key]
    outer, _, name = key.rpartition(".")
    value = _find(recorded, outer) if outer else None
    return value.get(name) if isinstance(value, dict) else None


def _kind(node: DictConfig) -> Any:
    cls = OmegaConf.get_type(node)
    return getattr(cls, "kind", None) or getattr(cls, "name", None)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
