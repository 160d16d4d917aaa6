"""The command line of scripts/advise.py."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.advice.candidates import COMPILE, Candidate, space_of
from evidence.advice.checkup import check
from evidence.advice.report import Advice, overrides_of
from evidence.advice.search import Search
from evidence.advice.timing import COMPILED, Times, time_candidate
from evidence.memory.fits import too_large
from evidence.runs import cpu_share_of_others, gpu_shares_of_others, merge_overrides, redacted_arguments
from mantissa.commands import seconds_of
from mantissa.display import counted
from mantissa.step.memory import available_bytes
from mantissa.verdict.judge import BUSY
from trainer.config.compose import check_single, compose, key_of
from trainer.config.options import ONE_PROCESS, Overriding, parse
from trainer.config.settle import plan_of
from trainer.data.contract import Datasets
from trainer.files import check_output_dir, in_use, write_json
from trainer.hardware import Hardware, detect
from trainer.run.fit import USABLE
from trainer.run.provenance import git_facts, versions

ANSWER = "advice.json"


@dataclass
class AdviseOptions(Overriding):
    """Options of scripts/advise.py."""

    fixed = ONE_PROCESS | dict.fromkeys(("resume", "debug"), "advise.py only times blocks of steps")

    time_budget: str = "5min"


@dataclass
class ThisMachine:
    """Fresh processes on this machine, which candidates are measured in."""

    common: list[str]
    """Overrides of all candidates."""
    hardware: Hardware
    datasets: Datasets
    folder: Path
    """Folder for what torch.compile keeps."""

    def __post_init__(self) -> None:
        self._usable_bytes = USABLE * available_bytes(self.hardware.device)

    def clock(self) -> float:
        return time.monotonic()

    def too_large(self, candidate: Candidate) -> str:
        # Compiled, a model needs no more than eager; threads need none.
        changes = [change for change in candidate.overrides if key_of(change) not in (COMPILE, "threads")]
        return too_large(merge_overrides(self.common, changes), self.hardware, self.datasets, self._usable_bytes)

    def time(self, candidate: Candidate, blocks: int, limit_s: float) -> Times:
        return time_candidate(candidate, blocks, limit_s, self.common, self.folder)

    def check_up(self, candidate: Candidate) -> dict[str, Any]:
        return check(overrides_of(self.common, candidate), self.hardware)


def main(arguments: list[str]) -> int:
    """Find the fastest setting of a recipe here, and print it.

    Raises:
        UserError: a mistake in the options.
        RunError: no candidate works.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, AdviseOptions, "overrides")
    time_budget_s = seconds_of("time_budget=", options.time_budget)
    check_single(overrides, "advise.py chooses what it tries; set one value, or leave it out")
    config = compose(overrides)
    config.precision.check_single("advise.py times each format by itself")
    check_output_dir(config.output_dir)
    hardware = detect(config.device)
    plan = plan_of(config, hardware)  # mistakes before any work
    steps = plan.steps
    folder = Path(config.output_dir).expanduser() / "advice" / config.recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    with in_use(folder):
        # What is tried, and what disturbs it.
        datasets = plan.config.open_datasets()
        space, common = space_of(overrides, hardware, datasets)
        search = Search(space, ThisMachine(common, hardware, datasets, folder), steps, time_budget_s)
        search.print(f"varied: {', '.join(space.choices) or 'nothing, all options are set'}")
        if COMPILE in space.choices:
            search.print(f"ranked by the time of a run of {counted(steps, 'step')}, compile time included")
        on_gpu = hardware.is_gpu
        share = gpu_shares_of_others().get(str(hardware.device), 0.0) if on_gpu else cpu_share_of_others()
        if share >= BUSY:
            where = "GPU" if on_gpu else "CPUs"
            space.notes.append(f"other processes used {share:.0%} of the {where}; measure again on a quiet machine")

        # The search, and the answer.
        try:
            winner = search.run()
        finally:
            shutil.rmtree(folder / COMPILED, ignore_errors=True)
        advice = Advice(
            search,
            winner,
            config.recipe.name,
            redacted_arguments(common),
            shlex.join(["python", "scripts/advise.py", *redacted_arguments(arguments)]),
            time.monotonic() - began,
            {"hardware": hardware.facts(), "versions": versions(), "git": git_facts()},
        )
        report = advice.report()
        print(f"\n{report.text()}\n")
        write_json(folder / ANSWER, advice.content())
        print(f"{report.write(folder)}\n{folder / ANSWER}")
    return 0
