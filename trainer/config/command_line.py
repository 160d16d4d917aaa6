"""A command line of Hydra's, read once: what cannot be read or names no group and no choice is refused at once."""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    as_list,
    has_value,
    intended_key,
    known_options,
    meant,
    takes_list,
    types_of,
)
from trainer.config.registration import CONF, choices, key_of
from trainer.config.text import fraction, unquoted
from trainer.errors import UserError, most_like

_MULTIRUN = {"-m", "--multirun"}
_WITHOUT_EFFECT = {
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp"), "there is one config; choose with experiment=…"),
    **dict.fromkeys(("--config-dir", "-cd"), "recipe_path=… names a folder whose conf/ has choices of your own"),
    "--experimental-rerun": "resume continues a run, whose folder it takes",
}
"""Flags of Hydra's, and what to do instead."""
_ONE_OF = {
    **dict.fromkeys(("-m", "--multirun"), "-m"),
    **dict.fromkeys(("--run", "-r"), "--run"),
    **dict.fromkeys(("--cfg", "-c"), "--cfg"),
    **dict.fromkeys(("--info", "-i"), "--info"),
    **dict.fromkeys(("--shell-completion", "-sc"), "--shell-completion"),
}
"""Flags of Hydra's that exclude each other, by one name each."""
_ELSEWHERE = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir")
"""Where other programs of Hydra's write."""
_OWN = {"clip": "clip=norm clip.max_norm={0}", "ema": "ema=default ema.decay={0}", "loader": "loader.workers={0}"}
"""What to set where a number stands in the place of a choice."""


@dataclass(frozen=True)
class CommandLine:
    """A command line that Hydra's grammar can read."""

    arguments: list[str]
    """Flags first; paths with characters that the grammar has a meaning for are in quotes."""
    overrides: list[Override]
    """Those of the arguments that are no flags, parsed."""
    notes: list[str]
    """What was typed in vain."""

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
                if re.fullmatch(r"data\.\w+_column", key):
                    problem = f"{line}: one column is read; write several as one text, in a column of its own"
                    names = [f"{key}={unquoted(text)}" for text in override.sweep_string_iterator()]
                    raise UserError(problem, *names, mistake=shlex.quote(line))
                ours = key if choices(key) or types_of(key) else intended_key(key.rpartition(".")[2])
                if not choices(key) and takes_list(ours):
                    remedy = as_list(ours, line.partition("=")[2])
                    raise UserError(f"{line}: {ours} is a list", remedy, mistake=shlex.quote(line))
                remedies = [] if otherwise else [f"-m {shlex.quote(line)}"]
                if re.search(r"=\d+,\d+$", line) and types_of(key) & {"float", "float | None"}:
                    remedies.insert(0, line.replace(",", "."))
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
    notes: list[str] = []
    for previous, argument, following in zip(["", *arguments], arguments, [*arguments[1:], ""], strict=False):
        flag, _, text = argument.partition("=")
        if argument.startswith("-") and flag not in flags:
            raise _without_dashes(argument, following)
        if why := _WITHOUT_EFFECT.get(flag):
            words = [argument] if text else [argument, following]
            raise UserError(f"{argument} has no effect: {why}", "", mistake=shlex.join(words))
        if argument.startswith("-") or (previous.startswith("-") and "=" not in argument):  # a flag, or its value
            alone = argument in ("--info", "-i") and (following[:1] in ("", "-") or "=" in following)
            typed_flags.append("--info=all" if alone else argument)
            continue
        override = _parsed(argument)
        if override is None:
            argument = _quoted_text(argument, override)
            override = _parsed(argument)
        if override is not None and isinstance(value := override.value(), Glob | IntervalSweep):
            raise _no_values(override, value)
        if override is None or argument[:1] in ("=", "@"):
            raise UserError(f"{argument!r} is not an override; write key=value, without blanks, such as precision=bf16")
        if override.key_or_group in _ELSEWHERE:  # Hydra would make the folder
            notes.append(f"{argument} has no effect on where runs go; output_dir and run_name have")
            continue
        overrides.append(override)
    _check_flags(typed_flags, {override.key_or_group for override in overrides})
    # argparse wants flags first
    line = CommandLine([*typed_flags, *(str(each.input_line) for each in overrides)], overrides, notes)
    _merge_dotted_tags(line)
    _drop_repeats(line)
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
    typed, wrong = shlex.split(remedy), shlex.split(mistake)
    keys = set(map(key_of, (*typed, *wrong))) - {""}
    return [*(each for each in arguments if each not in wrong and key_of(each) not in keys), *typed]


def _without_dashes(argument: str, following: str) -> UserError:
    """Return what to write in the place of an option with dashes, whose value may be the next argument."""
    key, equals, typed = argument.partition("=")
    value = typed if equals else following if following[:1] != "-" and "=" not in following else ""
    words = [argument] if equals or not value else [argument, following]
    name = key.strip("-").replace("-", "_")
    problem = "options have no dashes" if name in known_options() else f"{name} is not a key of the config"
    return meant(name, value, f"{argument}: {problem}", shlex.join(words))


def _no_values(override: Override, value: Glob | IntervalSweep) -> UserError:
    """Return what to write in the place of ``glob(*)`` or ``interval(0,1)``, which say which values there may be."""
    key, line = override.key_or_group, str(override.input_line)
    if isinstance(value, Glob):
        return UserError(f"{line}: a sweep is of values, separated by commas", mistake=shlex.quote(line))
    ends = f"-m {key}={value.start:g},{value.end:g}"
    problem = f"{line} is an interval: scripts/search.py searches one that is given as space.{line}; a sweep has values"
    return UserError(problem, ends, mistake=shlex.quote(line))


def _check_flags(words: Sequence[str], keys: Collection[str]) -> None:
    """Raise UserError where flags of Hydra's exclude each other, or do nothing alone.

    Args:
        words: the flags and their values.
        keys: of those that are overrides.
    """
    given: dict[str, list[str]] = {}
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="-"):
        if word[:1] == "-":
            flag = word.partition("=")[0]
            given[_ONE_OF.get(flag, flag)] = [word] if following[:1] == "-" or "=" in following else [word, following]
    several = [flag for flag in dict.fromkeys(_ONE_OF.values()) if flag in given]  # the first is left out
    for flag in ("--resolve", "--package", "-p"):
        if flag in given and "--cfg" not in given:
            raise UserError(f"{flag} has no effect without --cfg", "", mistake=shlex.join(given[flag]))
    if len(several) > 1:
        why = ", which shows one run" if several[1] == "--cfg" else ""
        problem = f"{several[0]} cannot stand beside {several[1]}{why}"
        raise UserError(problem, "", mistake=shlex.join(given[several[0]]))
    if "--shell-completion" in given and not {"install", "uninstall", "query"}.intersection(keys):
        raise UserError("--shell-completion has no effect alone; write --shell-completion install=bash, or zsh, fish")


def _merge_dotted_tags(line: CommandLine) -> None:
    """Give Hydra tags with a dot in their names as one dictionary, where a dot is no level of the config."""
    dotted = [
        each for each in line.overrides if each.key_or_group.startswith("tags.") and each.key_or_group.count(".") > 1
    ]
    if not dotted:
        return
    tags = {each.key_or_group.removeprefix("tags."): str(each.input_line).partition("=")[2] for each in dotted}
    for each in dotted:
        line.arguments.remove(str(each.input_line))
        line.overrides.remove(each)
    text = ",".join(f"{name}:{_in_quotes(unquoted(value))}" for name, value in tags.items())
    merged = _parsed(f"tags={{{text}}}")
    assert merged is not None
    line.arguments.append(str(merged.input_line))
    line.overrides.append(merged)


def _drop_repeats(line: CommandLine) -> None:
    """Train a value once that a sweep names twice."""
    for number, override in enumerate(line.overrides):
        value = override.value()
        if not isinstance(value, ChoiceSweep):
            continue
        once = {str(each): text for each, text in zip(value.list, override.sweep_string_iterator(), strict=True)}
        if len(once) < len(value.list):
            typed = str(override.input_line)
            text = f"{typed.partition('=')[0]}={','.join(once.values())}"
            line.notes.append(f"{typed} has a value twice, which is trained once")
            line.arguments[line.arguments.index(typed)] = text
            line.overrides[number] = _parsed(text) or override


def _quoted_text(argument: str, override: Override | None) -> str:
    """Return an override with its text in quotes where the grammar would not read it as text."""
    named, equals, typed = argument.partition("=")
    key = named.lstrip("+")
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
        near = [] if head in OTHER_NAMES else difflib.get_close_matches(head, groups, n=1, cutoff=0.75)
        if near and head not in groups:
            value = typed.partition("=")[2]
            rest = key.removeprefix(head)
            fits = bool(rest) or {*value.split(",")} <= {*choices(near[0])}
            remedies = [shlex.quote(f"{near[0]}{rest}={value}")] if fits else []
            problem = f"{head} is not a key of the config; did you mean {near[0]!r}?"
            raise UserError(f"{problem}; --cfg job shows all of them", *remedies, mistake=shlex.quote(typed))
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
            if key in _OWN and fraction(name) is not None:
                raise UserError(problem, _OWN[key].format(name), mistake=shlex.quote(typed))
            others = dict.fromkeys(best if each == name else each for each in chosen)  # of a sweep the others stay
            remedy = f"{key}={','.join(others)}"
            if key == "data" and not difflib.get_close_matches(name, known, cutoff=0.75):
                best = ""
                problem += "; text, imagefolder and hub take data of one's own, by data.path or data.name"
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
