"""From Hydra's YAML to typed objects: the schema of every config group, and what a composed config may hold."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import external_recipes
from trainer.errors import UserError, nearest
from trainer.files import PROJECT, default_name

if TYPE_CHECKING:
    from trainer.config.schema import Config

CONF = PROJECT / "conf"
"""The folder of Hydra's YAML."""


def groups() -> dict[str, dict[str, type]]:
    """Return the classes of every config group by name; those of what is trained are found in ``recipes/``.

    A group is a field of ``Config`` with a folder in conf/; its classes are the field's type and those below it that
    have a ``kind`` (a recipe: a ``name``) of their own.
    """
    bases = {group: base for group, base in get_type_hints(root()).items() if (CONF / group).is_dir()}
    modules = [*(base.__module__ for base in bases.values()), *external_recipes.import_modules()]
    for file in sorted((PROJECT / "recipes").rglob("*.py")):
        modules.append(".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__"))
    for module in modules:
        importlib.import_module(module)
    found: dict[str, dict[str, type]] = {}
    for group, base in bases.items():
        key = "name" if group == "recipe" else "kind"
        kinds: dict[str, type] = {}
        for cls in _with_subclasses(base):
            name = vars(cls).get(key)
            if not name or cls.__module__ not in modules:
                continue
            taken = [entry.name for entry in dataclasses.fields(cls) if entry.name in dir(base)]
            if group == "recipe" and taken:
                raise UserError(f"{group}={name}: a recipe has a {taken[0]} of its own; give the option another name")
            before = kinds.get(name, cls)
            # A choice of augment is refined for images.
            if before is not cls and (group == "recipe" or not issubclass(cls, before)):
                both = f"{before.__module__} and {cls.__module__}"
                raise UserError(f"{group}={name} is defined twice, in {both}; rename one of them")
            kinds[name] = cls
        found[group] = kinds or {group: base}
    return found


def _with_subclasses(cls: type) -> Iterator[type]:
    """Yield a class and all classes below it."""
    yield cls
    below: type
    for below in cls.__subclasses__():
        yield from _with_subclasses(below)


def root() -> type[Config]:
    """Return the class of the whole config; the import takes torch."""
    from trainer.config.schema import Config

    return Config


def register() -> None:
    """Register the schema of every config group with Hydra, and recipes from elsewhere that have no YAML."""
    store = ConfigStore.instance()
    schemas: dict[tuple[str | None, str], type] = {(None, "root"): root()}
    schemas |= {(group, name): cls for group, classes in groups().items() for name, cls in classes.items()}
    for (group, name), cls in schemas.items():
        if _registered.get((group, name)) is not cls:
            try:
                store.store(group=group, name=f"{name}_schema", node=with_open_dictionaries(OmegaConf.structured(cls)))
            except OmegaConfBaseException as error:
                why = f"{error.full_key}: {str(error).partition(chr(10))[0]}"
                remedy = "use bool, int, float, str, a list or dictionary of them, or an Enum of the choices"
                raise UserError(f"{group}={name}: {why}; {remedy}") from error
            _registered[group, name] = cls
            if group == "recipe" and name not in choices("recipe"):
                defaults = [f"{name}_schema@recipe", {"override /data": "own"}, "_self_"]
                store.store(group=group, name=name, node={"defaults": defaults}, package="_global_")


def with_open_dictionaries(schema: DictConfig) -> DictConfig:
    """Let a command line add names to the dictionaries of a schema, without Hydra's ``+``, and return it."""
    for key in schema:
        child = schema._get_node(key)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
            if OmegaConf.get_type(child) is dict:
                OmegaConf.set_struct(child, False)
            with_open_dictionaries(child)
    return schema


def yaml_files(group: str) -> dict[str, Path]:
    """Return the YAML files of a config group, by the name of the choice."""
    folders = [conf / group for conf in (CONF, *external_recipes.config_folders())]
    return {path.stem: path for folder in folders for path in folder.glob("*.yaml")}


def choices(group: str) -> list[str]:
    """Return the names of the YAML files of a config group."""
    return sorted(yaml_files(group))


PATTERNS = ("optimizer.groups", "precision.modules")
"""Dictionaries by name pattern: their order counts, and one that is typed takes the place of what was there before."""
_registered: dict[tuple[str | None, str], type] = {}
"""The registered schemas: a process that composes many configs makes each schema once."""


def check(composed: DictConfig) -> None:
    """Check the keys of what Hydra composed.

    Raises:
        UserError: a key that no component has (``+typo=1``), or a required one that is missing.
    """
    _refuse_unknown(composed, root(), "")
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise UserError(f"missing required option: {missing[0]}; set {missing[0]}=…")


def name_of_composed(composed: DictConfig) -> str:
    """Return the name of the run that Hydra composed."""
    name: str = OmegaConf.get_type(composed.recipe).name  # type: ignore[union-attr]
    return composed.run_name or default_name(name, precision_of(composed)[0], composed.seed)


def precision_of(composed: DictConfig) -> tuple[str, str]:
    """Return the precision of the run that Hydra composed, and why it is that one; it was typed: no reason."""
    from trainer.hardware import detect  # it imports torch
    from trainer.precision.modes import AUTO, automatic

    return automatic(detect(composed.device)) if composed.precision.mode == AUTO else (composed.precision.mode, "")


def key_of(override: str) -> str:
    """Return the option that an override sets or removes: ``optimizer.lr`` of ``+optimizer.lr=1``."""
    return override.lstrip("+~").partition("=")[0]


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return what overrides set, as typed; of a key that is given twice the last counts."""
    return {key_of(override): override.partition("=")[2] for override in overrides}


def _refuse_unknown(node: DictConfig, cls: type, prefix: str) -> None:
    # OmegaConf accepts a key added with + and drops it silently when it makes the object.
    fields = {entry.name for entry in options(cls)}
    for key in map(str, node):
        if key not in fields:
            near = nearest(key, fields, prefix)
            raise UserError(f"{prefix}{key} is not a key of the config{near}; train.py --cfg job shows all of them")
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
            child_type = OmegaConf.get_type(child)
            if dataclasses.is_dataclass(child_type) and isinstance(child_type, type):
                _refuse_unknown(child, child_type, f"{prefix}{key}.")


def options(config: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a config, or of its class, that users set."""
    return [entry for entry in dataclasses.fields(config) if "omegaconf_ignore" not in entry.metadata]


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the config as one level of dotted keys and plain values, for records and comparison."""
    flat: dict[str, Any] = {}
    for entry in options(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            name = getattr(value, "name", None)
            kind = name if entry.name == "recipe" else getattr(value, "kind", name)
            if isinstance(kind, str):
                flat[f"{prefix}{entry.name}"] = kind
            flat |= flatten(value, f"{prefix}{entry.name}.")
        else:
            flat[f"{prefix}{entry.name}"] = value.name if isinstance(value, Enum) else value
    return flat
