"""The time that claims may take: what a run is expected to take, and whether it is still begun."""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from evidence.runs import OUTCOME_FILE, in_a_process
from trainer.errors import UserError
from trainer.files import read_object, write_json

AT_LEAST_FILE = "at_least.json"
"""Beside the runs of a claim: what runs that were ended for lack of time had taken until then, in seconds by arm."""
Seconds = dict[str, float]
"""Of one run of each arm; runs for the reasons of an outcome are called after their arm, such as bf16-operators."""
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_SAFETY = 1.15
"""A run may take this much longer than expected."""
_SHORTEST_S = 20.0
"""With less time than this, a run of unknown length is not begun."""
_LONGEST_SHARE = 2.0
"""A run of unknown length is ended at this many times its share of the time left: the claim would hardly fit then."""


class OutOfTime(Exception):
    """What would come next does not fit in the time left."""

    def __init__(self, needed_s: float | None, ended: bool = False) -> None:
        super().__init__(needed_s)
        self.needed_s = needed_s
        """Seconds for all that is left of the claim; None: not known."""
        self.ended = ended
        """Whether a run was begun, and ended at its limit."""


def duration(text: str, key: str = "budget") -> float:
    """Return the seconds that ``90s``, ``25min`` or ``1.5h`` means.

    Raises:
        UserError: no unit, another unit, or no positive number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text.strip())
    if match and (seconds := float(match[1]) * _UNITS[match[2]]) > 0:
        return seconds
    number = re.match(r"\d+(\.\d+)?", text.strip())
    near = f"{number[0]}min" if number and float(number[0]) > 0 else "25min"
    raise UserError(f"{key}={text} is not a time: set {key}={near}, or with another unit {key}=90s, {key}=1.5h")


def in_words(seconds: float | None) -> str:
    """Return a time for a sentence."""
    if seconds is None:
        return "not known yet"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class Budget:
    """Begins runs while there is time for them; its ``launch`` takes the place of a ``Runner``'s.

    A claim is begun only where all its runs are expected to fit; if that turns out wrong it is left for the next call.
    With ``partly``, every single run that fits is begun: what is done is kept.
    """

    seconds: float
    """From now on."""
    _: KW_ONLY
    start: Callable[[list[str], Path, float], int] = in_a_process
    """Runs a command with a log and a limit in seconds, beyond which it raises ``subprocess.TimeoutExpired``."""
    clock: Callable[[], float] = time.monotonic
    partly: bool = False
    todo: list[str] = field(init=False, default_factory=list)
    """The arms of the runs that are left, one entry each."""
    expected: Seconds = field(init=False, default_factory=dict)
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    def left(self) -> float:
        """Return the seconds left."""
        return self._end - self.clock()

    def begin(self, todo: list[str], expected: Seconds) -> None:
        """Start on a claim with these runs left.

        Raises:
            OutOfTime: they do not fit.
        """
        self.todo, self.expected = list(todo), dict(expected)
        if todo:
            self._check(todo[0])

    def needed(self) -> float | None:
        """Return the seconds for all that is left of the claim; None: not known."""
        return total(self.todo, self.expected)

    def launch(self, command: list[str], log: Path) -> int:
        """Run a command if it fits, and learn what it takes.

        Raises:
            OutOfTime: it does not fit, or it was ended because the claim will not fit.
        """
        arm = _arm(command)
        self._check(arm)
        began = self.clock()
        try:
            code = self.start(command, log, self._limit(arm))
        except subprocess.TimeoutExpired:
            spent = self.clock() - began
            path = log.parent / AT_LEAST_FILE
            write_json(path, read_object(path) | {arm: spent})
            self.expected[arm] = max(spent, self.expected.get(arm, 0.0))
            raise OutOfTime(self.needed(), ended=True) from None
        self.expected[arm] = self.clock() - began
        if arm in self.todo:
            self.todo.remove(arm)
        return code

    def _limit(self, arm: str) -> float:
        """Return how long a run of this arm may take."""
        if self.partly or arm in self.expected or not self.todo:
            return self.left()
        return min(self.left(), max(_SHORTEST_S, _LONGEST_SHARE * self.left() / len(self.todo)))

    def _check(self, arm: str) -> None:
        """Raise ``OutOfTime`` unless a run of this arm and, but for ``partly``, all that follows it fit."""
        one, needed = typical(arm, self.expected), self.needed()
        wanted = one if self.partly or needed is None else max(needed, one or 0.0)
        if (_SHORTEST_S if wanted is None else wanted * _SAFETY) > self.left():
            raise OutOfTime(needed)


def typical(arm: str, seconds: Seconds) -> float | None:
    """Return what a run of an arm takes: if it never ran, what the claim's longest takes; None where none ran."""
    return seconds.get(arm, max(seconds.values(), default=None))


def total(todo: Iterable[str], seconds: Seconds) -> float | None:
    """Return what these runs take together; None: not known."""
    each = [typical(arm, seconds) for arm in todo]
    return None if None in each else sum(one for one in each if one is not None)


def of_runs(runs: Path) -> Seconds:
    """Return what the runs in a folder took, the mean of each arm; of those that were ended, at least that."""
    found: dict[str, list[float]] = {}
    for path in runs.glob(f"*/{OUTCOME_FILE}"):
        record = read_object(path)
        if "wall_time_s" in record:
            found.setdefault(path.parent.name.rpartition("-s")[0], []).append(record["wall_time_s"])
    return read_object(runs / AT_LEAST_FILE) | {arm: statistics.mean(each) for arm, each in found.items()}


def of_record(record: dict[str, Any]) -> Seconds:
    """Return what the runs of a recorded outcome took."""
    minutes = {name: arm["measures"].get("minutes", []) for name, arm in record.get("arms", {}).items()}
    known = {
        name: 60 * statistics.mean(values) for name, each in minutes.items() if (values := list(filter(None, each)))
    }
    return known | record.get("run_seconds", {})


def scaled(elsewhere: dict[str, Seconds], here: dict[str, Seconds]) -> dict[str, Seconds]:
    """Return times of another machine as they would be here, by the runs that both have done (the median ratio)."""
    ratios = [
        here[claim][arm] / seconds
        for claim, arms in elsewhere.items()
        for arm, seconds in arms.items()
        if seconds > 0 and arm in here.get(claim, {})
    ]
    ratio = statistics.median(ratios) if ratios else 1.0
    return {claim: {arm: ratio * seconds for arm, seconds in arms.items()} for claim, arms in elsewhere.items()}


def _arm(command: list[str]) -> str:
    name = next(text for text in command if text.startswith("run_name=")).partition("=")[2]
    return name.rpartition("-s")[0]
