"""A command line of Hydra's, read once: what cannot be read or names no group and no choice is refused at once."""

from __future__ import annotations

import difflib
import itertools
import logging
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Sweep
from hydra.errors import HydraException

from mantissa.names import format_name
from trainer.config import external_recipes
from trainer.config.explain import OTHER_NAMES, intended_key, types_of
from trainer.config.registration import CONF, choices, key_of
from trainer.config.text import fraction, unquoted
from trainer.errors import UserError, nearest

_MULTIRUN = {"-m", "--multirun"}
_WITHOUT_EFFECT = {
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp"), "there is one config; choose with experiment=…"),
    "--experimental-rerun": "continue a run with resume=FOLDER",
}
"""Flags of Hydra's, and what to do instead."""
_ELSEWHERE = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir")
"""Where other programs of Hydra's write."""
_OWN = {
    "clip": "clip=norm clip.max_norm={0}",
    "ema": "ema=default ema.decay={0}",
    "loader": "loader.workers={0}",
    "data": "data=text data.path=…, data=imagefolder data.path=… or data=hub data.name=…",
}
"""What to set where a number stands in the place of a choice, or data of one's own."""

log = logging.getLogger("mantissa")


@dataclass(frozen=True)
class CommandLine:
    """A command line that Hydra's grammar can read."""

    arguments: list[str]
    """Flags first; paths with characters that the grammar has a meaning for are in quotes."""
    overrides: list[Override]
    """Those of the arguments that are no flags, parsed."""

    @property
    def is_multirun(self) -> bool:
        """Whether it may start several runs."""
        return bool(_MULTIRUN & {*self.arguments}) or str(self.value("hydra.mode")) == "MULTIRUN"

    @property
    def swept_keys(self) -> list[str]:
        """Keys with several values, in their order; none without ``-m``."""
        swept = [override for override in self.overrides if self.is_multirun and override.is_sweep_override()]
        return list(dict.fromkeys(override.get_key_element().lstrip("+") for override in swept))

    def check_single(self, remedy: str) -> None:
        """Raise UserError where a key has several values; ``remedy`` says what to do."""
        for override in self.overrides:
            if override.is_sweep_override():
                line, key = str(override.input_line), override.key_or_group
                if re.fullmatch(r"data\.\w+_column", key):
                    problem = f"{line}: one column is read; write several as one text, in a column of its own"
                    names = [f"{key}={unquoted(text)}" for text in override.sweep_string_iterator()]
                    raise UserError(problem, *names, mistake=line)
                if re.search(r"=\d+,\d+$", line) and types_of(key) & {"float", "float | None"}:
                    remedy = f"write {line.replace(',', '.')}, or {remedy}"
                raise UserError(f"{line} has several values; {remedy}")

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default where it is not set or has several."""
        given = [each for each in self.overrides if each.key_or_group == key and not each.is_sweep_override()]
        return given[-1].value() if given else default


def read(arguments: Sequence[str]) -> CommandLine:
    """Read a command line; a folder that ``recipe_path`` names is used from now on.

    The names of groups and choices are compared with those in ``conf/`` before the classes of the options are imported,
    which takes seconds.

    Raises:
        UserError: an argument without a key, with dashes before the key, or a name that no group or choice has.
    """
    arguments = ["why=true" if argument == "--why" else argument for argument in arguments]
    flags = get_args_parser()._option_string_actions
    readable: list[str] = []
    overrides: list[Override] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("-") and argument.partition("=")[0] not in flags:
            raise UserError(_without_dashes(argument, following))
        if why := _WITHOUT_EFFECT.get(argument.partition("=")[0]):
            raise UserError(f"{argument} has no effect: {why}")
        is_value = "=" not in argument and readable[-1:] and readable[-1].startswith("-")
        if argument.startswith("-") or is_value:  # a flag, or its value
            readable.append(argument)
            continue
        override = _parsed(argument)
        if override is None:
            argument = _quoted_text(argument, override)
            override = _parsed(argument)
        if override is not None and isinstance(override.value(), Glob):
            raise UserError(f"{argument}: write the values, separated by commas")
        if override is None or argument[:1] in ("=", "@"):
            raise UserError(f"{argument!r} is not an override; write key=value, without blanks, such as precision=bf16")
        if override.key_or_group in _ELSEWHERE:  # Hydra would make the folder
            log.warning("%s has no effect on where runs go; set output_dir=… and run_name=…", argument)
            continue
        readable.append(argument)
        overrides.append(override)
    # argparse wants flags first
    line = CommandLine(sorted(readable, key=lambda argument: argument not in _MULTIRUN), overrides)
    external_recipes.use_folder(line.value("recipe_path"))
    for override in overrides:
        _check_names(override)
    for number, override in enumerate(overrides):  # after the names, as it imports the classes of the options
        key, typed = override.key_or_group, str(override.input_line)
        if key == "note" or key.startswith("tags.") or _is_misread(override):
            line.arguments[line.arguments.index(typed)] = text = _quoted_text(typed, override)
            overrides[number] = _parsed(text) or override
    return line


def remedied(arguments: Sequence[str], remedy: str, mistake: str) -> list[str]:
    """Return a command line with a remedy of a ``UserError`` in the place of the mistake and of the same keys."""
    typed = shlex.split(remedy)
    keys = set(map(key_of, [*typed, *shlex.split(mistake)]))
    return [*(each for each in arguments if key_of(each) not in keys), *typed]


def _without_dashes(argument: str, following: str) -> str:
    """Return what to write in the place of an option with dashes, whose value may be the next argument."""
    key, equals, typed = argument.partition("=")
    if key in ("--local-rank", "--local_rank"):
        return f"{argument} is from torch.distributed.launch; use torchrun in its place, with the same options"
    value = typed if equals else following if following[:1] != "-" and "=" not in following else ""
    ours = intended_key(key.strip("-").replace("-", "_"))
    ours += "" if "=" in ours else f"={value or '…'}"
    return f"{argument}: write {ours}, without dashes"


def _quoted_text(argument: str, override: Override | None) -> str:
    """Return an override with its text in quotes where the grammar would not read it as text."""
    named, equals, typed = argument.partition("=")
    key = named.lstrip("+")
    if is_tag := key.startswith("tags."):  # of which any can be set without a +
        named = f"++{key}"
    if key == "note" and typed != "null" and typed[:1] not in ("'", '"'):
        typed = quoted(typed)  # a sentence may have commas
    elif equals and (override is None or _is_misread(override)) and (is_tag or types_of(key) & {"str", "str | None"}):
        texts = [typed] if override is None else typed.split(",")
        typed = ",".join(text if text == "null" else _in_quotes(text) for text in texts)
    elif types_of(key) & {"int", "int | None", "int | str"}:  # which OmegaConf reads from digits alone
        typed = ",".join(f"{float(text):.0f}" if _WHOLE.fullmatch(text) else text for text in typed.split(","))
    return f"{named}{equals}{typed}"


def _is_misread(override: Override) -> bool:
    """Return whether Hydra reads a number or truth value, and would write it in another way: ``1e5``, ``007``."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    typed = (override.input_line or "").partition("=")[2].split(",")
    return len(values) == len(typed) and any(
        isinstance(each, int | float) and (str(each) != text or text.endswith(".0"))
        for each, text in zip(values, typed, strict=True)
    )


def _check_names(override: Override) -> None:
    """Refuse a key that is nearly a group's name, and a choice that its group does not have."""
    key, groups = override.key_or_group, {path.name for path in CONF.iterdir() if path.is_dir()}
    if override.is_delete() and "." not in key:
        raise UserError(f"~{key}: it cannot be removed; set {key}={'|'.join(choices(key)) or '…'}, or leave it out")
    if key not in groups:
        head, _, rest = key.partition(".")
        if head in ("trainer", "training", "train", "args"):  # as other trainers write
            raise UserError(f"{key} is not a key of the config; did you mean {intended_key(rest)!r}?")
        near = [] if head in (*groups, *OTHER_NAMES) else difflib.get_close_matches(head, groups, n=1, cutoff=0.75)
        if near:
            raise UserError(
                f"{head} is not a key of the config; did you mean {near[0]!r}?; --cfg job shows all of them"
            )
        return
    if override.is_add():
        raise UserError(f"{key} already has a value; set it with {key}=…, without the +")
    known, value = choices(key), override.value()
    if isinstance(value, list) and key != "experiment":  # of which Hydra takes several
        raise UserError(
            f"{override.input_line}: a run has one {key}; to run one after the other, add -m and no brackets"
        )
    if isinstance(value, ChoiceSweep):
        chosen = [unquoted(text) for text in override.sweep_string_iterator()]
    elif isinstance(value, Sweep):
        chosen = []
    else:
        chosen = [*map(str, value)] if isinstance(value, list) else ["null" if value is None else str(value)]
    for name in chosen:
        if name not in known and not (key == "recipe" and _may_be_a_class(name)):
            is_near = fraction(name) is None if key != "data" else difflib.get_close_matches(name, known, cutoff=0.75)
            if key in _OWN and not is_near:
                raise UserError(f"{key}={name} is not a choice ({', '.join(known)}): write {_OWN[key].format(name)}")
            meant = format_name(name) if key == "precision" else name
            raise UserError(f"{key}={name} is not a choice{nearest(meant, known)} ({', '.join(known)})")


def _may_be_a_class(name: str) -> bool:
    """Return whether a recipe without a YAML may have this name: a file of recipes then has it in quotes."""
    files = [*(CONF.parent / "recipes").rglob("*.py"), *external_recipes.find_modules().values()]
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return name == "own" or any(f'"{name}"' in text or f"'{name}'" in text for text in texts)


def value_of(argument: str) -> Any:
    """Return the value of an override, without its quotes; None: the grammar cannot read it."""
    override = _parsed(argument)
    return None if override is None else override.value()


def _parsed(argument: str) -> Override | None:
    """Return what Hydra's grammar makes of an argument; None: nothing."""
    with suppress(HydraException):
        return OverridesParser.create().parse_override(argument)
    return None


_WHOLE = re.compile(r"\d[\d_]*(\.0*)?(e\+?\d+)?", re.IGNORECASE)
_PLAIN = re.compile(r"[\w./-]+")


def as_typed(text: str) -> str:
    """Return text as it stands in an override: in quotes where Hydra could read something else, such as a number."""
    override = _parsed(f"key={text}") if _PLAIN.fullmatch(text) else None
    return text if override is not None and override.value() == text else quoted(text)


def quoted(text: str) -> str:
    """Return text as Hydra reads it in an override, whatever it looks like."""
    return _in_quotes(text.replace("${", "\\${"))  # which OmegaConf would look up


def _in_quotes(text: str) -> str:
    """Put text in quotes, as Hydra's grammar wants them: backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)(\'|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
