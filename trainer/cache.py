"""Results that are kept for later processes, in a folder of files that can be generated again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def cache_folder(given: str | None = None) -> Path:
    """Return the folder of the cache: ``given``, ``$MANTISSA_CACHE``, or ``~/.cache/mantissa``."""
    chosen = given if given is not None else os.environ.get("MANTISSA_CACHE") or "~/.cache/mantissa"
    return Path(chosen).expanduser()


def cached(kind: str, of: dict[str, Any], work: Callable[[], T]) -> T:
    """Return what ``work`` returned when it was first called for ``kind`` and ``of``, here or in an earlier process.

    If the cache cannot be read or written, ``work`` is called every time.

    Args:
        kind: the name of a folder in the cache.
        of: everything that the result depends on, as JSON.
        work: returns JSON.
    """
    key = json.dumps(of, sort_keys=True)
    path = cache_folder() / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known: T = json.loads(path.read_text(encoding="utf-8"))["result"]
        return known
    result = work()
    from trainer.files import write_text  # which a trainer that finds all of it does not need

    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"of": of, "result": result}))
    return result
