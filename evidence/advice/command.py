"""The command line of scripts/advise.py."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from pathlib import Path

from evidence.advice.candidates import COMPILE, space_of
from evidence.advice.checkup import check
from evidence.advice.report import Advice, overrides_of
from evidence.advice.search import Search
from evidence.advice.timing import COMPILED, time_candidate
from evidence.options import AdviseOptions
from evidence.runs import BUSY, cpu_share_of_others, redacted_arguments
from mantissa.commands import seconds_of
from mantissa.display import counted, duration
from trainer.config.compose import check_single, compose
from trainer.config.options import parse
from trainer.config.settle import plan_of
from trainer.files import check_output_dir, in_use, write_json
from trainer.hardware import detect
from trainer.run.provenance import git_facts, versions

ANSWER = "advice.json"


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
    check_output_dir(config.output_dir)
    hardware = detect(config.device)
    steps = plan_of(config, hardware).steps  # mistakes before any work
    folder = Path(config.output_dir).expanduser() / "advice" / config.recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{duration(time.monotonic() - began)}] {line}", flush=True)

    with in_use(folder):
        space, common = space_of(overrides, hardware)
        say(f"varied: {', '.join(space.choices) or 'nothing, all options are set'}")
        if COMPILE in space.choices:
            say(f"ranked by the time of a run of {counted(steps, 'step')}, compile time included")
        if not hardware.is_gpu and (share := cpu_share_of_others()) >= BUSY:
            space.notes.append(f"other processes used {share:.0%} of the CPUs; measure again on a quiet machine")
        search = Search(
            space,
            steps,
            time_budget_s,
            lambda candidate, blocks, limit_s: time_candidate(candidate, blocks, limit_s, common, folder),
            lambda entry: check(overrides_of(common, entry.candidate), hardware),
            say,
            time.monotonic,
        )
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
