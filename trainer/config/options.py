"""The options of scripts that are not Hydra's: ``key=value``, as train.py takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import UserError, nearest


def parse(arguments: Sequence[str], defaults: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the options by key, and the arguments that are none (names of files and folders).

    Raises:
        UserError: an option in the form ``--key value``, an unknown key, or a key without a value.

    """
    options, others = dict(defaults), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-"):
            name = key.lstrip("-").replace("-", "_")
            if name in defaults:
                raise UserError(f"{argument}: write {name}={value or '…'}, without dashes")
            raise UserError(f"{argument} is no option here{nearest(name, defaults)} ({', '.join(defaults)})")
        if key in defaults and equals:
            if not value:
                raise UserError(f"{key}= has no value; leave it out for the default")
            options[key] = value
        elif equals and not Path(argument).exists():
            raise UserError(f"{argument}: {key} is no option here{nearest(key, defaults)} ({', '.join(defaults)})")
        else:
            others.append(argument)
    return options, others


def whole_number(options: Mapping[str, str], key: str) -> int:
    """Return an option that is a number of at least 1. Raises UserError for any other."""
    value = options[key]
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise UserError(f"{key}={value} must be a whole number of at least 1")
    return int(value)


def no_more(others: Sequence[str]) -> None:
    """Refuse arguments that are no options. Raises UserError."""
    if others:
        raise UserError(f"{others[0]!r} is not an option; write key=value")
