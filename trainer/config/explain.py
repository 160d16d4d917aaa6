"""Errors of Hydra and OmegaConf as one sentence that names the key and what to set instead."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from mantissa.names import format_name
from trainer.config import registration as config
from trainer.config.text import fraction, listed, unquoted, values_of
from trainer.errors import UserError, most_like
from trainer.files import PROJECT
from trainer.precision.names import typed as typed_patterns
from trainer.run_folder import PATHS


@contextmanager
def explained(where: str = "") -> Iterator[None]:
    """Make a ``UserError``, one sentence, of what Hydra or OmegaConf raises; ``where`` stands before it."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error, where) from error
    except yaml.YAMLError as error:  # which names the file and the line
        raise UserError(f"{where}{' '.join(str(error).split())}") from error
    except ValueError as error:
        if "Unsupported item value in defaults" not in str(error):  # Hydra's, which names no file
            raise
        problem = "in the defaults of a YAML file a choice is read as true or false; write off and on in quotes"
        raise UserError(problem) from error


def _explained(error: BaseException, where: str) -> UserError:
    """Return what was wrong with the command line, or with a YAML file it composes, and what to type instead."""
    chain: list[Any] = [error]
    if isinstance(error, ConfigCompositionException) and error.__cause__ is None:  # Hydra does not say ``from`` here
        chain += filter(None, [error.__context__])
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    cause, text = chain[-1], "\n".join(map(str, chain))
    if file := re.search(r"^In '(.+)/(.+)': \w+ raised while composing", text):
        where += f"{file[1]}={file[2]}: "
        path = config.yaml_files(file[1]).get(file[2])
        if path and file[1] in config.groups() and "defaults" not in path.read_text(encoding="utf-8"):
            return _without_schema(path, file[1])
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file and cause.options:
        return _missing(cause.missing_cfg_file, [name for name in cause.options if not name.endswith("_schema")], where)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        key, offered = str(cause.full_key), re.search(r"append to your config use \+\S+?=(.*)", text)
        if key == "experiment" and where.startswith("experiment="):  # the file's options are below its own group
            return UserError(f"{where}the first line of its file has to be # @package _global_")
        if not is_dataclass(cause.object_type):
            typed = f"{key}={offered[1]}" if offered else key
            return UserError(f"{where}{key} is not in the config", *[f"+{typed}"] * bool(offered), mistake=typed)
        return _unknown(cause.full_key, cause.object_type, offered[1] if offered else "", where)
    override = re.search(r"Error merging override \+*(.*)", text)
    typed = override[1] if override else getattr(cause, "full_key", None) or ""
    key, _, value = typed.partition("=")
    if own := [name for name in known_options() if name.startswith(f"{key}.")]:
        return UserError(f"{where}{typed}: set one of its options: {', '.join(own)}")
    first = str(cause).strip().partition("\n")[0]
    if choice := re.search(r"is not a subclass of \w+\. value: (\w+)$", first):
        how = f"a choice is made in the defaults of a file, as {{override /GROUP: {choice[1]}}}"
        return UserError(f"{where}{choice[1]} is in the place of options; {how}")
    if there := re.search(r"An item is already at '(.*)'", first):
        added = re.search(r"remove \+ prefix: '(.*)'", text)
        return has_value(there[1], added[1] if added else "")
    if "does not support deletion" in first:
        return UserError(f"{where}{typed}: an option cannot be removed", "", mistake=typed)
    kind = str(next((entry.type for entry in known_options().get(key, {}).values()), ""))
    if any(isinstance(each, ValidationError | TypeError) for each in chain) and kind and "expected one of" not in first:
        from trainer.metrics import NAMED  # it takes torch

        if key in (*PATHS, "data.pattern") and value.startswith("["):
            return UserError(f"{where}{typed}: {key} is one {'pattern' if key == 'data.pattern' else 'file or folder'}")
        others = []
        if override and takes_list(key) and not (key == "metrics" and value not in NAMED):
            others = [shlex.quote(f"{key}=[{value}]")]
        elif override and value.startswith("[") and "dict" not in kind:
            others = [f"-m {key}={value.strip('[]')}"]
        what = "formats by name pattern, such as {lm_head:fp32}" if key == "precision.modules" else values_of(kind)
        problem = f"{where}{typed} must be {what}"
        if key == "precision.until":
            problem = f"{where}{typed} must be the number of a step, or a share of all steps between 0 and 1"
            return UserError(problem, "precision.until=0.8")
        if key == "metrics":
            problem += f": {', '.join(NAMED)}"
        return UserError(problem, *others, mistake=typed if others else "")
    return UserError(f"{where}{typed}: {first}" if typed else f"{where}{first}")


def _without_schema(path: Path, group: str) -> UserError:
    """Return what the YAML of a choice begins with, where it has no schema."""
    lines = f"defaults: [{' or '.join(f'{name}_schema' for name in config.groups()[group])}, _self_]"
    if group == "recipe":
        defaults = f"defaults: [{path.stem}_schema@recipe, {{override /data: own}}, _self_]"
        lines = f"# @package _global_, then {defaults}, and its options below recipe:"
    return UserError(f"{path} lacks its schema: begin with {lines}")


def has_value(key: str, typed: str) -> UserError:
    """Return that a key needs no ``+``; ``typed`` is the override without it, empty where it is not known."""
    return UserError(f"+{key}: {key} already has a value", *filter(None, [typed]), mistake=typed and f"+{typed}")


def _missing(file: str, options: Sequence[str], where: str) -> UserError:
    """Return that a config group has no such choice, which a YAML file or the command line names."""
    group, _, name = file.rpartition("/")
    problem, typed = f"{where}there is no {file} ({', '.join(options)})", f"{group}={name}"
    if group.startswith("hydra/"):
        return UserError(f"{where}{typed} is a plugin of Hydra's that is not installed", "", mistake=typed)
    near = most_like(name, options)
    return UserError(problem, *([f"{group}={near}"] if near else []), mistake=typed)


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


def _unknown(key: str, owner: Any, value: str, where: str) -> UserError:
    """Return which choice of the group has this option, if any, or which option is meant."""
    known, (group, _, option) = known_options(), key.partition(".")
    classes = config.groups().get(group, {})
    typed = f"{key}={value}" if value else key
    if choices := known.get(key):
        of = f"{group}={'|'.join(sorted(choices))}"
        if where.startswith("experiment="):
            problem = f"{where}it sets {key}, of {of}, so that it goes with no other {group}="
            return UserError(problem, "", mistake=f"{group}=")
        problem = f"{where}{key} is an option of {of} alone"
        fit = sorted(choices) if value and len(choices) <= 3 and group != "data" else []  # whose path has to fit, too
        return UserError(problem, *(f"{group}={name} {typed}" for name in fit), "", mistake=typed)
    if not classes or option in {**OTHER_NAMES, **NOT_HERE} or intended_key(option) != option:
        return meant(option if classes else key, value, f"{where}{key} is not a key of the config", typed)
    if key == "precision.fp32_modules":
        patterns = dict.fromkeys(map(unquoted, listed(value)), "fp32")
        now = [typed_patterns("precision.modules", patterns)] if patterns else []
        problem = f"{where}{key} is now precision.modules, which has a format for each pattern"
        return UserError(problem if now else f"{problem}: {{lm_head: fp32}}", *now, mistake=shlex.quote(typed))
    options = [entry.name for entry in config.options(owner)]  # those that the choice has, else all
    options = options or [name.partition(".")[2] for name in known if re.match(rf"{group}\.\w+$", name)]
    problem = f"{where}{key} is not a key of the config"
    if near := most_like(option, options):
        ours = f"{group}.{near}"
        if ours == PRETRAINED:
            return meant(near, value, problem, typed)
        return UserError(f"{problem}: did you mean {ours}?", *([f"{ours}={value}"] if value else []), mistake=typed)
    typable = ", ".join(name for name in options if f"{group}.{name}" != PRETRAINED)
    return UserError(f"{problem}; {group} has {typable}; {shown_by()} shows all of them")


def meant(key: str, value: str, problem: str, typed: str) -> UserError:
    """Return what is known by another name: an option of a group, another trainer's name, or a similar one.

    Args:
        key: as typed, without dashes.
        value: empty where there is none.
        problem: how the sentence begins.
        typed: the arguments.
    """
    head, dot, rest = key.partition(".")
    name = rest if dot and head in OTHER_GROUPS else key
    known = [*known_options(), "experiment"]
    if name in NOT_HERE:
        return UserError(f"{problem}: {NOT_HERE[name]}", "", mistake=typed)
    if name in OTHER_NAMES and value.lower() in ("false", "no", "none", "off", "null"):
        return UserError(problem, "", mistake=typed)
    ours = intended_key(name)
    if ours == "init_from" and name != ours:
        problem += ": init_from names the weights to start from"
        ours += "=DEFAULT" if value.lower() in ("", "true", "1", "auto") else ""
    if ours == name and name not in known:
        ours = intended_key(most_like(name, [*(each for each in known if "." not in each), *OTHER_NAMES]))
        if not ours:
            return UserError(f"{problem}; {shown_by()} shows all of them")
    key = ours.partition("=")[0]
    if key != name:
        problem += f": here it is {key}" + (f" ({', '.join(config.choices(key))})" if config.choices(key) else "")
    return UserError(problem, *overrides_with(ours, value), mistake=typed)


def overrides_with(ours: str, value: str) -> list[str]:
    """Return the overrides that set a known key to a value, or to the nearest choice; empty: there is none.

    Args:
        ours: the key; or, with a value already, an override.
        value: as typed.
    """
    key, _, meaning = ours.partition("=")
    if choices := config.choices(key):
        value = format_name(value) if key == "precision" else value
        meaning = value if value in choices else meaning or most_like(value, choices)
    elif not meaning and _is_of_type(key, value):
        meaning = value
    if not meaning:
        return []
    group, _, inner = key.partition(".")
    owners = [name for name in known_options().get(key, ()) if name not in ("", group)] or _files_with(group, inner)
    if not owners or len(owners) in (len(config.choices(group)), len(config.groups().get(group, ()))):
        return [f"{key}={meaning}"]
    if group == "data" and len(owners) > 1:  # which of them fits what is trained is not known here
        return []
    return [f"{group}={owner} {key}={meaning}" for owner in owners]


def _is_of_type(key: str, value: str) -> bool:
    """Return whether a value, or each of several, is a number where the option ``key`` is one."""
    types = types_of(key)
    if not value:
        return False
    if not types or not all(each.startswith(("int", "float")) for each in types):
        return True
    words = ("auto", "epoch") if "int | str" in types else ()
    numbers = [fraction(text) for text in value.split(",") if text not in words]
    whole = any(each.startswith("int") for each in types)
    return all(number is not None and (not whole or number.is_integer()) for number in numbers)


def takes_list(key: str) -> bool:
    """Return whether the value of an option is a list, by its type; or of one that only YAML files have, in those."""
    group, _, inner = key.partition(".")
    files = [config.yaml_files(group)[name] for name in _files_with(group, inner)]
    return any("list" in types for types in types_of(key)) or any(
        OmegaConf.is_list(OmegaConf.select(OmegaConf.load(file), inner)) for file in files
    )


def _files_with(group: str, inner: str) -> list[str]:
    """Return the choices whose YAML file has an option: those of ``optimizer.options.betas``."""
    files = sorted(config.yaml_files(group).items()) if inner.count(".") else ()
    return [name for name, file in files if OmegaConf.select(OmegaConf.load(file), inner) is not None]


def shown_by() -> str:
    """Return the commands that show all options of the script that runs."""
    script = Path(sys.argv[0]).name
    own = script != "train.py" and (PROJECT / "scripts" / script).is_file()
    return f"{script} --help, and of training train.py --cfg job," if own else "train.py --cfg job"


PRETRAINED = "recipe.pretrained"
"""The option that ``init_from`` sets, and that cannot be typed."""
OTHER_GROUPS = ("trainer", "training", "train", "args", "model", "optim", "cfg")
"""Where other trainers have options that are in no such group here."""
OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **{name: f"optimizer.options.{name}" for name in ("betas", "momentum", "eps", "nesterov")},
    **dict.fromkeys(("max_steps", "iterations", "max_iters", "num_steps", "total_steps"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("model", "network", "task"), "recipe"),
    **dict.fromkeys(("dtype", "mixed_precision", "opt_level", "amp_level", "amp_opt_level"), "precision"),
    **{name: f"precision={name}" for name in ("fp16", "bf16", "fp64")},
    **dict.fromkeys(("amp", "use_amp", "half"), "precision=fp16"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "clip_grad", "gradient_clip_val"), "clip.max_norm"),
    **dict.fromkeys(("warmup", "warmup_iters", "num_warmup_steps"), "schedule.warmup_steps"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), "schedule"),
    "optim": "optimizer",
    **dict.fromkeys(("num_workers", "n_workers", "dataloader_num_workers"), "loader.workers"),
    **dict.fromkeys(("default_root_dir", "save_dir", "out_dir", "logging_dir"), "output_dir"),
    **dict.fromkeys(("eval_steps", "eval_interval", "val_check_interval", "eval_strategy"), "eval_every"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "batch_size"),
    "gradient_checkpointing": "activation_checkpointing=blocks",
    **dict.fromkeys(("torch_compile", "compile_model"), "compile"),
    "logging_steps": "log_every",
    "save_steps": "checkpoint.every",
    **dict.fromkeys(("logger", "report_to"), "tracking"),
    "pretrained": "init_from",
    "run": "resume",
}
"""Other trainers' names of keys that the key here does not resemble, or what one of their flags does."""
NOT_HERE = {
    **dict.fromkeys(
        ("devices", "gpus", "num_gpus", "num_processes"), "torchrun --nproc-per-node starts several processes"
    ),
    "local_rank": "torchrun, which takes the place of torch.distributed.launch, sets it",
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps"),
        "batch_size is that of a step, which is accumulated from those of micro_batch_size",
    ),
    **dict.fromkeys(("gpu", "cuda", "accelerator"), "device chooses it, by default a GPU where there is one"),
    **dict.fromkeys(("strategy", "fsdp", "ddp"), "parallel has it (ddp, fsdp), for processes that torchrun starts"),
    "warmup_ratio": "schedule.warmup_steps counts steps, by default a twentieth of them",
    **dict.fromkeys(("num_classes", "n_classes"), "the data has the classes"),
    **dict.fromkeys(("do_train", "do_eval"), "every run trains and evaluates"),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), "resume continues a run, whose folder it takes"),
    "tf32": "precision has it where the GPU has",
    "deepspeed": "torchrun with FSDP, the group parallel, shards weights and optimizer",
    "model_name_or_path": "recipe chooses the model, init_from the weights it starts from",
    **dict.fromkeys(("dataset_name", "dataset"), "data chooses it, and of the Hub data.name"),
}
"""Names of other trainers that no single key has, and how it is done here."""


_FIRST = ("optimizer", "schedule", "recipe", "data")
"""Of several groups with an option of one name, the first is meant."""


def intended_key(key: str) -> str:
    """Return the intended key of, for example, ``lr``; else ``key`` itself.

    That is an option of a group by the option's name alone, or the name that other trainers have for it, and a value
    where that means one.
    """
    known = known_options()
    if key in known or config.choices(key):
        return key
    head, dot, rest = key.partition(".")
    if dot and head in OTHER_NAMES and f"{OTHER_NAMES[head]}.{rest}" in known:
        return f"{OTHER_NAMES[head]}.{rest}"
    found = [name for name in known if name.partition(".")[2] == key and name.partition(".")[0] in config.groups()]
    first = min(found, key=lambda name: [*_FIRST, name.partition(".")[0]].index(name.partition(".")[0]), default=key)
    return OTHER_NAMES.get(key, first)


def types_of(key: str) -> set[str]:
    """Return the types of an option, as they are written: several where choices of its group have other ones."""
    return {str(entry.type) for entry in known_options().get(key, {}).values()}
