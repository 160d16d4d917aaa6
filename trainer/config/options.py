"""The command line of every script but train.py, which is Hydra's: ``key=value`` options, help, exit codes."""

from __future__ import annotations

import dataclasses
import itertools
import pkgutil
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from mantissa.errors import UsageError, refusal
from trainer.config.text import listed, make_printable, say, unquoted, values_of
from trainer.errors import RunError, UserError, most_like, no_effect, redacted
from trainer.parallel.world import UNSET, check_launch, launched_processes
from trainer.run_folder import check_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
ONE_PROCESS = {"parallel": "each run has one process"}
"""For ``Overriding.fixed``."""


@dataclasses.dataclass
class Overriding:
    """Options of a script that also takes those of train.py."""

    takes: ClassVar[Collection[str]] = ()
    """The keys and groups of train.py's that have an effect; empty: all."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Keys and groups that have none, and why."""
    positional: ClassVar[str] = ""
    """The option that may be given without its key."""


def run(
    main: Callable[[list[str]], int] | str,
    usage: str | None,
    arguments: Sequence[str] | None = None,
    *,
    continues: bool = False,
    bare: bool = False,
) -> int:
    """Run a script and return its exit code: that of ``main`` or of an error, or 130 for Ctrl-C and SIGTERM.

    Under torchrun every process would do the same, and write the same files: that is an error.

    Args:
        main: takes the arguments; or, where its imports take seconds, its name as ``module:function``, so that
            ``--help`` and Ctrl-C are answered at once.
        usage: what ``--help`` prints: the script's docstring.
        arguments: of the command line (default: ``sys.argv``).
        bare: whether it does something without arguments; else it then prints its usage, and the exit code is 2.
        continues: whether the same command goes on where Ctrl-C stopped it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    make_printable()
    if any(argument.partition("=")[0] in ("-h", "--help") for argument in given):
        print(usage)
        return 0
    if not given and usage and not bare:
        say(usage, end="")
        return 2
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_launch()
        if launched_processes():
            raise UserError(f"only train.py takes several processes; leave out torchrun, or, {UNSET}")
        if isinstance(main, str) and "torch" not in sys.modules:
            say("loading torch and the recipes …")
        function = pkgutil.resolve_name(main) if isinstance(main, str) else main
        return function(given)
    except (RunError, UsageError, OSError) as error:
        if isinstance(error, OSError) and not refusal(error):
            raise
        return report(error)
    except KeyboardInterrupt:
        say("\ninterrupted" + "; run the same command again to continue" * continues)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def report(error: RunError | UsageError | OSError) -> int:
    """Print an error in one sentence, and return its exit code."""
    say(redacted(f"error: {refusal(error) or error}"))
    return getattr(error, "exit_code", 2)


def parse(
    arguments: Sequence[str],
    options: type[Options],
    others: Literal["none", "overrides", "paths"] = "none",
    **given: Any,
) -> tuple[Options, list[str]]:
    """Read ``key=value`` arguments into a dataclass.

    Args:
        arguments: of the command line.
        options: its fields are the keys, each of type str, Path, bool, int, float or list[str], and with a default. An
            int is at least 1, or at least 0 where that is the default.
        others: what else is allowed: nothing, overrides for train.py (``key=value`` with other keys), or paths.
        given: options that are not typed.

    Returns:
        The options, and the other arguments in their order.

    Raises:
        UserError: an option with dashes, an unknown key (of overrides: one that is near an option, or has no effect),
            a key without a value, a value of another type, or an option that is typed twice.
    """
    names = [entry.name for entry in dataclasses.fields(options)]
    values: dict[str, Any] = {}
    rest = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        key, equals, text = argument.partition("=")
        name = key.lstrip("-").replace("-", "_")
        dashes = argument.startswith("-")
        if argument in ("-m", "--multirun") and others == "overrides":
            raise UserError(f"{argument} is for train.py alone", "", mistake=argument)
        if dashes and (name in names or others == "overrides"):
            from trainer.config.command_line import without_dashes

            raise without_dashes(argument, following, names)
        if equals and key in names:
            if not text:
                raise UserError(f"{key}= has no value; write {key}=…")
            if key in values:
                typed = [each for each in arguments if each.startswith(f"{key}=") or each == values[key]]
                remedies = [shlex.quote(each) for each in dict.fromkeys(typed) if each.startswith(f"{key}=")]
                raise UserError(f"{key} is typed twice, and takes one value", *remedies, mistake=shlex.join(typed))
            values[key] = _value(options, key, unquoted(text))
        elif ((equals or key.startswith("~")) and others == "overrides") or (
            others == "paths" and not dashes and (not equals or Path(argument).exists())
        ):
            rest.append(argument)
        elif not equals and not dashes and (own := getattr(options, "positional", "")) and own not in values:
            values[own] = argument
        elif equals or dashes:
            near = most_like(name, names)
            remedies = [f"{near}={shlex.quote(text)}"] if near and text else []
            raise UserError(f"{argument}: {name} is not an option ({', '.join(names)})", *remedies, mistake=argument)
        else:
            own = f" ({', '.join(names)})" if names else ""
            raise UserError(f"{argument!r} is not an option{own}; write key=value")
    for key, value in (values | given).items():
        check_path(key, str(value))
    if others == "overrides":
        check_keys(rest, options)
    return options(**values | given), rest


def check_keys(overrides: list[str], options: type[Options]) -> None:
    """Refuse a key that training does not have and that is near one of the script, and one without an effect.

    Raises:
        UserError: there is one.
    """
    from trainer.config.explain import intended_key, known_options
    from trainer.config.registration import key_of

    takes, fixed = getattr(options, "takes", ()), getattr(options, "fixed", {})
    own = [*(entry.name for entry in dataclasses.fields(options)), *takes]
    known = {"experiment", *known_options()}
    for override in overrides:
        key = key_of(override)
        meant = intended_key(key).partition("=")[0]
        group = meant.partition(".")[0]
        unknown = "." not in key and key not in known and meant == key
        near = most_like(key, own)
        typed = shlex.quote(override)
        if unknown and (near or takes):
            remedies = [f"{near}={shlex.quote(override.partition('=')[2])}"] if near else []
            raise UserError(f"{key} is not an option ({', '.join(own)})", *remedies, mistake=typed)
        if why := fixed.get(meant) or fixed.get(group):
            raise no_effect(override, why, mistake=typed)
        if takes and not {key, group} & {*takes}:
            raise no_effect(override, "the model is trained", mistake=typed)


def _value(options: type[Options], key: str, text: str) -> Any:
    """Return the value that a text means for the type of the field ``key``."""
    wanted, typed = get_type_hints(options)[key], OmegaConf.structured(options)
    if wanted is Path:
        return Path(text).expanduser()
    if wanted == list[str]:
        return listed(text)
    if wanted is str:  # OmegaConf would look up the ${…} in it
        return text
    least = min(1, typed[key]) if wanted is int else None
    try:
        typed[key] = text
    except ValidationError as error:
        raise UserError(f"{key}={text} must be {values_of(wanted.__name__)}") from error
    if least is not None and typed[key] < least:
        raise UserError(f"{key}={text} must be a whole number of at least {least}")
    return typed[key]
