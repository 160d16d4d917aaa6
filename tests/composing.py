"""Hydra for tests, which compose thousands of configs: what cannot have changed is cached."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig

CONF = str(Path(__file__).resolve().parents[1] / "conf")
FILES = ("file", "pkg")
"""Schemes of the sources that read YAML."""


def compose_quickly() -> None:
    """From now on, read Hydra's own configs and the project's conf/ once, and merge the same of them once."""
    # Hydra imports the modules of its plugins again, so the classes it uses are not those that `import` gives.
    for source in Plugins.instance().discover(ConfigSource):
        if source.scheme() in FILES:
            for name in ("is_config", "is_group", "load_config"):
                setattr(source, name, _remembered(getattr(source, name)))
    ConfigRepository.__deepcopy__ = lambda self, _: copy.copy(self)  # type: ignore[attr-defined]  # its list is new
    ConfigLoaderImpl._compose_config_from_defaults_list = _merged_once(  # type: ignore[method-assign]
        ConfigLoaderImpl._compose_config_from_defaults_list
    )
    config_loader_impl.create_defaults_list = _listed_once(config_loader_impl.create_defaults_list)
    OverridesParser.parse_rule = _parsed_once(OverridesParser.parse_rule)  # type: ignore[method-assign]
    overrides_parser.create_functions = functools.cache(overrides_parser.create_functions)


def _parsed_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[str, str], bytes] = {}

    def parsed_once(parser: OverridesParser, text: str, rule_name: str) -> Any:
        if (key := (text, rule_name)) not in known:
            known[key] = pickle.dumps(parse(parser, text, rule_name))
        return pickle.loads(known[key])

    return parsed_once


def _remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[str, str], bytes] = {}

    def remembering(source: Any, config_path: str) -> Any:
        if source.scheme() == "file" and source.path != CONF:
            return method(source, config_path)
        key = source.path, config_path
        if key not in known:
            known[key] = pickle.dumps(method(source, config_path))
        return pickle.loads(known[key])  # a copy, faster than copy.deepcopy

    return remembering


def _listed_once(create: Callable[..., DefaultsList]) -> Callable[..., DefaultsList]:
    known: dict[str, DefaultsList] = {}

    def listed_once(
        repo: Any, config_name: str | None, overrides_list: list[Override], prepend_hydra: bool, skip_missing: bool
    ) -> DefaultsList:
        # Which files are merged depends on the choices of groups only, not on the values of keys.
        single = [override for override in overrides_list if not override.is_sweep_override()]
        values = [
            override
            for override in single
            if isinstance(override.value(), dict) or not repo.group_exists(override.key_or_group)
        ]
        choices = [override for override in single if override not in values]
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        if config_name == "recorded" or any(scheme == "file" and path != CONF for scheme, path in sources):
            return create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        schemas = _schemas(ConfigStore.instance().repo)
        lines = [override.input_line for override in choices]
        key = repr((sources, config_name, lines, prepend_hydra, skip_missing, schemas))
        if key not in known:
            known[key] = create(repo, config_name, choices, prepend_hydra, skip_missing)
        return replace(known[key], config_overrides=values)

    return listed_once


def _merged_once(merge: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    known: dict[str, bytes] = {}

    def merged_once(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        # Overrides of values are applied after this. Before it, the config depends on the files and the schemas only.
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        own = any("recorded" in str(default.config_path) for default in defaults)  # by a run
        if own or any(scheme == "file" and path != CONF for scheme, path in sources):
            return merge(loader, defaults, repo)
        key = repr((sources, defaults, _schemas(ConfigStore.instance().repo)))
        if key not in known:
            known[key] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(known[key])

    return merged_once


def _schemas(stored: Any) -> Any:
    if isinstance(stored, dict):
        return {name: _schemas(value) for name, value in stored.items() if not name.startswith("recorded")}
    return id(stored.node)
