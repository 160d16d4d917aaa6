"""The commands of ``python -m mantissa``, a module each."""

import sys
from pathlib import Path

from mantissa.errors import UsageError


def say_part(name: str) -> None:
    """Name the part of an examination that begins now, on the error stream."""
    print(name, end=" … ", file=sys.stderr, flush=True)


def report_folder(path: str | Path) -> Path:
    """Make the folder of a report before anything is measured, and return it.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report {path} cannot be made ({error.strerror}); give another folder") from None
    return Path(path)
