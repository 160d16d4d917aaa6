"""A command line of Hydra's, read once: what cannot be read or names no group and no choice is refused at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, Sweep
from hydra.errors import HydraException

from mantissa.names import format_name
from trainer.config import external_recipes
from trainer.config.explain import (
    OTHER_GROUPS,
    OTHER_NAMES,
    has_value,
    intended_key,
    meant,
    shown_by,
    takes_list,
    types_of,
)
from trainer.config.registration import CONF, PATTERNS, choices, key_of
from trainer.config.text import unquoted
from trainer.errors import UserError, most_like, no_effect
from trainer.precision.names import typed as typed_patterns
from trainer.run_folder import check_path

_MULTIRUN = {"-m", "--multirun"}
_ALONE = {*_MULTIRUN, "--run", "-r", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_WITH_CFG = {"--resolve", "--package", "-p"}
_BY_NAME = "precision.modules."
_WITHOUT_EFFECT = {
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp"), "there is one config; choose with experiment=…"),
    **dict.fromkeys(("--config-dir", "-cd"), "recipe_path=… names a folder whose conf/ has choices of your own"),
    "--experimental-rerun": "resume continues a run, whose folder it takes",
    **dict.fromkeys(
        ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir"),
        "output_dir and run_name say where runs go",
    ),
}
"""Flags and keys of Hydra's, and what to do instead."""


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

    def check_single(self, otherwise: str = "") -> None:
        """Raise UserError where a key has several values; ``otherwise`` says what to do where there is no ``-m``."""
        for override in self.overrides:
            if override.is_sweep_override():
                line, key = str(override.input_line), override.key_or_group
                ours = key if choices(key) or types_of(key) else intended_key(key.rpartition(".")[2])
                if not choices(key) and takes_list(ours):
                    remedy = shlex.quote(f"{ours}=[{line.partition('=')[2]}]")
                    raise UserError(f"{line}: {ours} is a list", remedy, mistake=shlex.quote(line))
                remedies = [] if otherwise else [f"-m {shlex.quote(line)}"]
                if "float" in types_of(ours) and re.search(r"=\d+,\d+$", line):  # a decimal comma
                    remedies = [line.replace(",", ".")]
                said = f"; {otherwise}" if otherwise else ", and -m runs one after the other"
                raise UserError(f"{line} has several values{said}", *remedies, mistake=shlex.quote(line))

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
    typed_flags: list[str] = []  # and their values
    overrides: list[Override] = []
    for previous, argument, following in zip(["", *arguments], arguments, [*arguments[1:], ""], strict=False):
        flag, _, text = argument.partition("=")
        if argument.startswith("-") and flag not in flags:
            raise without_dashes(argument, following)
        if why := _WITHOUT_EFFECT.get(flag.lstrip("+")):
            words = [argument] if text else [argument, following]
            raise no_effect(argument, why, mistake=shlex.join(words))
        if argument.startswith("-") or (previous.startswith("-") and "=" not in argument):  # a flag, or its value
            alone = argument in ("--info", "-i") and (following[:1] in ("", "-") or "=" in following)
            typed_flags.append("--info=all" if alone else argument)
            continue
        check_path(flag.lstrip("+"), text)
        if "." in flag.lstrip("+").removeprefix(_BY_NAME) and flag.lstrip("+").startswith(_BY_NAME):
            below = [each for each in arguments if each.lstrip("+").startswith(_BY_NAME) and "=" in each]
            pairs = (each.lstrip("+").removeprefix(_BY_NAME).split("=", 1) for each in below)
            problem = f"{argument}: dots in the name of a module would be those of keys; patterns are typed in braces"
            raise UserError(problem, typed_patterns(_BY_NAME[:-1], dict(pairs)), mistake=shlex.join(below))
        override = _parsed(argument)
        if override is None and flag.lstrip("+") in PATTERNS and (listed := re.findall(r"\[[^]{]*,[^]{]*\]", text)):
            without = text
            for each in listed:
                without = without.replace(each, each.replace(",", "").replace(" ", ""))
            problem = f"{argument}: in a pattern, brackets hold characters without commas, as in h.[03]"
            raise UserError(problem, shlex.quote(f"{flag}={without}"), mistake=shlex.quote(argument))
        if override is None:
            argument = _quoted_text(argument, override)
            override = _parsed(argument)
        if override is not None and isinstance(override.value(), Glob | IntervalSweep):
            problem = (
                f"{override.input_line}: a sweep is of values, separated by commas (scripts/search.py: an interval)"
            )
            raise UserError(problem)
        if flag.lstrip("+").startswith("tags.") and flag.count(".") > 1:
            raise UserError(f"{argument}: the name of a tag has no dot")
        if override is None and (bracketed := re.fullmatch(r"([^=]+)=\((.*)\)", argument)):
            ours = bracketed[1] if types_of(bracketed[1]) else intended_key(bracketed[1].rpartition(".")[2])
            remedy = shlex.quote(f"{ours}=[{bracketed[2]}]")
            raise UserError(f"{argument}: a list is in square brackets", remedy, mistake=shlex.quote(argument))
        if (file := Path(argument.lstrip("@"))).suffix in (".yaml", ".yml") and file.is_file():
            how = f"as conf/experiment/{file.stem}.yaml of a folder it is experiment={file.stem} recipe_path=FOLDER"
            raise UserError(f"{argument} is no override: {how}; see docs/configure.md")
        if override is None or argument[:1] in ("=", "@"):
            raise UserError(f"{argument!r} is not an override; write key=value, without blanks, such as precision=bf16")
        overrides.append(override)
    given = {word.partition("=")[0] for word in typed_flags}
    if len(given & _ALONE) > 1 or (given & _WITH_CFG and not given & {"--cfg", "-c"}):
        raise UserError(f"{' '.join(typed_flags)}: -m, --run, --cfg and --info stand alone, --resolve beside --cfg")
    # argparse wants flags first
    line = CommandLine([*typed_flags, *(str(each.input_line) for each in overrides)], overrides)
    external_recipes.use_folder(line.value("recipe_path"))
    for override in overrides:
        _check_names(override)
    for number, override in enumerate(overrides):  # after the names, as it imports the classes of the options
        key, typed = override.key_or_group, str(override.input_line)
        if key == "note" or key.startswith("tags.") or key in PATTERNS or _is_misread(override):
            line.arguments[line.arguments.index(typed)] = text = _quoted_text(typed, override)
            overrides[number] = _parsed(text) or override
    return line


def remedied(arguments: Sequence[str], remedy: str, mistake: str) -> list[str]:
    """Return a command line with a remedy of a ``UserError`` in the place of the mistake and of the same keys."""
    typed, wrong = shlex.split(remedy), shlex.split(mistake)
    keys = set(map(key_of, (*typed, *wrong))) - {""}
    return [*(each for each in arguments if each not in wrong and key_of(each) not in keys), *typed]


def without_dashes(argument: str, following: str, own: Collection[str] = ()) -> UserError:
    """Return what to write in the place of an option with dashes, whose value may be the next argument.

    Args:
        argument: with dashes.
        following: the next one.
        own: options of the script, beside those of train.py.
    """
    key, equals, typed = argument.partition("=")
    value = typed if equals else following if following[:1] != "-" and "=" not in following else ""
    wrong = shlex.join([argument] if equals or not value else [argument, following])
    name, problem = key.strip("-").replace("-", "_"), f"{argument}: options have no dashes"
    if name in own:
        return UserError(problem, *([shlex.quote(f"{name}={value}")] if value else []), mistake=wrong)
    return meant(name, value, problem, wrong)


def _quoted_text(argument: str, override: Override | None) -> str:
    """Return an override with its text in quotes where the grammar would not read it as text."""
    named, equals, typed = argument.partition("=")
    key = named.lstrip("+")
    if key in PATTERNS:
        return re.sub(r"(?<=[{,])[^{}:,]+(?=:)", _as_pattern, argument)
    if key == "note" and typed != "null" and typed[:1] not in ("'", '"'):
        typed = quoted(typed)  # a sentence may have commas
    elif (
        equals
        and (override is None or _is_misread(override))
        and (key.startswith("tags.") or types_of(key) & {"str", "str | None"})
    ):
        texts = [typed] if override is None else typed.split(",")
        typed = ",".join(text if text == "null" else _in_quotes(text) for text in texts)
    elif types_of(key) & {"int", "int | None", "int | str"}:  # which OmegaConf reads from digits alone
        typed = ",".join(f"{float(text):.0f}" if _WHOLE.fullmatch(text) else text for text in typed.split(","))
    return f"{named}{equals}{typed}"


def _as_pattern(found: re.Match[str]) -> str:
    """Return the key of a dictionary as the grammar reads it as a name pattern, which takes no quotes there.

    Brackets need a backslash. What it would read as a number, such as 0.10, gets its first character in brackets.
    """
    key = re.sub(r"(?<!\\)[][]", r"\\\g<0>", found[0].strip())
    value = value_of(f"key={{{key}:0}}")
    return key if value is None or isinstance(next(iter(value)), str) else f"\\[{key[0]}\\]{key[1:]}"


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
    typed = str(override.input_line)
    if override.is_delete() and "." not in key:
        none = [f"{key}=none"] if "none" in choices(key) else []
        raise UserError(f"{typed}: an option cannot be removed", *none, "", mistake=typed)
    if key not in groups:
        head, dot, _ = key.partition(".")
        if dot and head in OTHER_GROUPS and head not in groups:
            raise meant(key, typed.partition("=")[2], f"{key} is not a key of the config", shlex.quote(typed))
        near = "" if head in OTHER_NAMES else most_like(head, groups)
        if near and head not in groups:
            remedy = shlex.quote(typed.replace(head, near, 1))
            raise UserError(
                f"{head} is not a key of the config ({shown_by()} shows all)", remedy, mistake=shlex.quote(typed)
            )
        return
    if override.is_add():
        raise has_value(key, typed.lstrip("+"))
    known, value = choices(key), override.value()
    if isinstance(value, list) and key != "experiment":  # of which Hydra takes several
        several = f"-m {key}={','.join(map(str, value))}"
        raise UserError(f"{typed}: a run has one {key}; -m runs one after the other", several, mistake=typed)
    if isinstance(value, ChoiceSweep):
        chosen = [unquoted(text) for text in override.sweep_string_iterator()]
    elif isinstance(value, Sweep):
        chosen = []
    else:
        chosen = [*map(str, value)] if isinstance(value, list) else ["null" if value is None else str(value)]
    for name in chosen:
        if name not in known and not (key == "recipe" and _may_be_a_class(name)):
            meaning = format_name(name) if key == "precision" else name
            best, problem = most_like(meaning, known), f"{key}={name} is not a choice ({', '.join(known)})"
            others = dict.fromkeys(best if each == name else each for each in chosen)  # of a sweep the others stay
            remedy = f"{key}={','.join(others)}"
            raise UserError(problem, *([remedy] if best else []), mistake=shlex.quote(typed))


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
