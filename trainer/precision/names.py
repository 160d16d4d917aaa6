"""Name patterns, with which options select modules and parameters: ``lm_head``, ``*.ln_*``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from trainer.errors import UserError, most_like


def matching(option: str, pattern: str, names: Collection[str], kind: str) -> set[str]:
    """Return the names that a pattern (of fnmatch) matches.

    These are whole dotted names: ``conv1`` is the first layer of a ResNet and no layer in its blocks. Where there is
    none, they are names that end so, after a dot: ``ln_1`` is ``transformer.h.0.ln_1`` and that of all other blocks.

    Args:
        option: the key that has the pattern, for the message.
        pattern: as typed.
        names: dotted names.
        kind: what they name, for the message.

    Raises:
        UserError: there is none; the message has a similar name.
    """
    whole = {name for name in names if fnmatchcase(name, pattern)}
    found = whole or {name for name in names if fnmatchcase(name, f"*.{pattern}")}
    if not found:
        # Ends with as many dots as the pattern has, since a pattern may be the end of a name.
        ends = [".".join(name.split(".")[-1 - pattern.count(".") :]) for name in names]
        near = most_like(pattern, [*names, *ends])
        # Else names that end alike but for a number: those of other blocks, or of blocks that are called otherwise.
        last = re.sub(r"\d+", "0", pattern.rpartition(".")[2])
        alike = [name for name in names if re.sub(r"\d+", "0", name.rpartition(".")[2]) == last]
        hint = f"similar: {near}" if near else f"examples of names: {', '.join((alike or [*names])[:4])}"
        raise UserError(f"{option}: {pattern!r} matches no {kind}; {hint}")
    return found


def typed(option: str, patterns: Mapping[str, str]) -> str:
    """Return the override of an option that has a word for each pattern, as it is typed in a shell."""
    return shlex.quote(override_of(option, patterns))


def override_of(option: str, patterns: Mapping[str, str]) -> str:
    """Return the override of an option that has a word for each pattern, as a program gets it."""
    return f"{option}={{{','.join(f'{key_of(pattern)}:{word}' for pattern, word in patterns.items())}}}"


def key_of(pattern: str) -> str:
    """Return a pattern as Hydra's grammar reads it as the key of a dictionary: it takes no quotes there."""
    return re.sub(r"[][(){}:=,\\]", r"\\\g<0>", pattern)
