"""Errors of Hydra and OmegaConf as one sentence that names the key and what to set instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, is_dataclass
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from trainer.config import registration as config
from trainer.config.text import values_of
from trainer.errors import UserError, nearest


@contextmanager
def explained(where: str = "") -> Iterator[None]:
    """Make a ``UserError``, one sentence, of what Hydra or OmegaConf raises; ``where`` stands before it."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{where}{_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """Return what was wrong with the command line, or with a YAML file it composes."""
    chain: list[Any] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    cause, text = chain[-1], "\n".join(map(str, chain))
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file and cause.options:  # named by a YAML file
        options = [name for name in cause.options if not name.endswith("_schema")]
        arch = "; an architecture is recipe=resnet recipe.arch=…" * cause.missing_cfg_file.startswith("recipe/resn")
        return f"there is no {cause.missing_cfg_file} ({', '.join(options)}){arch}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        if not is_dataclass(cause.object_type):
            others = _others_with(cause.full_key)
            return f"{cause.full_key} is not in the config{others or f'; add it with +{cause.full_key}=…'}"
        offered = re.search(r"append to your config use \+\S+?=(.*)", text)
        return _unknown(cause.full_key, cause.object_type, offered[1] if offered else "")
    override = re.search(r"Error merging override \+*(.*)", text)
    typed = override[1] if override else getattr(cause, "full_key", None) or ""
    if own := [name for name in known_options() if name.startswith(f"{typed.partition('=')[0]}.")]:
        return f"{typed}: set one of its options: {', '.join(own)}"
    first = str(cause).strip().partition("\n")[0]
    if there := re.search(r"An item is already at '(.*)'", first):
        return f"{there[1]} already has a value; set it with {there[1]}=…, without the +"
    if "does not support deletion" in first:
        return f"{typed}: an option cannot be removed; set another value, or leave it out for the default"
    key = typed.partition("=")[0]
    kind = str(next((entry.type for entry in known_options().get(key, {}).values()), ""))
    if isinstance(cause, ValidationError | TypeError) and kind and "expected one of" not in first:
        return f"{typed}{f': set +{key}.NAME=VALUE' if kind[:4] == 'dict' else f' must be {values_of(kind)}'}"
    return f"{typed}: {first}" if typed else first


def known_options() -> dict[str, dict[str, Field[Any]]]:
    """Return every key that can be set, and the choices that have it, with their fields; of no group, the choice ''."""
    known: dict[str, dict[str, Field[Any]]] = {}

    def add(cls: Any, prefix: str, choice: str) -> None:
        for entry in config.options(cls):
            known.setdefault(f"{prefix}{entry.name}", {})[choice] = entry
            inner = entry.default_factory
            if is_dataclass(inner) and f"{prefix}{entry.name}" not in groups:  # options within an option
                add(inner, f"{prefix}{entry.name}.", choice)

    groups = config.groups()
    add(config.root(), "", "")
    for group, classes in groups.items():
        for choice, cls in classes.items():
            add(cls, f"{group}.", choice)
    return known


def _unknown(key: str, owner: Any, value: str) -> str:
    """Return which choice of the group has this option, if any, or the nearest option."""
    known, (group, _, option) = known_options(), key.partition(".")
    classes = config.groups().get(group, {})
    if choices := known.get(key):
        here = next((choice for choice, cls in classes.items() if cls is owner), None)
        which = f"{group}={here}" if here else f"this {group}"
        owners = ", ".join(f"{group}={name}" for name in sorted(choices))
        return f"{key} is not an option of {which}; it belongs to {owners}"
    better = intended_key(option if classes else key)
    if classes and better == option:
        options = [entry.name for entry in config.options(owner)]  # those that the choice has, else all
        options = options or [name.partition(".")[2] for name in known if re.match(rf"{group}\.\w+$", name)]
        near = nearest(option, options, f"{group}.") or f"; {group} has {', '.join(options)}"
    elif better != key:
        # Under the same name in a group the value is right, too; other trainers' names may want another one.
        typed = f"={value}" if better.endswith(f".{key}") and value else ""
        near = f"; did you mean '{better}{typed}'?{_others_with(better)}"
    else:
        near = nearest(key, [*(name for name in known if "." not in name), "experiment"])
    return f"{key} is not a key of the config{near}; --cfg job shows all of them"


def _others_with(key: str) -> str:
    """Return which choices of a group have an option that one class has, or YAML: ``optimizer.options.betas``."""
    group, _, inner = key.partition(".")
    files = sorted(config.yaml_files(group).items()) if inner.count(".") else ()
    owners = [name for name in known_options().get(key, ()) if name not in ("", group)]
    found = [name for name, file in files if OmegaConf.select(OmegaConf.load(file), inner) is not None]
    found = owners if len(owners) == 1 else found
    return f"; it belongs to {', '.join(f'{group}={name}' for name in found)}" if found else ""


OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("betas", "momentum", "eps", "nesterov"), "optimizer.options."),
    **dict.fromkeys(("max_steps", "iterations", "iters", "max_iters", "num_steps", "total_steps"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("model", "network", "task"), "recipe"),
    **dict.fromkeys(("amp", "dtype", "mixed_precision"), "precision"),
    **{name: f"precision={name}" for name in ("fp16", "bf16", "tf32")},
    **dict.fromkeys(("grad_clip", "max_grad_norm", "clip_grad", "gradient_clip_val"), "clip.max_norm"),
    **dict.fromkeys(("warmup", "warmup_iters", "num_warmup_steps", "warmup_ratio"), "schedule.warmup_steps"),
    **dict.fromkeys(("gpu", "cuda", "accelerator"), "device"),
    **dict.fromkeys(("devices", "gpus", "num_gpus", "num_processes"), "torchrun --nproc-per-node=…"),
    **dict.fromkeys(("num_workers", "n_workers", "dataloader_num_workers"), "loader.workers"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "batch_size=… micro_batch_size=…"),
    **dict.fromkeys(("default_root_dir", "save_dir", "out_dir", "logging_dir"), "output_dir"),
    **dict.fromkeys(("eval_steps", "eval_interval", "val_check_interval"), "eval_every"),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), "resume"),
    "per_device_train_batch_size": "micro_batch_size",
    **dict.fromkeys(("num_classes", "n_classes"), "data=…, which has the classes"),
    "gradient_checkpointing": "activation_checkpointing=blocks",
    "strategy": "parallel",
    "save_steps": "checkpoint.every",
    "seed_everything": "seed",
    "logger": "tracking",
    "callbacks": "early_stopping.patience=…",
    "fast_dev_run": "debug=fast",
    "overfit_batches": "debug=overfit",
    "limit_train_batches": "steps",
}
"""Other trainers' names of keys that the key here does not resemble; a final dot: the name is appended."""


_FIRST = ("optimizer", "schedule", "recipe", "data")
"""Of several groups with an option of one name, the first is meant."""


def intended_key(key: str) -> str:
    """Return the intended key of, for example, ``lr`` or ``model.size``; else ``key`` itself.

    That is an option of a group by the option's name alone, or the name that other trainers have for it, and a value
    where that means one.
    """
    known = known_options()
    if key in known:
        return key
    head, dot, rest = key.partition(".")
    if head in OTHER_NAMES:
        other = OTHER_NAMES[head]
        return f"{other}{head}" if other.endswith(".") else f"{other}{dot}{rest}"
    found = [name for name in known if name.partition(".")[2] == key and name.partition(".")[0] in config.groups()]
    return min(found, key=lambda name: [*_FIRST, name.partition(".")[0]].index(name.partition(".")[0]), default=key)


def types_of(key: str) -> set[str]:
    """Return the types of an option, as they are written: several where choices of its group have other ones."""
    return {str(entry.type) for entry in known_options().get(key, {}).values()}
