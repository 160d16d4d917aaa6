"""The metric of a training command: the number that it printed last."""

from __future__ import annotations

import math
import re
from pathlib import Path

from mantissa import shell
from mantissa.comparison import Run
from mantissa.errors import UsageError
from mantissa.quality import NULL, NULL_SHIFT

SEED = "{seed}"
"""What a command has in the place of the seed."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b", re.I)
_NOT_FINITE = re.compile(r"(?<![\w.])(?:nan|inf(?:inity)?)\b", re.I)


def measured(arm: str, seed: int, command: str, metric: str, folder: Path, timeout_s: float | None = None) -> Run:
    """Run an arm's command in a fresh process with a seed, and read its metric.

    Args:
        arm: its label; the null arm's seed is shifted.
        seed: of the pair.
        command: for the shell, with ``{seed}``.
        metric: a regular expression, looked for in what the command printed, then in what it printed as errors.
        folder: takes what it prints.
        timeout_s: seconds after which it is ended, and has failed.
    """
    command = command.replace(SEED, str(seed + NULL_SHIFT * (arm == NULL)))
    folder.mkdir(parents=True, exist_ok=True)
    ended = shell.run(command, folder / f"{arm}-s{seed}.out", errors_apart=True, limit_s=timeout_s)
    numbers = (last_number(metric, text) for text in (ended.output, ended.errors))
    value = next((number for number in numbers if number is not None), None)
    if value is not None and not math.isfinite(value):  # whatever the exit code
        return Run(arm, seed, None, ended.seconds)
    if ended.code == 0 and value is not None:
        return Run(arm, seed, value, ended.seconds)
    failure = f"printed nothing that {metric!r} matches"
    if ended.code is None:
        failure = f"was still running after {timeout_s:g} s and was ended"
    elif ended.code:
        failure = f"ended with exit code {ended.code}"
    why = f"`{command}` {failure}; its last lines: {ended.last_lines() or 'none'}"
    return Run(arm, seed, None, ended.seconds, why)


def last_number(metric: str, text: str) -> float | None:
    """Return the number at the last match of a regular expression, where its first group begins; None: no match.

    A nan or an infinity is found wherever the expression accepts digits, or an earlier number would pass for the last
    one. The number is read to its end, also where the expression knows no exponent.

    Raises:
        UsageError: there is no number.
    """
    pattern = re.compile(metric, re.MULTILINE)
    matches = list(pattern.finditer(_NOT_FINITE.sub(lambda found: "0" * len(found[0]), text)))
    if not matches:
        return None
    begin, end = matches[-1].span(min(1, pattern.groups))
    number = _NUMBER.match(text, begin) if pattern.groups else _NUMBER.search(text, begin, end)
    if number is None or (pattern.groups and text[number.end() : end].strip(".")):
        raise UsageError(f"the metric {metric!r} found {text[begin:end]!r}, no number; put (…) around the number alone")
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
