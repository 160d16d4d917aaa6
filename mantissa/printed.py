"""The metric of a training command: the number that it printed last."""

from __future__ import annotations

import math
import re
from pathlib import Path

from mantissa import shell
from mantissa.compare import Run
from mantissa.errors import UsageError

SEED = "{seed}"
"""What a command has in the place of the seed."""
_NUMBER = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|(?:nan|inf(?:inity)?)\b)", re.I)
_SIGNED = re.compile(r"(?<![\w.])(?:[-+]?(?:nan|inf(?:inity)?)\b|[-+](?=\.?\d))", re.I)
"""What an expression for digits would pass over."""
_SEPARATOR = re.compile(r"_\d|,\d{3}(?!\d)")
"""What follows the first digits of ``12_345`` and ``12,345.6``."""


def run_and_read(arm: str, seed: int, command: str, metric: str, folder: Path, timeout_s: float | None = None) -> Run:
    """Run an arm's command in a fresh process, and read its metric.

    Args:
        arm: its label.
        seed: of the pair.
        command: for the shell, with the seed that it takes.
        metric: a regular expression, looked for in what the command printed, then in what it printed as errors.
        folder: takes what it prints.
        timeout_s: seconds after which it is ended, and has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = shell.run(command, folder / f"{arm}-s{seed}.out", errors_apart=True, limit_s=timeout_s)
    numbers = (last_number(metric, text) for text in (ended.output, ended.errors))
    value = next((number for number in numbers if number is not None), None)
    if value is not None and (ended.code == 0 or not math.isfinite(value)):  # not finite: whatever the exit code
        return Run(arm, seed, value if math.isfinite(value) else None, ended.seconds)
    failure = f"printed nothing that {metric!r} matches"
    if ended.code is None:
        failure = f"was still running after {timeout_s:g} s and was ended"
    elif ended.code:
        failure = f"ended with exit code {ended.code}"
    why = f"`{command}` {failure}; its last lines: {ended.last_lines() or 'none'}"
    return Run(arm, seed, None, ended.seconds, why)


def last_number(metric: str, text: str) -> float | None:
    """Return the number at the last match of a regular expression, where its first group begins; None: no match.

    A sign, a nan and an infinity are found wherever the expression accepts digits, or an earlier number would pass for
    the last one. The number is read to its end, also where the expression knows no exponent.

    Raises:
        UsageError: there is no number, or one with separators between its digits.
    """
    pattern = re.compile(metric, re.MULTILINE)
    unsigned = _SIGNED.sub(lambda found: "0" * len(found[0]), text)
    matches = [*pattern.finditer(text), *pattern.finditer(unsigned)]
    if not matches:
        return None
    begin, end = max(matches, key=lambda match: match.start()).span(min(1, pattern.groups))
    number = _NUMBER.match(text, begin) if pattern.groups else _NUMBER.search(text, begin, end)
    if number is None or (pattern.groups and text[number.end() : end].strip(".")):
        raise UsageError(f"the metric {metric!r} found {text[begin:end]!r}, no number; put (…) around the number alone")
    if number[0].isdecimal() and _SEPARATOR.match(text, number.end()):
        around = text[begin : number.end() + 4]
        raise UsageError(f"the metric {metric!r} found {around!r}, with separators; print the number without them")
    return float(number[0])


def name_of(metric: str) -> str:
    """Return the words of a regular expression before its group, as the metric's name.

    Raises:
        UsageError: it is no regular expression.
    """
    try:
        re.compile(metric)
    except re.error as error:
        raise UsageError(f"the metric {metric!r} is no regular expression ({error}), unlike 'loss ([0-9.]+)'") from None
    return " ".join(re.findall("[A-Za-z]{2,}", metric.partition("(")[0])) or "metric"
