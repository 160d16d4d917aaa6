"""From ``key=value`` overrides to a config, for commands that need one, or several, without being Hydra's own."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Sweep
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trainer.config.explain import explain, intended_key, is_text
from trainer.config.registration import build, register
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import PROJECT

CONF = PROJECT / "conf"

# Hydra's flags. Their values are not checked, because none begins with a dash.
_FLAGS = {
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package", "-r", "--run"),
    *("-m", "--multirun", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "--experimental-rerun", "-i", "--info"),
}


def compose(overrides: Sequence[str]) -> Config:
    """Return the config that scripts/train.py would train with these overrides.

    Raises:
        UserError: one of them is a mistake.
    """
    overrides = checked_arguments(overrides)
    register()
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # of scripts/train.py, in a run
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return build(hydra.compose("config", overrides), overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def key_of(override: str) -> str:
    """Return the option that an override sets or removes: ``optimizer.lr`` of ``+optimizer.lr=1``."""
    return override.lstrip("+~").partition("=")[0]


def combinations(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return every combination of overrides with several values (``precision=fp32,bf16``), by a label of its values.

    Raises:
        UserError: one of them is no override.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(checked_arguments(overrides))
    except HydraException as error:
        raise UserError(explain(error)) from error
    choices: list[list[tuple[str, str]]] = []  # label and override
    for override in parsed:
        key = override.get_key_element()
        is_group = (CONF / key).is_dir()
        if override.is_sweep_override():
            values = map(str, override.sweep_string_iterator())
            choices.append([(value if is_group else f"{key}={value}", f"{key}={value}") for value in values])
        else:
            choices.append([("", str(override.input_line))])
    return {
        ", ".join(filter(None, (label for label, _ in combination))): [override for _, override in combination]
        for combination in itertools.product(*choices)
    }


def quoted(value: Any) -> str:
    """Return a plain value as Hydra reads it in an override."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return repr(value) if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if isinstance(value, dict):
        keys = [re.sub(r"([\\()\[\]{}:=,\s])", r"\\\1", str(key)) for key in value]
        return f"{{{','.join(f'{key}:{quoted(item)}' for key, item in zip(keys, value.values(), strict=True))}}}"
    return _in_quotes(str(value).replace("${", "\\${"))  # which OmegaConf would look up


def checked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line that Hydra's grammar can read: paths with other characters are quoted.

    Raises:
        UserError: an argument without a key, with dashes before the key, or a choice that is no name.
    """
    readable = []
    for number, argument in enumerate(arguments):
        key, equals, typed = argument.lstrip("+").partition("=")
        if argument[:1] in ("=", "@"):
            raise UserError(f"{argument!r} is not an override; write key=value, such as steps=100 or precision=bf16")
        if argument.startswith("-") and argument.partition("=")[0] not in _FLAGS:
            following = "".join(arguments[number + 1 : number + 2])
            value = typed if equals else following if following[:1] != "-" and "=" not in following else ""
            raise UserError(
                f"{argument}: write {intended_key(key.strip('-').replace('-', '_'))}={value or '…'}, without dashes"
            )
        override = _parsed(argument) if equals else None
        choices = sorted(path.stem for path in (CONF / key).glob("*.yaml")) if override else []
        if choices and override and not isinstance(override.value(), str | list | Sweep):
            raise UserError(f"{key}={typed} is not a choice ({', '.join(choices)})")
        foreign = equals and not override and is_text(key)
        readable.append(f"{argument.partition('=')[0]}={_in_quotes(typed)}" if foreign else argument)
    return readable


def _parsed(argument: str) -> Override | None:
    """Return what Hydra's grammar makes of an argument; None: nothing."""
    with suppress(HydraException):
        return OverridesParser.create().parse_override(argument)
    return None


def _in_quotes(text: str) -> str:
    """Put text in quotes, as Hydra's grammar wants them: backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)(\'|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
