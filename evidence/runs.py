"""Arms of an experiment: sets of overrides, trained alternately, each run in a separate process."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from mantissa import shell
from mantissa.comparison import in_turns
from mantissa.display import duration
from trainer.config.command_line import quoted
from trainer.config.compose import key_of
from trainer.errors import UserError, redacted
from trainer.files import METRICS_FILE, PROJECT, SUMMARY_FILE, read_json, read_object, remove_folder, write_json
from trainer.tracking.plots import Series, read_series

OUTCOME_FILE = "outcome.json"
STOP_TIMEOUT_S = 120.0
"""What an interrupted process may take to save and end."""
LIMIT_STOP_S = 15.0
"""The same of one with a limit, which saves nothing of use."""
TRAIN = "scripts/train.py"
DIVERGED = 3
"""The exit code of training that turned non-finite: an outcome, which the same command would have again."""
_CHILD_SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER."""
SETTLED = (2, 4)
"""Exit codes that another seed would not change: a mistake, and too little memory."""


class OutOfTime(Exception):
    """There is no time left for the next run; those that are done are kept."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    label: str
    overrides: tuple[str, ...]
    seed_shift: int = 0
    """Added to every seed: a null arm is the baseline with other seeds."""
    script: str = TRAIN
    """What is run, below the project's folder."""


@dataclass
class Outcome:
    """One run that has ended, successfully or not."""

    arm: str
    seed: int
    """Of the pair; the run's own is shifted by its arm."""
    folder: Path
    exit_code: int
    failure: str = ""
    """The last lines that a failed run printed."""
    wall_time_s: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    others_cpu: float | None = None
    """The share of the CPUs that other processes used while it ran; None: not measured."""

    @property
    def finished(self) -> bool:
        """Whether it trained to its end."""
        return self.exit_code == 0 and self.summary.get("status") == "FINISHED"

    @property
    def ended(self) -> bool:
        """Whether it finished or diverged, so that it is not tried again."""
        return self.finished or self.exit_code == DIVERGED

    @property
    def reason(self) -> str:
        """Why a run failed, in words."""
        return self.failure or f"exit code {self.exit_code}"

    @cached_property
    def series(self) -> dict[str, Series]:
        """The run's metric log, by metric."""
        path = self.folder / METRICS_FILE
        return read_series(path) if path.exists() else {}

    @cached_property
    def ledger(self) -> dict[str, Any] | None:
        """The memory of one step by category, if it was recorded (``profiler=memory``)."""
        path = self.folder / "profile" / "ledger.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


Launch = Callable[[list[str], Path, float | None], int]


def recorded(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line as files and MLflow may have them: redacted, one by one."""
    return [redacted(argument) for argument in arguments]


def merged(*groups: Sequence[str]) -> list[str]:
    """Return overrides in which the last value of a key counts. Hydra itself refuses a group that is chosen twice."""
    return list({key_of(text): text for group in groups for text in group}.values())


@dataclass
class Runner:
    """Trains arms below a folder; runs that are done are kept, unfinished ones start again."""

    folder: Path
    """Runs go to ``folder/runs/<arm>-s<seed>``."""
    common: Sequence[str] = ()
    """Overrides of all arms, which an arm's own may change."""
    measured: Callable[[Outcome], str] = lambda outcome: ""
    """Returns what is printed of a run that has finished."""
    launch: Launch | None = None
    """See ``in_a_process``, which is the default."""
    until: float | None = None
    """By ``time.monotonic``: no run is begun afterwards, and one that is running then is ended."""

    @property
    def runs(self) -> Path:
        """The folder of the runs."""
        return self.folder / "runs"

    def command(self, arm: Arm, seed: int) -> list[str]:
        """Return the command line of one run."""
        own = [f"seed={seed + arm.seed_shift}", f"run_name={_name(arm, seed)}", f"output_dir={quoted(str(self.runs))}"]
        script = str(PROJECT / arm.script)
        return [sys.executable, script, *merged(self.common, arm.overrides, own)]

    def done(self, arm: Arm, seed: int) -> Outcome | None:
        """Return the outcome of a run that has finished or diverged before."""
        folder = self.runs / _name(arm, seed)
        try:
            known = read_json(folder / OUTCOME_FILE)
            outcome = Outcome(arm.label, seed, folder, **known)
        except (OSError, ValueError, TypeError):
            return None
        return outcome if outcome.ended else None

    def run(self, arm: Arm, seed: int) -> Outcome:
        """Train once, in a fresh process, and record the outcome.

        Raises:
            KeyboardInterrupt: the run was interrupted.
            OutOfTime: there is no time left, or the run was ended for it.
        """
        began = time.monotonic()
        limit_s = None if self.until is None else self.until - began
        if limit_s is not None and limit_s <= 0:
            raise OutOfTime
        folder = self.runs / _name(arm, seed)
        remove_folder(folder)  # unfinished or failed: the speed of half a run is not that of a whole one
        self.runs.mkdir(parents=True, exist_ok=True)
        log = self.runs / f"{folder.name}.log"
        used = None if self.launch else _cpu_seconds()
        try:
            code = (self.launch or in_a_process)(self.command(arm, seed), log, limit_s)
        except subprocess.TimeoutExpired:
            raise OutOfTime from None
        if code in (130, 143):
            raise KeyboardInterrupt
        found = read_object(folder / SUMMARY_FILE)
        failure = _last_error(log) if code else ""
        took, others = time.monotonic() - began, used and _share_of_others(used, _cpu_seconds())
        outcome = Outcome(arm.label, seed, folder, code, failure, took, found, others)
        if folder.exists():
            own = ("arm", "seed", "folder")
            write_json(folder / OUTCOME_FILE, {key: each for key, each in vars(outcome).items() if key not in own})
        return outcome

    def run_all(self, arms: list[Arm], seeds: list[int]) -> list[Outcome]:
        """Train what is left to train of these arms, with each of these seeds; print a line for every run.

        Raises:
            OutOfTime: there is no time left; the runs that are done are kept.
        """
        plan = list(in_turns(arms, seeds))
        known = {pair: self.done(*pair) for pair in plan}
        outcomes: list[Outcome] = []
        settled: set[str] = set()
        for number, (arm, seed) in enumerate(plan, 1):
            if arm.label in settled:  # it would fail in the same way
                continue
            outcome = known[arm, seed] or self.run(arm, seed)
            outcomes.append(outcome)
            if outcome.exit_code in SETTLED:
                settled.add(arm.label)
            left_s = fmean(each.wall_time_s for each in outcomes) * sum(not known[pair] for pair in plan[number:])
            told = self._line(outcome, known[arm, seed] is not None) + f"  eta {duration(left_s)}" * (left_s > 0)
            print(f"{number:>3}/{len(plan)}  {outcome.arm} s{outcome.seed}  {told}")
        return outcomes

    def _line(self, outcome: Outcome, known: bool) -> str:
        if not outcome.finished:
            return f"failed{' earlier' if known else ''} with exit code {outcome.exit_code}: {outcome.failure}"
        took = "already done" if known else f"{outcome.wall_time_s:.0f} s"
        return "  ".join(filter(None, (self.measured(outcome), took)))


def check_labels(arms: list[Arm]) -> None:
    """Refuse, by a ``UserError``, labels that are used twice or cannot name a folder."""
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f'the arm {label} appears twice; give each a name: arm.<name>="precision={label} …"')
        if not label.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UserError(f"the arm {label!r} needs a name of letters, digits, - and _")


def in_a_process(command: list[str], log: Path, limit_s: float | None = None, stop_s: float | None = None) -> int:
    """Run a command, its output going to a file, and return its exit code; end it if this process is to end.

    A copy of a server that has imported everything would start in a quarter of the time. But all copies have the
    server's places in memory, so that the spread between processes would not be in the intervals.

    Args:
        command: to run.
        log: takes the output.
        limit_s: seconds after which it is ended.
        stop_s: seconds that it may take to end, until it is killed; None: 120, with a limit 15.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``limit_s`` seconds and was ended.
    """
    patience_s = stop_s or (STOP_TIMEOUT_S if limit_s is None else LIMIT_STOP_S)
    ended = shell.run(command, log, limit_s=limit_s, stop_s=patience_s)
    if ended.code is None:
        raise subprocess.TimeoutExpired(command, limit_s or 0)
    return ended.code


def _cpu_seconds() -> tuple[float, float, float]:
    """Return the time of the CPUs of this process, how much of it they worked, and how much for it and its descendants.

    What a run leaves behind, such as the server of its loader's workers, becomes a child of this process.
    """
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    spent, this = psutil.cpu_times(percpu=True), psutil.Process()
    used = [spent[number] for number in os.sched_getaffinity(0)]
    own = [process.cpu_times() for process in (this, *this.children())]
    passed = sum(sum(each[:8]) for each in used)  # the time of guests is in that of the user
    return passed, passed - sum(each.idle + each.iowait for each in used), sum(sum(each[:4]) for each in own)


def _share_of_others(before: tuple[float, ...], after: tuple[float, ...]) -> float | None:
    passed, worked, own = (now - then for now, then in zip(after, before, strict=True))
    return max(0.0, worked - own) / passed if passed else None


def _last_error(log: Path) -> str:
    """Return the last error printed, wherever in a line it begins: buffered output may precede it."""
    text = log.read_text(encoding="utf-8", errors="replace")
    _, found, after = text.rpartition("error: ")
    if found:
        return after.splitlines()[0] if after.strip() else ""
    return " / ".join([line for line in text.splitlines() if line.strip()][-3:])


def _name(arm: Arm, seed: int) -> str:
    return f"{arm.label}-s{seed}"
