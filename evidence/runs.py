"""Arms of an experiment: sets of overrides, trained alternately, each run in a separate process."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from mantissa.display import loss
from mantissa.verdict import compare, shell
from mantissa.verdict.compare import Run, Store
from trainer.config.command_line import quoted
from trainer.config.compose import key_of
from trainer.errors import NonFiniteError, OutOfMemory, UserError, redacted
from trainer.files import METRICS_FILE, PROJECT, SUMMARY_FILE, read_object, remove_folder
from trainer.tracking.plots import Series, read_series

STORE_FILE = "kept.jsonl"
LOSS = "valid/loss"
STOP_TIMEOUT_S = 120.0
"""Seconds that an interrupted run may take to save and end."""
DIVERGED = NonFiniteError.exit_code
"""Exit code of training that turned non-finite: an outcome, which the same command would have again."""
DETERMINISTIC_FAILURES = (UserError.exit_code, OutOfMemory.exit_code)
"""Exit codes that another seed would not change: a mistake, and too little memory."""
INTERRUPTED = (130, 143)
LOOK_S = 1.0
"""Seconds before a run in which the CPUs' work is that of others."""
BUSY = 0.1
"""Share of the CPUs that others use, from which on times say little about the machine."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    label: str
    overrides: tuple[str, ...]
    seed_shift: int = 0
    """Number added to every seed, where the same arm is compared with itself."""


@dataclass
class Outcome:
    """One run that has ended, successfully or not."""

    arm: str
    seed: int
    """Seed of the pair; the run's own is shifted by its arm."""
    folder: Path
    exit_code: int
    failure: str = ""
    """Last error, or the last lines, that a failed run printed."""
    wall_time_s: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    others_cpu: float | None = None
    """Share of the CPUs that other processes used just before it; None: not measured."""

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


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line as files and MLflow may have them: redacted, one by one."""
    return [redacted(argument) for argument in arguments]


def merge_overrides(*groups: Sequence[str]) -> list[str]:
    """Return overrides in which the last value of a key counts. Hydra itself refuses a group that is chosen twice."""
    return list({key_of(text): text for group in groups for text in group}.values())


@dataclass
class Runner:
    """Trains arms below a folder; runs that are done are kept, unfinished ones start again."""

    folder: Path
    """Runs go to ``folder/runs/<arm>-s<seed>``."""
    common: Sequence[str] = ()
    """Overrides of all arms, which an arm's own may change."""

    @property
    def runs(self) -> Path:
        """The folder of the runs."""
        return self.folder / "runs"

    @cached_property
    def store(self) -> Store:
        """What is kept of the runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Store(self.folder / STORE_FILE)

    def command(self, arm: Arm, seed: int) -> list[str]:
        """Return the command line of one run."""
        own = [f"seed={seed + arm.seed_shift}", f"run_name={_name(arm, seed)}", f"output_dir={quoted(str(self.runs))}"]
        script = str(PROJECT / "scripts" / "train.py")
        return [sys.executable, script, *merge_overrides(self.common, arm.overrides, own)]

    def run_all(self, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Outcome]:
        """Train what is left to train of these arms, with each of these seeds; print a line for every run."""
        by_label = {arm.label: arm for arm in arms}
        runs = compare.run_all(list(by_label), seeds, lambda label, seed: self.run(by_label[label], seed), self.store)
        return [Outcome(run.arm, run.seed, self.runs / _name(by_label[run.arm], run.seed), **run.facts) for run in runs]

    def run(self, arm: Arm, seed: int) -> Run:
        """Train once, in a fresh process, and return what is to be kept.

        A copy of a server that has imported everything would start in a quarter of the time. But all copies have the
        server's places in memory, so that the spread between processes would not be in the intervals.

        Raises:
            KeyboardInterrupt: the run was interrupted.
        """
        folder = self.runs / _name(arm, seed)
        remove_folder(folder)  # unfinished or failed: the speed of half a run is not that of a whole one
        self.runs.mkdir(parents=True, exist_ok=True)
        others = cpu_share_of_others()
        ended = shell.run(self.command(arm, seed), self.runs / f"{folder.name}.log", stop_s=STOP_TIMEOUT_S)
        if ended.code in INTERRUPTED:
            raise KeyboardInterrupt
        assert ended.code is not None  # without a limit
        facts: dict[str, Any] = {
            "exit_code": ended.code,
            "failure": _last_error(ended) if ended.code else "",
            "wall_time_s": ended.seconds,
            "summary": read_object(folder / SUMMARY_FILE),
            "others_cpu": others,
        }
        outcome = Outcome(arm.label, seed, folder, **facts)
        shown = f"failed with exit code {ended.code}: {outcome.failure}"
        if outcome.finished:
            rate = outcome.summary["units_per_s"]
            shown = f"loss {loss(outcome.summary['final'].get(LOSS))}"
            shown += f"  {rate:,.0f} {outcome.summary['unit']}/s" if rate else ""
        failure = "" if outcome.ended else outcome.reason
        deterministic = ended.code in DETERMINISTIC_FAILURES
        return Run(arm.label, seed, None, ended.seconds, failure, shown, deterministic, facts)


def check_labels(labels: Sequence[str]) -> None:
    """Refuse, by a ``UserError``, labels of arms that are used twice or cannot name a folder."""
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f'the arm {label} appears twice; give each a name: arm.<name>="precision={label} …"')
        if not label.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UserError(f"the arm {label!r} needs a name of letters, digits, - and _")


def cpu_share_of_others() -> float:
    """Return the share of this process's CPUs that others use, while this process waits for the look's end."""
    used = psutil.cpu_percent(LOOK_S, percpu=True)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(used))  # macOS has none
    return statistics.fmean(used[number] for number in own) / 100


def _last_error(ended: shell.Ended) -> str:
    """Return the last error printed, wherever in a line it begins: buffered output may precede it."""
    _, found, after = ended.output.rpartition("error: ")
    return next(iter(after.splitlines()), "") if found else ended.last_lines()


def _name(arm: Arm, seed: int) -> str:
    return f"{arm.label}-s{seed}"
