"""The cache of token ids: made once, while other processes wait, and never half-written."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import flush, locked

FORMAT = 11
"""Part of every cache key: raise it when the same text would become other tokens, or meta.json holds more."""

log = logging.getLogger("mantissa")


def built(cache: Path, name: str, key: Any, build: Callable[[Path], None]) -> Path:
    """Return the folder of the cache for ``key``, which ``build`` makes on the first call.

    Args:
        cache: the cache's folder.
        name: begins the folder's name.
        key: JSON that changes whenever the content does.
        build: makes the folder, see ``completed``.

    Raises:
        UserError: the cache folder cannot be written.
    """
    folder = cache / "text" / f"{name}-{digest([FORMAT, *key])}"
    if not folder.exists():
        with building(cache, folder):
            if not folder.exists():  # another process may have built it while this one waited
                log.info("tokenizing %s; later runs load it from %s", name, folder)
                build(folder)
    return folder


def digest(key: Any) -> str:
    """Return the 16 characters that stand for JSON in the name of a file or folder."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def building(cache: Path, made: Path) -> Iterator[None]:
    """Let other processes wait while a file or folder of the cache is made in what runs inside.

    Raises:
        UserError: it cannot be written.
    """
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with locked(made.parent / f".{made.name}.lock"):
            yield
    except OSError as error:  # numpy's has no strerror
        raise UserError(
            f"data.cache_dir={cache} cannot be written ({error.strerror or error}); free disk space, or set another "
            "folder, here or in the environment variable MANTISSA_CACHE"
        ) from None


@contextmanager
def completed(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which gets its name at the end: what a killed process leaves looks not complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            flush(path)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
