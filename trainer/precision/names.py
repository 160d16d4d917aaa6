"""Name patterns, with which options select modules and parameters: ``lm_head``, ``*.ln_*``."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

from trainer.errors import UserError


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern (of fnmatch) matches a dotted name, or its end after a dot: ``ln_1`` is ``h.0.ln_1``."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def matching(option: str, pattern: str, names: Collection[str], kind: str) -> set[str]:
    """Return the names that a pattern matches.

    Args:
        option: the key that has the pattern, for the message.
        pattern: see ``matches``.
        names: dotted names.
        kind: what they name, for the message.

    Raises:
        UserError: there is none; the message has similar names.
    """
    found = {name for name in names if matches(name, pattern)}
    if not found:
        last = [name.rpartition(".")[2] for name in names]
        near = difflib.get_close_matches(pattern, dict.fromkeys([*names, *last]), n=3)
        hint = f"similar: {', '.join(near)}" if near else f"examples of names: {', '.join([*names][:4])}"
        raise UserError(f"{option}: {pattern!r} matches no {kind}; {hint}")
    return found
