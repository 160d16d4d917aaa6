"""Runs shell commands that train, and reads the number that each printed last."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from mantissa.comparison import Run
from mantissa.errors import UsageError
from mantissa.quality import NULL, NULL_SHIFT

SEED = "{seed}"
"""What a command has in the place of the seed."""
STOP_TIMEOUT_S = 10.0
"""What a command may take to end that was told to."""
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
    began = time.monotonic()
    code, texts = _run(command, folder, f"{arm}-s{seed}", timeout_s)
    seconds = time.monotonic() - began
    value = next((number for text in texts if (number := last_number(metric, text)) is not None), None)
    if value is not None and not math.isfinite(value):  # whatever the exit code
        return Run(arm, seed, None, seconds)
    if code == 0 and value is not None:
        return Run(arm, seed, value, seconds)
    failure = f"printed nothing that {metric!r} matches"
    if code != 0:
        failure = f"ended with exit code {code}" if code else f"was still running after {timeout_s:g} s and was ended"
    lines = [line.strip()[:200] for text in texts for line in text.splitlines() if line.strip()]
    return Run(arm, seed, None, seconds, f"`{command}` {failure}; its last lines: {' / '.join(lines[-3:]) or 'none'}")


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


def _run(command: str, folder: Path, name: str, timeout_s: float | None) -> tuple[int | None, list[str]]:
    """Run a command, and end all its processes with it.

    Returns:
        Its exit code, None where it was ended; what it printed, and what it printed as errors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"{name}.out", folder / f"{name}.err"]
    with logs[0].open("wb") as output, logs[1].open("wb") as errors:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        finally:
            code = process.returncode
            try:
                if code is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_TIMEOUT_S)
            finally:  # also at a second interruption, and what it left running
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, [log.read_text(encoding="utf-8", errors="replace") for log in logs]
