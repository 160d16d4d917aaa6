"""The command line of every script but train.py, which is Hydra's: ``key=value`` options, help, exit codes."""

from __future__ import annotations

import dataclasses
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

from trainer.errors import LARGEST, RunError, UserError, nearest, redacted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def run(
    main: Callable[[list[str]], int] | str,
    usage: str | None,
    arguments: Sequence[str] | None = None,
    *,
    continues: bool = False,
) -> int:
    """Run a script and return its exit code: that of ``main``, of a ``RunError``, or 130 for Ctrl-C and SIGTERM.

    Args:
        main: takes the arguments; or, where its imports take seconds, its name as ``module:function``, so that
            ``--help`` and Ctrl-C are answered at once.
        usage: what ``--help`` prints: the script's docstring.
        arguments: of the command line (default: ``sys.argv``).
        continues: whether the same command, run again, continues where it was interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(usage)
        return 0
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # also into a file or a pipe
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
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
    arguments: Sequence[str], options: type[Options], others: Literal["none", "overrides", "paths"] = "none"
) -> tuple[Options, list[str]]:
    """Read ``key=value`` arguments into a dataclass; if a key is given twice, the last value counts.

    Args:
        arguments: of the command line.
        options: its fields are the keys, each of type str, Path, bool, int, float or list[str], with a default. An int
            is at least 1, or at least 0 where that is the default.
        others: what else is allowed: nothing, overrides for train.py (``key=value`` with other keys), or paths.

    Returns:
        The options, and the other arguments in their order.

    Raises:
        UserError: an option with dashes, an unknown key (of overrides: one that is near an option), a key without a
            value, or a value of another type.
    """
    types, defaults = get_type_hints(options), {entry.name: entry.default for entry in dataclasses.fields(options)}
    values: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        name = key.lstrip("-").replace("-", "_")
        dashes = argument.startswith("-")
        if dashes and (name in defaults or others == "overrides"):
            raise UserError(f"{argument}: write {name}={text or '…'}, without dashes")
        if equals and key in defaults:
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
    if others == "overrides":
        _refuse_misspelt(rest, list(defaults))
    return options(**values), rest


def _refuse_misspelt(overrides: list[str], own: list[str]) -> None:
    """Refuse a key that training does not have and that is near an option of the script."""
    from trainer.config.explain import intended_key  # takes seconds, for which --help does not wait
    from trainer.config.schema import Config

    known = {"experiment", *(entry.name for entry in dataclasses.fields(Config))}
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        unknown = "." not in key and key not in known and intended_key(key) == key
        if unknown and (near := nearest(key, own)):
            raise UserError(f"{key} is not an option{near} ({', '.join(own)})")


def _value(key: str, text: str, wanted: Any, default: Any) -> Any:
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


def listed(text: str) -> list[str]:
    """Return the items of ``a,b`` or ``[a,b]``."""
    return [item.strip() for item in text.strip().removeprefix("[").removesuffix("]").split(",") if item.strip()]


def unquoted(text: str) -> str:
    """Return a value without the quotes around it that Hydra's grammar allows."""
    quoted = len(text) > 1 and text[0] in "\"'" and text.find(text[0], 1) == len(text) - 1
    return text[1:-1] if quoted else text


def fraction(text: str) -> float | None:
    """Return the number that ``0.05`` or ``5%`` means; None: neither."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
