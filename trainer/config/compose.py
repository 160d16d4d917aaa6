"""From ``key=value`` overrides to a config, for commands that need one, or several, without being Hydra's own."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainer.config import external_recipes
from trainer.config.explain import explain, intended_key, is_text
from trainer.config.recorded import base
from trainer.config.registration import CONF as CONF
from trainer.config.registration import by_key, check, choices
from trainer.config.text import unquoted
from trainer.errors import UserError, nearest

if TYPE_CHECKING:  # it takes torch, for which mistakes in the command line do not wait
    from trainer.config.schema import Config

_MULTIRUN = ("-m", "--multirun")


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

    What can be read is compared with the names in ``conf/`` before the classes of the options are imported, which takes
    seconds.

    Raises:
        UserError: an argument without a key, with dashes before the key, or a name that no group or choice has.
    """
    flags = get_args_parser()._option_string_actions
    path = unquoted(by_key(arguments).get("recipe_path", "null"))
    external_recipes.use_folder(None if path == "null" else path)
    readable = []
    for number, argument in enumerate(arguments):
        key, equals, typed = argument.lstrip("+").partition("=")
        if argument[:1] in ("=", "@"):
            raise UserError(f"{argument!r} is not an override; write key=value, such as steps=100 or precision=bf16")
        if argument.startswith("-") and argument.partition("=")[0] not in flags:
            following = "".join(arguments[number + 1 : number + 2])
            value = typed if equals else following if following[:1] != "-" and "=" not in following else ""
            raise UserError(
                f"{argument}: write {intended_key(key.strip('-').replace('-', '_'))}={value or '…'}, without dashes"
            )
        override = _parsed(argument) if equals else None
        if override:
            _check_names(override)
        named = argument.partition("=")[0]
        if is_tag := key.startswith("tags."):  # of which any can be set without a +
            named = f"++{key}"
        if key == "note" and typed != "null" and typed[:1] not in ("'", '"'):
            typed = quoted(typed)  # a sentence may have commas
        elif equals and not override and (is_tag or is_text(key)):
            typed = _in_quotes(typed)
        readable.append(f"{named}{equals}{typed}")
    return sorted(readable, key=lambda argument: argument not in _MULTIRUN)  # argparse wants flags first


def _check_names(override: Override) -> None:
    """Refuse a key that is nearly a group's name, and a choice that its group does not have."""
    key, groups = override.key_or_group, {path.name for path in CONF.iterdir() if path.is_dir()}
    if key not in groups:
        head = key.partition(".")[0]
        near = [] if head in groups else difflib.get_close_matches(head, groups, n=1, cutoff=0.75)
        if near:
            raise UserError(
                f"{head} is not a key of the config; did you mean {near[0]!r}?; --cfg job shows all of them"
            )
        return
    known, value = choices(key), override.value()
    if isinstance(value, ChoiceSweep):
        chosen = [unquoted(text) for text in override.sweep_string_iterator()]
    elif isinstance(value, list) and key == "experiment":  # Hydra's way to take several
        chosen = [*map(str, value)]
    elif isinstance(value, list):
        raise UserError(
            f"{override.input_line}: a run has one {key}; to run one after the other, add -m and no brackets"
        )
    else:
        chosen = [] if value is None or isinstance(value, Sweep) else [str(value)]
    if key == "recipe":  # one may be a class without a YAML, which is not imported here
        chosen = [name for name in chosen if name != "own" and not external_recipes.find_modules()]
    for name in chosen:
        if name not in known:
            raise UserError(f"{key}={name} is not a choice{nearest(name, known)} ({', '.join(known)})")


def _parsed(argument: str) -> Override | None:
    """Return what Hydra's grammar makes of an argument; None: nothing."""
    with suppress(HydraException):
        return OverridesParser.create().parse_override(argument)
    return None


def _in_quotes(text: str) -> str:
    """Put text in quotes, as Hydra's grammar wants them: backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)(\'|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
