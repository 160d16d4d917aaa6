"""From Hydra's YAML to typed objects: the schema of every config group, and what a composed config may hold."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

import recipes
from recipes.huggingface import is_kept
from trainer.config.init_from import adopt
from trainer.config.schema import Config
from trainer.errors import LARGEST, UserError, nearest
from trainer.files import PROJECT
from trainer.optim.classes import accepted_options, optimizer_class
from trainer.parallel import wrap  # noqa: F401  # choices of a config group are found below its class
from trainer.recipe import NO_OPTION, Decision, Recipe

CONF = PROJECT / "conf"
"""The folder of Hydra's YAML."""


def groups() -> dict[str, dict[str, type]]:
    """Return the classes of every config group by name; those of what is trained are found in ``recipes/``.

    A group is a field of ``Config`` with a folder in conf/; its classes are the field's type and those below it that
    have a ``kind`` (a recipe: a ``name``) of their own.
    """
    for module in pkgutil.walk_packages(recipes.__path__, "recipes."):
        importlib.import_module(module.name)
    found: dict[str, dict[str, type]] = {}
    for group, base in get_type_hints(Config).items():
        if (CONF / group).is_dir():
            key = "name" if base is Recipe else "kind"
            kinds = {vars(cls).get(key): cls for cls in (base, *_subclasses(base))}
            found[group] = {name: cls for name, cls in kinds.items() if name} or {group: base}
    return found


def register() -> None:
    """Register the schema of every config group with Hydra."""
    store = ConfigStore.instance()
    schemas: dict[tuple[str | None, str], type] = {(None, "root"): Config}
    schemas |= {(group, name): cls for group, classes in groups().items() for name, cls in classes.items()}
    for (group, name), cls in schemas.items():
        if _registered.get((group, name)) is not cls:
            store.store(group=group, name=f"{name}_schema", node=cls)
            _registered[group, name] = cls


_registered: dict[tuple[str | None, str], type] = {}
"""The registered schemas: a process that composes many configs makes each schema once."""


def _subclasses(cls: type) -> list[Any]:
    direct: list[Any] = cls.__subclasses__()
    return [sub for one in direct for sub in (one, *_subclasses(one))]


def build(composed: DictConfig, overrides: Sequence[str] = (), recorded: Mapping[str, Any] = {}) -> Config:
    """Turn what Hydra composed into live, typed objects.

    Args:
        composed: of the root's schema.
        overrides: the command line. Options that an optimizer's YAML has for another class are left out where the
            command line names the class and not the options; an earlier run gives its options (``init_from``) where
            the command line does not.
        recorded: what the command line was composed on, by dotted key: it stays, like what is typed.

    Raises:
        UserError: a key that no component has (``+typo=1``), a required one that is missing, a bad value.
    """
    _refuse_unknown(composed, Config, "")
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise UserError(f"missing required option: {missing[0]}; set {missing[0]}=…")
    typed = by_key(overrides)
    dropped = _of_another_class(composed, typed, str(recorded.get("optimizer.name", "")))
    given = {*typed, *recorded}
    composed.resume = recorded.get("resume", composed.resume)  # the folder that an address of MLflow stands for
    source, kept = adopt(composed, given)
    kept += _fine_tuned(composed, given)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    check_largest(flatten(config))
    return replace(config, source=source, preset=(*dropped, *kept))


_MOST = {
    "threads": 1024,
    "loader.workers": 1024,
    "loader.prefetch": 1024,
    "parallel.bucket_mb": 2**16,
    "batch_size": 2**24,
    "micro_batch_size": 2**24,
    "epochs": 1e6,
    "seed": 2**32 - 1,
    "recipe.layers": 4096,
    "recipe.width": 2**16,
    "recipe.context": 2**24,
    "recipe.image_size": 2**14,
    "tracking.flush_every_s": 86400,
    "tracking.patience_s": 1e7,
}
"""What more of, or larger, starves or overflows any machine, before its memory can be forecast."""


def check_largest(options: Mapping[str, object]) -> None:
    """Raise UserError where an option, by its dotted key, is absurdly large."""
    for key, value in options.items():
        most = _MOST.get(key, LARGEST if type(value) is int else math.inf)
        if isinstance(value, int | float) and value > most:
            raise UserError(f"{key}={value!s:.20} must be at most {most:.0f}")


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return what overrides set, as typed; of a key that is given twice the last counts."""
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


def _of_another_class(composed: DictConfig, typed: Mapping[str, str], recorded: str) -> list[Decision]:
    """Remove the options of the optimizer's YAML that the class named on the command line does not have.

    Raises:
        UserError: another choice of ``optimizer`` has the settings of that class; these would be AdamW's rate for SGD.
    """
    name = composed.optimizer.name
    if "optimizer.name" not in typed or name == recorded:
        return []
    names = {path.stem: OmegaConf.load(path).name for path in (CONF / "optimizer").glob("*.yaml")}
    right = sorted(choice for choice, cls in names.items() if cls == name)
    chosen = typed.get("optimizer", "adamw")  # the default of conf/config.yaml
    if right and chosen in names and chosen not in right and "experiment" not in typed:  # which has its own settings
        raise UserError(
            f"optimizer.name={name} would have the settings of optimizer={chosen}; set optimizer={right[0]}"
        )
    options, accepted = composed.optimizer.options, accepted_options(optimizer_class(name))
    foreign = [key for key in options if key not in accepted and f"optimizer.options.{key}" not in typed]
    if not foreign or "optimizer.options" in typed:
        return []
    with open_dict(options):
        for key in foreign:
            del options[key]
    why = f"{name} has no {' and no '.join(map(str, foreign))}"
    return [Decision("optimizer.options", OmegaConf.to_container(options), why)]


def _fine_tuned(composed: DictConfig, typed: Collection[str]) -> list[Decision]:
    """Lower the learning rate for pretrained weights or adapters, if it is the optimizer's default."""
    cls: Any = OmegaConf.get_type(composed.recipe)
    rank = OmegaConf.select(composed, "recipe.lora.rank")
    started = composed.init_from is not None or OmegaConf.select(composed, "recipe.pretrained") is not None
    pretrained = str(OmegaConf.select(composed, "recipe.pretrained"))
    if is_kept(pretrained) and composed.resume is None:
        run = Path(pretrained).parent
        raise UserError(f"recipe.pretrained={pretrained} holds no weights; use recipe.pretrained={run / 'best'}")
    decisions = []
    if rank and not started:
        why = "of random weights, which stay as they are; set init_from or recipe.pretrained"
        decisions.append(Decision("recipe.lora.rank", rank, why))
    factor = cls.adapter_lr if rank else cls.fine_tuning_lr
    if factor is None or not (started or rank) or {"optimizer.lr", "experiment"} & set(typed):
        return decisions
    lr = float(f"{factor * composed.optimizer.lr:.6g}")
    why = f"for {'adapters' if rank else 'pretrained weights'}; {composed.optimizer.lr} for random weights"
    composed.optimizer.lr = lr
    return [*decisions, Decision("optimizer.lr", lr, why)]


def _refuse_unknown(node: DictConfig, cls: type, prefix: str) -> None:
    # OmegaConf accepts a key added with + and drops it silently when it makes the object.
    fields = {entry.name for entry in options(cls)}
    for key in map(str, node):
        if key not in fields:
            near = nearest(key, fields, prefix)
            raise UserError(f"{prefix}{key} is not a key of the config{near}; --cfg job shows all of them")
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
            child_type = OmegaConf.get_type(child)
            if dataclasses.is_dataclass(child_type) and isinstance(child_type, type):
                _refuse_unknown(child, child_type, f"{prefix}{key}.")


def options(config: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a config, or of its class, that users set."""
    return [entry for entry in dataclasses.fields(config) if entry.metadata != NO_OPTION]


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the config as one level of dotted keys and plain values, for records and comparison."""
    flat: dict[str, Any] = {}
    for entry in options(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            kind = getattr(value, "kind", None) or getattr(value, "name", None)
            if isinstance(kind, str):
                flat[f"{prefix}{entry.name}"] = kind
            flat |= flatten(value, f"{prefix}{entry.name}.")
        else:
            flat[f"{prefix}{entry.name}"] = value
    return flat
