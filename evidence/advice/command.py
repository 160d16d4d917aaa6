"""The command line of scripts/advise.py."""

from __future__ import annotations

import datetime
import logging
import math
import shlex
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from evidence.advice import cache
from evidence.advice.candidates import GOALS, Setting, space_of
from evidence.advice.checkup import NOT_EXAMINED, check
from evidence.advice.conclude import Conclusion, conclude, objections
from evidence.advice.experiment import overrides_of
from evidence.advice.outputs import Grid, Outputs
from evidence.advice.plan import Plan
from evidence.advice.rounds import Bench
from evidence.advice.schema import Advice, Candidate, Log
from evidence.advice.search import BUDGET, Search
from evidence.advice.text import print_advice
from evidence.advice.worker import COMPILED, Worker, prepare
from evidence.claims.reproduce import machine_name
from trainer.config.compose import combinations, compose
from trainer.config.options import parse
from trainer.config.schema import Config
from trainer.errors import UserError, nearest
from trainer.files import check_output_dir, in_use, make_folder
from trainer.formats import duration
from trainer.hardware import Hardware, available_bytes, detect
from trainer.parallel.world import launched_processes
from trainer.run.provenance import git_facts, versions

GRID = "grid"
"""The folder below the advice's for the processes of ``exhaustive=true``."""
BLOCKS = 600
"""Blocks that fit into a budget, about: a twentieth of a second to a second each."""


@dataclass
class AdviseOptions:
    """Of scripts/advise.py."""

    budget_minutes: float = 5.0
    goal: str = "speed"
    quality: bool = False
    exhaustive: bool = False
    fresh: bool = False


def main(arguments: list[str]) -> int:
    """Find the best setting of a recipe here, and print it.

    Raises:
        UserError: a mistake in the options, or a budget that is too short for anything.
        RunError: no candidate works.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, AdviseOptions, "overrides")
    config = _checked(options, overrides)
    hardware = detect(config.device)
    config.resolve(hardware)  # mistakes before any work
    of = cache.identity(overrides, options.goal, options.quality, hardware)
    folder = Path(config.output_dir).expanduser() / "advice" / cache.folder_name(config.recipe.name, of)
    make_folder(folder)
    console = Console(highlight=False)
    with in_use(folder):
        before, log, more = cache.load(folder)
        if options.fresh or cache.changed(of, before):
            if before and not options.fresh:
                console.print(f"measured again: {', '.join(cache.changed(of, before))} changed since the earlier call")
            log, more = Log(), {}
        job = _Job(options, overrides, config, hardware, folder, of, log, console, more.get("faults", {}))
        if more and (known := cache.read(folder)) and not _continues(known, options, more):
            console.print(f"Nothing changed since this was measured (fresh=true measures again; {folder}).")
            job.finish(known, more["notes"])
            return 0
        (folder / cache.ANSWER).unlink(missing_ok=True)
        job.finish(*job.run())
    return 0


def _continues(known: Advice, options: AdviseOptions, more: dict[str, Any]) -> bool:
    """Return whether a larger budget is given to a search that ended for want of time."""
    return known.stopped == BUDGET and options.budget_minutes > more["budget_minutes"]


def _checked(options: AdviseOptions, overrides: list[str]) -> Config:
    if options.goal not in GOALS:
        raise UserError(f"goal={options.goal} is not a goal ({', '.join(GOALS)}){nearest(options.goal, GOALS)}")
    if not (math.isfinite(options.budget_minutes) and options.budget_minutes > 0):
        raise UserError(f"budget_minutes={options.budget_minutes:g} must be a time above 0, such as budget_minutes=5")
    if launched_processes():
        raise UserError("candidates run in one process each; start the command without torchrun")
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in ("resume", "debug"):
            raise UserError(f"{override} has no effect: advise.py only times blocks of steps; leave it out")
    if len(combinations(overrides)) > 1:
        raise UserError(
            "an option has several values, but advise.py chooses what it tries; set one value, or leave it out"
        )
    config = compose(overrides)
    if config.parallel.kind != "single":
        raise UserError(f"candidates run in one process each; leave out parallel={config.parallel.kind}")
    check_output_dir(config.output_dir)
    return config


def _command(overrides: list[str], options: AdviseOptions) -> str:
    """Return the command line with the options that are not the defaults."""
    own = {
        key: value for key, value in asdict(options).items() if value != getattr(AdviseOptions, key) and key != "fresh"
    }
    typed = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in own.items()]
    return shlex.join(["python", "scripts/advise.py", *overrides, *typed])


@dataclass
class _Job:
    """One search, from the candidates to the answer."""

    options: AdviseOptions
    overrides: list[str]
    config: Config
    hardware: Hardware
    folder: Path
    of: dict[str, Any]
    log: Log
    console: Console
    faults: dict[str, list[str]]
    """That the doctor found in an earlier call, by label."""

    def __post_init__(self) -> None:
        self.began = time.monotonic() - self.log.spent_s

    def run(self) -> tuple[Advice, list[str]]:
        """Search, and return the answer with notes for the user."""
        space, common = space_of(self.overrides, self.hardware, self.options.goal, self.options.quality)
        varied = [factor.name for factor in space.factors if len(factor.values) > 1]
        self._say(f"varied: {', '.join(varied) or 'nothing, all options are set'}")
        for entry in space.left_out:
            self._say(f"left out: {entry.candidate.label} ({entry.reason})")
        steps = compose(common).resolve(self.hardware).plan.steps
        if "compile" in varied and self.options.goal == "speed":  # otherwise all compile, or none
            self._say(f"ranked by the time of a run of {steps} steps, compile time included")
        plan = Plan(space, self.log, self.options.goal, steps, faults=self.faults)
        budget_s = 60 * self.options.budget_minutes
        bench = self._bench(common, self.log, self.folder)
        notes = list(space.notes)
        more = {"budget_minutes": self.options.budget_minutes, "notes": notes, "faults": self.faults}
        prepare()
        self.log.spent_s = time.monotonic() - self.began
        search = Search(plan, bench, budget_s, lambda: cache.save(self.folder, self.of, self.log, more), self._say)
        health: dict[str, Any] = {}

        def check_up(candidate: Candidate) -> dict[str, Any]:
            bench.close()  # the doctor has the memory for itself
            self._say(f"check-up by the doctor: {candidate.label}")
            return check(overrides_of(common, candidate), self.hardware, self.folder)

        def objecting(chosen: Setting) -> dict[str, str]:
            nonlocal health
            against, health = objections(plan, chosen, check_up)
            cache.save(self.folder, self.of, self.log, more)  # with the faults
            return against

        try:
            chosen, stopped = search.run(objecting)
        finally:
            bench.close()
            shutil.rmtree(self.folder / COMPILED, ignore_errors=True)
        found = conclude(plan, chosen)
        if missing := [note for note in health.get("notes", []) if note.startswith(NOT_EXAMINED)]:
            notes.append(f"check-up of {found.winner}: {'; '.join(missing)}")
        advice = self._advice(found, stopped, common, steps)
        advice.health = health
        notes += found.notes
        cache.save(self.folder, self.of, self.log, more)
        cache.write(advice, self.folder)
        return advice, notes

    def finish(self, advice: Advice, notes: list[str]) -> None:
        """Do what follows from the advice and was not done, and print it."""
        outputs = Outputs(
            advice, self.config, self.hardware, self.folder, _command(self.overrides, self.options), self._say
        )
        before = asdict(advice)
        if self.options.quality:
            outputs.test_quality(60 * self.options.budget_minutes - (time.monotonic() - self.began))
        if self.options.exhaustive:
            try:
                outputs.compare_with_all(self._grid)
            finally:
                shutil.rmtree(self.folder / GRID / COMPILED, ignore_errors=True)
        lines = outputs.known() if asdict(advice) == before else []
        lines = lines or outputs.write()
        print_advice(advice, self.console, [*notes, *outputs.notes])
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _grid(self) -> Grid:
        """Return every combination that fits."""
        space, common = space_of(self.overrides, self.hardware, self.options.goal, self.options.quality)
        folder = self.folder / GRID
        make_folder(folder)
        bench = self._bench(common, Log(), folder)
        prepare()
        return Grid([space.candidate(setting) for setting in space.product()], bench)

    def _bench(self, common: list[str], log: Log, folder: Path) -> Bench:
        return Bench(
            lambda candidate: Worker(candidate, common, folder),
            lambda: available_bytes(self.hardware.device),
            log,
            min(1.0, max(0.05, 60 * self.options.budget_minutes / BLOCKS)),
        )

    def _advice(self, found: Conclusion, stopped: str, common: list[str], steps: int) -> Advice:
        return Advice(
            recipe=self.config.recipe.name,
            goal=self.options.goal,
            overrides=common,
            machine=machine_name(self.hardware),
            hardware=self.hardware.facts(),
            versions={name: version for name, version in versions().items() if version},
            git=git_facts(),
            steps=steps,
            baseline=found.baseline,
            entries=found.entries,
            winner=found.winner,
            equal=found.equal,
            noise=found.noise,
            excluded=found.excluded,
            faults=self.faults,
            spent_s=self.log.spent_s,
            stopped=stopped,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )

    def _say(self, line: str) -> None:
        self.console.print(f"[{duration(time.monotonic() - self.began)}] {line}", markup=False, soft_wrap=True)
