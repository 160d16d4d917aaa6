"""The commands of ``python -m mantissa``, a module each."""

import re
import sys
from pathlib import Path

from mantissa.errors import UsageError


def say_part(name: str) -> None:
    """Name the part of an examination that begins now, on the error stream."""
    print(name, end=" … ", file=sys.stderr, flush=True)


def seconds_of(option: str, text: str) -> float:
    """Return the seconds that ``90s``, ``5min`` or ``2h`` means, as a value of ``option``. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if not match or not float(match[1]):
        raise UsageError(f"{option}{text} is not a duration; write {option}90s, {option}5min or {option}2h")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


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
