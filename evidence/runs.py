"""Arms of an experiment: sets of overrides, trained alternately, each run in a separate process."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch

from evidence.measures import LOSS, curve_of, values_of
from mantissa.display import loss
from mantissa.verdict import runs, shell
from mantissa.verdict.runs import Run, Runs, Store
from trainer.config.command_line import quoted
from trainer.config.compose import key_of
from trainer.errors import NonFiniteError, OutOfMemory, UserError, redacted
from trainer.files import METRICS_FILE, PROJECT, SUMMARY_FILE, read_object, remove_folder, sha256
from trainer.hardware import kind_of
from trainer.precision.kernels import is_emulated
from trainer.tracking.plots import read_series

STORE_FILE = "runs.jsonl"
STOP_TIMEOUT_S = 120.0
"""Seconds that an interrupted run may take to save and end."""
DIVERGED = NonFiniteError.exit_code
"""Exit code of training that turned non-finite: an outcome, which the same command would have again."""
DETERMINISTIC_FAILURES = (UserError.exit_code, OutOfMemory.exit_code)
"""Exit codes that another seed would not change: a mistake, and too little memory."""
OF_RUNS = ("mantissa", "trainer", "recipes", "conf", "scripts")
"""Folders of what a run is made of."""
INTERRUPTED = (130, 143)
LOOK_S = 1.0
"""Seconds before a run in which the CPUs' work is that of others."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    label: str
    overrides: tuple[str, ...]
    seed_shift: int = 0
    """Number added to every seed, where the same arm is compared with itself."""


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line as files and MLflow may have them: redacted, one by one."""
    return [redacted(argument) for argument in arguments]


def code_digest(recipe_path: str | None = None) -> str:
    """Return a hash of the code and the choices that runs are made of, so that no earlier code's are taken for them.

    Args:
        recipe_path: the folder of recipes and choices of the user's own, if any.
    """
    files = [path for name in OF_RUNS for end in ("py", "yaml") for path in (PROJECT / name).rglob(f"*.{end}")]
    if recipe_path is not None:
        files += [*Path(recipe_path).glob("*.py"), *Path(recipe_path).glob("conf/**/*.yaml")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{os.path.relpath(path, PROJECT)} {sha256(path)}\n".encode())
    return digest.hexdigest()[:12]


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
        of_run = [
            f"seed={seed + arm.seed_shift}",
            f"run_name={_name(arm, seed)}",
            f"output_dir={quoted(str(self.runs))}",
        ]
        script = str(PROJECT / "scripts" / "train.py")
        return [sys.executable, script, *merge_overrides(self.common, arm.overrides, of_run)]

    def run_all(self, arms: Sequence[Arm], seeds: Sequence[int]) -> Runs:
        """Train what is left to train of these arms, with all of these seeds; print a line for every run."""
        labels = {arm.label: arm for arm in arms}
        return runs.run_all(list(labels), seeds, lambda label, seed: self.run(labels[label], seed), self.store)

    def run(self, arm: Arm, seed: int) -> Run:
        """Train once, in a fresh process, and return what is to be kept.

        A copy of a server that has imported everything would start in a quarter of the time. But all copies have the
        server's places in memory, so that the spread between processes would not be in the intervals.

        Raises:
            KeyboardInterrupt: the run was interrupted.
        """
        # From nothing, beside what others leave of the CPUs.
        folder = self.runs / _name(arm, seed)
        remove_folder(folder)  # unfinished or failed: the speed of half a run is not that of a whole one
        self.runs.mkdir(parents=True, exist_ok=True)
        others, on_gpus = cpu_share_of_others(), gpu_shares_of_others()
        ended = shell.run(self.command(arm, seed), self.runs / f"{folder.name}.log", stop_s=STOP_TIMEOUT_S)
        if ended.code in INTERRUPTED:
            raise KeyboardInterrupt

        # A run that did not finish has no numbers; one that diverged has a loss that is not finite.
        summary = read_object(folder / SUMMARY_FILE)
        if ended.code or summary.get("status") != "FINISHED":
            why = _last_error(ended) if ended.code else ""
            return Run(
                arm.label,
                seed,
                {"loss": None, "best_loss": None} if ended.code == DIVERGED else {},
                ended.seconds,
                failure=why or f"exit code {ended.code}",
                shown=f"failed with exit code {ended.code}: {why}",
                deterministic=ended.code in DETERMINISTIC_FAILURES,
            )

        # All that a report needs is read here, once.
        series = read_series(folder / METRICS_FILE)
        values = values_of(summary, series, ended.seconds)
        device = summary["hardware"]["device"]
        if not kind_of(device).own_memory:  # on a GPU the CPUs say little
            values["others_cpu"] = others
        elif device in on_gpus:
            values["others_gpu"] = on_gpus[device]
        rate = f"  {values['speed']:,.0f} {summary['unit']}/s" if "speed" in values else ""
        not_timed = summary["not_timed"] or ""
        return Run(
            arm.label,
            seed,
            values,
            ended.seconds,
            shown=f"loss {loss(values.get('loss'))}{rate}",
            curve=curve_of(*series.get(LOSS, ((), ()))),
            arithmetic=not_timed,
            emulated=is_emulated(not_timed),
        )


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
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(used))  # macOS has none
    return statistics.fmean(used[number] for number in cpus) / 100


def gpu_shares_of_others() -> dict[str, float]:
    """Return the share of the last second in which each GPU was busy, by device, while this process uses none.

    Empty where there is none, or the driver does not tell, as of a part of one (MIG).
    """
    with suppress(Exception):
        return {f"cuda:{index}": torch.cuda.utilization(index) / 100 for index in range(torch.cuda.device_count())}
    return {}


def _last_error(ended: shell.Ended) -> str:
    """Return the last error printed, wherever in a line it begins: buffered output may precede it."""
    _, error, after = ended.output.rpartition("error: ")
    return next(iter(after.splitlines()), "") if error else ended.last_lines()


def _name(arm: Arm, seed: int) -> str:
    return f"{arm.label}-s{seed}"
