"""Values as they are typed on a command line, and what is printed there."""

from __future__ import annotations

import sys
from io import TextIOWrapper

from trainer.files import discard


def make_printable() -> None:
    """Let a terminal that lacks a character show a question mark, and a file or a pipe get each line at once."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # in a test or a notebook it may be another
            stream.reconfigure(errors="replace", line_buffering=True)


def say(text: str, end: str = "\n") -> None:
    """Print to the error stream at once; where it takes nothing, such as on a full disk, the program goes on."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def listed(text: str) -> list[str]:
    """Return the items of ``a,b`` or ``[a,b]``."""
    return [item.strip() for item in text.strip().removeprefix("[").removesuffix("]").split(",") if item.strip()]


_VALUES = {
    "int": "a whole number",
    "float": "a number, such as 0.001",
    "bool": "true or false",
    "None": "null",
    "str": "a word, such as auto",
    "dict[str, str]": "names with values, such as tags.NAME=VALUE",
    "list[str]": "a list, such as [a,b]",
    "list[float]": "a list of numbers, such as [0.5,0.5,0.5]",
}


def values_of(annotation: str) -> str:
    """Return what an option of a type such as ``int | None`` can be, for a message."""
    return ", or ".join(_VALUES.get(part, part) for part in annotation.replace(" | str", " | auto").split(" | "))


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
