"""From ``key=value`` overrides to a config, for commands that need one, or several, without being Hydra's own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainer.config import outside
from trainer.config.explain import explain, intended_key, is_text
from trainer.config.recorded import base
from trainer.config.registration import CONF as CONF
from trainer.config.registration import by_key, check, choices
from trainer.config.text import unquoted
from trainer.errors import LARGEST, UserError

if TYPE_CHECKING:  # it takes torch, for which mistakes in the command line do not wait
    from trainer.config.schema import Config

_MULTIRUN = ("-m", "--multirun")
# Hydra's flags. Their values are not checked, because none begins with a dash.
_FLAGS = {
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package", "-r", "--run"),
    *(*_MULTIRUN, "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name"),
    *("-cd", "--config-dir", "--experimental-rerun", "-i", "--info"),
}


def compose(overrides: Sequence[str], recorded: Mapping[str, Any] | None = None) -> Config:
    """Return the config that scripts/train.py would train with these overrides.

    Args:
        overrides: of the command line.
        recorded: options of a run that take the place of the defaults, by dotted key; those of a group all together.

    Raises:
        UserError: one of them is a mistake.
    """
    with _explained():
        name, kept, overrides = base(checked_arguments(overrides), recorded)
        config = hydra.compose(name, overrides)
        check(config)  # without torch, which the next line imports
        from trainer.config.build import build

        return build(config, overrides, kept)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra makes of overrides, in which required options may be missing; it needs no torch.

    Raises:
        UserError: one of them is a mistake.
    """
    with _explained():
        name, _, overrides = base(checked_arguments(overrides))
        return hydra.compose(name, overrides)


def check_overrides(overrides: Sequence[str], recorded: Mapping[str, Any] | None = None) -> None:
    """Raise UserError where ``compose`` would, as far as that needs no torch."""
    with _explained():
        name, _, overrides = base(checked_arguments(overrides), recorded)
        check(hydra.compose(name, overrides))


@contextmanager
def _explained() -> Iterator[None]:
    """Let Hydra compose configs, and make one sentence of its errors."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # of scripts/train.py, in a run
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield
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
    parts: list[list[tuple[str, str]]] = []  # label and override
    for override in parsed:
        key = override.get_key_element()
        is_group = (CONF / key).is_dir()
        if override.is_sweep_override():
            values = map(str, override.sweep_string_iterator())
            parts.append([(value if is_group else f"{key}={value}", f"{key}={value}") for value in values])
        else:
            parts.append([("", str(override.input_line))])
    return {
        ", ".join(filter(None, (label for label, _ in combination))): [override for _, override in combination]
        for combination in itertools.product(*parts)
    }


def quoted(text: str) -> str:
    """Return text as Hydra reads it in an override, whatever it looks like."""
    return _in_quotes(text.replace("${", "\\${"))  # which OmegaConf would look up


def checked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line that Hydra's grammar can read: paths with other characters are quoted.

    Raises:
        UserError: an argument without a key, with dashes before the key, or a choice that is no name.
    """
    path = unquoted(by_key(arguments).get("recipe_path", "null"))
    outside.use(None if path == "null" else path)
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
        if typed.lstrip("+-").isdecimal() and len(typed) > 20:  # of some, Python refuses to make a number
            raise UserError(f"{key}={typed:.20}… must be at most {LARGEST}")
        override = _parsed(argument) if equals else None
        if override and (CONF / key).is_dir() and not isinstance(override.value(), str | Sweep):
            if not isinstance(override.value(), list):
                raise UserError(f"{key}={typed} is not a choice ({', '.join(choices(key))})")
            if key != "experiment":  # experiment=[one,two] is Hydra's way to take both
                raise UserError(
                    f"{key}={typed}: a run has one {key}; to run one after the other, add -m and no brackets"
                )
        named = argument.partition("=")[0]
        if is_tag := key.startswith("tags."):  # of which any can be set without a +
            named = f"++{key}"
        if key == "note" and typed != "null" and typed[:1] not in ("'", '"'):
            typed = quoted(typed)  # a sentence may have commas
        elif equals and not override and (is_tag or is_text(key)):
            typed = _in_quotes(typed)
        readable.append(f"{named}{equals}{typed}")
    return sorted(readable, key=lambda argument: argument not in _MULTIRUN)  # argparse wants flags first


def _parsed(argument: str) -> Override | None:
    """Return what Hydra's grammar makes of an argument; None: nothing."""
    with suppress(HydraException):
        return OverridesParser.create().parse_override(argument)
    return None


def _in_quotes(text: str) -> str:
    """Put text in quotes, as Hydra's grammar wants them: backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)(\'|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
