"""The nearest valid name, for messages about a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(typed: str, valid: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean 'bf16'?"`` or, with nothing near, an empty string; ``prefix`` is shown, not compared."""
    names = list(valid)
    lowered = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(typed.lower(), list(lowered), n=1, cutoff=0.5)
    if not near and (transposed := _same_letters(typed.lower(), lowered)):
        near = [transposed]
    return f"; did you mean {prefix + lowered[near[0]]!r}?" if near else ""


def _same_letters(typed: str, valid: Iterable[str]) -> str | None:
    return next((name for name in valid if sorted(name) == sorted(typed)), None)
