"""The command line of every script but train.py, which is Hydra's: ``key=value`` options, help, exit codes."""

from __future__ import annotations

import dataclasses
import pkgutil
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from trainer.config.text import listed, unquoted
from trainer.errors import LARGEST, RunError, UserError, nearest, redacted
from trainer.parallel.world import launched_processes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
ONE_PROCESS = {"parallel": "each run has one process"}
"""For ``Overriding.fixed``; torchrun is refused, too."""


@dataclasses.dataclass
class Overriding:
    """Options of a script that also takes those of train.py. A subclass is imported without torch."""

    takes: ClassVar[Collection[str]] = ()
    """The keys, groups and flags of train.py's that have an effect; empty: all."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Keys and groups that have none, and why."""

    def commands(self, overrides: list[str]) -> Iterable[list[str]]:
        """Return the overrides of each config that the script composes."""
        from trainer.config.compose import combinations

        return combinations(overrides).values()

    def recorded(self) -> Mapping[str, Any] | None:
        """Return the options that they are composed on, see ``compose``."""
        return None


def run(
    main: Callable[[list[str]], int] | str,
    usage: str | None,
    arguments: Sequence[str] | None = None,
    *,
    options: str = "",
    continues: bool = False,
) -> int:
    """Run a script and return its exit code: that of ``main``, of a ``RunError``, or 130 for Ctrl-C and SIGTERM.

    Args:
        main: takes the arguments; or, where its imports take seconds, its name as ``module:function``, so that
            ``--help``, mistakes and Ctrl-C are answered at once.
        usage: what ``--help`` prints: the script's docstring.
        arguments: of the command line (default: ``sys.argv``).
        options: the class of the script's options, as ``module:class``.
        continues: whether the same command, run again, continues where it was interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(each.partition("=")[0] in ("-h", "--help") for each in given):
        print(usage)
        return 0
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # also into a file or a pipe
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options:
            from trainer.config.compose import check_overrides

            own, overrides = parse(given, pkgutil.resolve_name(options), "overrides")
            for command in own.commands(overrides) if isinstance(own, Overriding) else ():
                check_overrides(command, own.recorded())
        function = pkgutil.resolve_name(main) if isinstance(main, str) else main
        return function(given)
    except RunError as error:
        print(redacted(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted" + "; run the same command again to continue" * continues, file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def parse(
    arguments: Sequence[str],
    options: type[Options],
    others: Literal["none", "overrides", "paths"] = "none",
    **given: Any,
) -> tuple[Options, list[str]]:
    """Read ``key=value`` arguments into a dataclass; if a key is given twice, the last value counts.

    Args:
        arguments: of the command line.
        options: its fields are the keys, each of type str, Literal, Path, bool, int, float or list[str], and with a
            default. An int is at least 1, or at least 0 where that is the default.
        others: what else is allowed: nothing, overrides for train.py (``key=value`` with other keys), or paths.
        given: options that are not typed.

    Returns:
        The options, and the other arguments in their order.

    Raises:
        UserError: an option with dashes, an unknown key (of overrides: one that is near an option, or has no effect),
            a key without a value, or a value of another type.
    """
    types, defaults = get_type_hints(options), {entry.name: entry.default for entry in dataclasses.fields(options)}
    values, takes, rest = {}, getattr(options, "takes", ()), []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        name = key.lstrip("-").replace("-", "_")
        dashes = argument.startswith("-")
        if dashes and argument in takes:
            rest.append(argument)
        elif dashes and (name in defaults or others == "overrides"):
            raise UserError(f"{argument}: write {name}={text or '…'}, without dashes")
        elif equals and key in defaults:
            if not text:
                raise UserError(f"{key}= has no value; write {key}=…")
            values[key] = _value(key, unquoted(text), types[key], defaults[key])
        elif ((equals or key.startswith("~")) and others == "overrides") or (
            others == "paths" and not dashes and (not equals or Path(argument).exists())
        ):
            rest.append(argument)
        elif equals or dashes:
            raise UserError(f"{argument}: {name} is not an option{nearest(name, defaults)} ({', '.join(defaults)})")
        else:
            raise UserError(f"{argument!r} is not an option; write key=value")
    if "parallel" in getattr(options, "fixed", ()) and launched_processes():
        raise UserError("each run has one process; leave out torchrun")
    if others == "overrides":
        check_keys([each for each in rest if each not in takes], options)
    return options(**values | given), rest


def check_keys(overrides: list[str], options: type[Options]) -> None:
    """Refuse a key that training does not have and that is near one of the script, and one without an effect.

    Raises:
        UserError: there is one.
    """
    from trainer.config.explain import intended_key, known_options

    own = [*(entry.name for entry in dataclasses.fields(options)), *getattr(options, "takes", ())]
    known = {"experiment", *known_options()}
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        unknown = "." not in key and key not in known and intended_key(key) == key
        if unknown and (near := nearest(key, own)):
            raise UserError(f"{key} is not an option{near} ({', '.join(own)})")
        if why := without_effect(key, options):
            raise UserError(f"{override} has no effect{why}; leave it out")


def without_effect(key: str, options: type) -> str:
    """Return why a key of train.py's has no effect in the script that has these options; empty: it has one."""
    names, fixed = {key, key.partition(".")[0]}, getattr(options, "fixed", {})
    if why := [fixed[name] for name in names if name in fixed]:
        return f": {why[0]}"
    takes = getattr(options, "takes", ())
    return "" if not takes or names & {*takes} else " on a model that is trained"


def _value(key: str, text: str, wanted: Any, default: Any) -> Any:
    if get_origin(wanted) is Literal:
        if text not in (known := get_args(wanted)):
            raise UserError(f"{key}={text} is not one of {', '.join(known)}{nearest(text, known)}")
        return text
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{key}={text} must be true or false")
        return text.lower() == "true"
    if wanted is int:
        least = min(1, default)
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise UserError(f"{key}={text} must be a whole number of at least {least}")
        if len(text) > len(str(LARGEST)):
            raise UserError(f"{key}={text:.20} must be at most {LARGEST}")
        return int(text)
    if wanted is float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{key}={text} must be a number") from None
    return Path(text).expanduser() if wanted is Path else listed(text) if wanted == list[str] else text
