"""Run any command, note what it prints, and kill it with all its processes at a planned moment."""

from __future__ import annotations

import os
import random
import re
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

START = -1
"""Stands for a step, before the first."""


class Moment(NamedTuple):
    """When a command is killed."""

    step: int
    delay_s: float
    """After the line of this step, or after the start; the line of a later step ends it."""


@dataclass
class Attempt:
    """A command from its start to its end."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    """What it printed, each with the seconds since its start."""
    seconds: float = 0.0
    status: int = 0
    """Its exit status; -9: killed."""

    @property
    def killed(self) -> bool:
        """Whether it did not end by itself."""
        return self.status == -signal.SIGKILL

    @property
    def last_line(self) -> str:
        """The last that it printed, or empty."""
        return next((line for _, line in reversed(self.lines) if line.strip()), "")

    def by_step(self, pattern: re.Pattern[str]) -> dict[int, list[str]]:
        """Return by step what a pattern of two groups, step and value, finds in the lines."""
        found: dict[int, list[str]] = {}
        for _, line in self.lines:
            if match := pattern.search(line):
                found.setdefault(int(match[1]), []).append(match[2])
        return found


def run(command: str, log: Path, progress: re.Pattern[str], moment: Moment | None = None) -> Attempt:
    """Run a shell command until it ends, or until it is killed; append what it prints to ``log``."""
    attempt, partial, began = Attempt(), b"", time.monotonic()
    process = subprocess.Popen(
        command,
        shell=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},  # so that a kill loses no line
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout
    due = began + moment.delay_s if moment and moment.step == START else None
    with selectors.DefaultSelector() as ready, log.open("ab") as output, process.stdout:
        ready.register(process.stdout, selectors.EVENT_READ)
        try:
            while True:
                if due is not None and time.monotonic() >= due:
                    _kill(process.pid)
                    moment = due = None
                if not ready.select(None if due is None else due - time.monotonic()):
                    continue
                if not (content := os.read(process.stdout.fileno(), 1 << 16)):
                    break
                output.write(content)
                *whole, partial = re.split(rb"[\r\n]", partial + content)
                for line in whole:
                    attempt.lines.append((time.monotonic() - began, line.decode(errors="replace")))
                    match = progress.search(attempt.lines[-1][1])
                    if match and moment and int(match[1]) >= moment.step:
                        due = time.monotonic() + (moment.delay_s if int(match[1]) == moment.step else 0)
        except BaseException:
            _kill(process.pid)
            raise
    attempt.status, attempt.seconds = process.wait(), time.monotonic() - began
    return attempt


def _kill(leader: int) -> None:
    """Kill a process group, and descendants in groups of their own, such as the workers of torchrun."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    doomed = [leader]
    for parent in doomed:
        doomed += [child for child, of in parents.items() if of == parent]
    for kill, process in [(os.killpg, leader), *((os.kill, child) for child in doomed[1:])]:
        with suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)


def planned(whole: Attempt, progress: re.Pattern[str], kills: int, seed: int) -> list[Moment]:
    """Return when to kill, in the order of the steps.

    A moment is drawn uniformly from the time between the undisturbed run's first line of a step and its last, and a
    tenth more, and told as so many seconds after a step's line. So each start has to come further than the one before,
    however slow the machine is, and most kills come after the first checkpoint. Every fifth comes during a start.
    """
    generator = random.Random(seed)
    steps = [(seconds, int(match[1])) for seconds, line in whole.lines if (match := progress.search(line))]
    first, last = steps[0][0], steps[-1][0]
    end = min(whole.seconds, last + (last - first) / 10)
    times = sorted(generator.uniform(first, end) for _ in range(kills - kills // 5))
    moments = []
    for moment in times:
        seconds, step = max(each for each in steps if each[0] <= moment)
        moments.append(Moment(step, moment - seconds))
    for _ in range(kills // 5):
        moments.insert(generator.randint(1, len(moments)), Moment(START, generator.uniform(0, first)))
    return moments
