"""Does scripts/advise.py find the fastest setting, and do its intervals hold the truth? On simulated machines.

  python benchmarks/advice_simulation.py                               all cells: some minutes on one core
  python benchmarks/advice_simulation.py only="quiet, 8" searches=20   the cells whose name has this: printed, not kept

The search and its timing are those of scripts/advise.py (``evidence/advice/search.py``, ``timing.py``); processes and
clock are simulated, so the true speed of every setting is known. The outcome of all cells is appended to
results/simulation/advice.jsonl, and the last one is the table of docs/advice.md.

A cell is a machine and a number of settings (those with one change; their combinations come on top), and two kinds of
truth: all settings are equal, so that each advice but the default is wrong; or one change in six is faster by 2 to 40 %
and the others are slower, by 12 % in the mean. Exit status: 1 where a cell misses a target.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evidence.advice.candidates import Candidate, Space
from evidence.advice.command import BLOCKS, AdviseOptions
from evidence.advice.schema import BUDGET, SPEED, UNDECIDED, Advice
from evidence.advice.search import Search
from evidence.advice.timing import Timer
from evidence.advice.worker import WARM_UP_S, Failed
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.files import PROJECT, write_text
from trainer.run.provenance import git_facts

RESULTS = PROJECT / "results" / "simulation" / "advice.jsonl"
PAGE = PROJECT / "docs" / "advice.md"
BEGIN, END = "<!-- simulation: made by benchmarks/advice_simulation.py -->", "<!-- end of simulation -->"
BUDGET_S = 60 * AdviseOptions().budget_minutes
START_S, FRESH_START_S, COMPILE_S = 1.0, 6.0, 12.0
"""To start a copy of the server, a new Python, and to compile (by 10 % more or less for each setting)."""
STEPS, STEP_S = 2000, 0.1
"""Of the user's run, and the default's seconds of one."""
NEAR = 1.05
"""How much slower than the best setting an advised one may be, in the run with the time to compile."""


@dataclass(frozen=True)
class Machine:
    """What disturbs its times. Spreads are standard deviations of logarithms."""

    blocks: float = 0.02
    """Between blocks of one process."""
    uneven: bool = False
    """Whether each setting has its own ``blocks``, from half to twice of this."""
    processes: float = 0.0
    """Between processes of one setting."""
    two_kinds: float = 0.0
    """By how much three in ten processes are slower for all their life."""
    drift: float = 0.0
    """Of the machine's speed over time."""
    drift_s: float = 1.0
    """In which the drift's correlation falls to 1/e."""
    spikes: float = 0.0
    """Share of the time in which blocks take 1.5 to 3 times as long."""
    spike_s: float = 0.0
    """How long such a time lasts; 0: one block."""
    clocks: float = 0.0
    """By how much the lower of two clocks is slower; it changes every ten seconds in the mean."""
    half_way: float = 1.0
    """Times the time for a step from a moment between a fifth and four fifths of the budget on."""


MACHINES = {
    "quiet: blocks 2 %": Machine(),
    "noisy: blocks 10 %, from 5 to 20 % by setting": Machine(0.1, uneven=True),
    "drift of 20 % in 2 s": Machine(drift=0.2, drift_s=2),
    "drift of 20 % in 20 s": Machine(drift=0.2, drift_s=20),
    "spikes: every tenth block 1.5 to 3 times": Machine(spikes=0.1),
    "processes 1.7 %, blocks 2 %": Machine(processes=0.017),
    "processes 1.7 %, blocks 8 %": Machine(0.08, processes=0.017),
    "processes 3 %, blocks 2 %": Machine(processes=0.03),
    "processes 3 %, blocks 8 %": Machine(0.08, processes=0.03),
}
HELD_OUT = {
    "two clocks, 15 % apart": Machine(clocks=0.15),
    "1.4 times slower from some moment on": Machine(0.03, half_way=1.4),
    "spikes in bursts of 5 s": Machine(spikes=0.1, spike_s=5),
    "processes 5 %, blocks 4 %": Machine(0.04, processes=0.05),
    "three in ten processes 10 % slower": Machine(two_kinds=0.1),
}
"""On which nothing in the search was chosen."""
QUIET = ("quiet: blocks 2 %", "spikes: every tenth block 1.5 to 3 times", "processes 1.7 %, blocks 2 %")
"""Of which 95 % of the answers must be right, of the others 80 %."""
SETTINGS = (8, 16, 32)


@dataclass
class Cell:
    """How many of the searches ended how."""

    machine: str
    settings: int
    searches: int
    wrong: int = 0
    """Of those among equals: another setting than the default is advised."""
    near: int = 0
    """Of the others: the advised setting is within 5 % of the best."""
    undecided: int = 0
    """It is not, and the answer says that it may not be."""
    finals: int = 0
    """Final rounds of all searches, whose intervals are printed."""
    covered: int = 0
    """Those that hold the truth."""
    advised: int = 0
    """Final rounds of advised settings."""
    advised_covered: int = 0
    minutes: float = 0.0
    """The mean of the longest tenth of searches."""


class Truth:
    """The settings of one search, and the true time of each."""

    def __init__(self, settings: int, equal: bool, chance: random.Random) -> None:
        values = {"precision": 2 if settings < 32 else 3, "compile": 1}
        left = settings - 1 - sum(values.values())
        values |= {f"option{number}": min(3, left - 3 * number) for number in range(math.ceil(left / 3))}
        choices = {key: [f"{key}={value}" for value in range(1, 1 + count)] for key, count in values.items()}
        words = {override: f"format{override[-1]}" for override in choices["precision"]}
        self.space = Space("fp32", False, choices, words)
        single = [override for several in choices.values() for override in several]
        faster = set(chance.sample(single, round(len(single) / 6)))
        self.logs = {each: math.log1p(chance.uniform(0.02, 0.4)) for each in single if each in faster}
        self.logs |= {each: -abs(chance.gauss(0, 0.15)) for each in single if each not in faster}
        self.beside = {(one, each): chance.gauss(0, 0.02) for one in choices["precision"] for each in single}
        self.equal, self.chance = equal, chance
        self.compiling: dict[str, float] = {}

    def log(self, candidate: Candidate) -> float:
        """Return the logarithm of its speed over the default's: that of each change, and of what a format changes."""
        if self.equal:
            return 0.0
        own = candidate.overrides
        beside = sum(self.beside[own[0], each] for each in own[1:]) if own and own[0] in self.space.words else 0.0
        return sum(self.logs[each] for each in own) + beside

    def step_s(self, candidate: Candidate) -> float:
        """Return its seconds of a step."""
        return STEP_S * math.exp(-self.log(candidate))

    def run_s(self, candidate: Candidate) -> float:
        """Return its seconds of the user's run."""
        return STEPS * self.step_s(candidate) + COMPILE_S * (candidate.compiles and not self.equal)

    def compile_s(self, candidate: Candidate) -> float:
        """Return the seconds that its first start compiles."""
        if self.equal or not candidate.compiles:
            return 0.0
        return self.compiling.setdefault(candidate.label, COMPILE_S * math.exp(self.chance.gauss(0, 0.1)))

    def best_s(self) -> float:
        """Return the seconds of the fastest run of all combinations."""
        if self.equal:
            return self.run_s(self.space.candidate())
        options = {key: values for key, values in self.space.choices.items() if key != "precision"}

        def fastest(first: Sequence[str], compiled: bool) -> float:
            chosen = list(first)
            for key, values in options.items():
                alone = self.log(self.space.candidate(first))
                gains = {each: self.log(self.space.candidate([*first, each])) - alone for each in values}
                best = max(values, key=gains.__getitem__)
                if compiled if key == "compile" else gains[best] > 0:
                    chosen.append(best)
            return self.run_s(self.space.candidate(chosen))

        firsts = [[], *([each] for each in self.space.choices["precision"])]
        return min(fastest(first, compiled) for first in firsts for compiled in (False, True))


class Simulation:
    """One search on a machine: its clock, its disturbances, and the processes that run on it."""

    def __init__(self, machine: Machine, truth: Truth, chance: random.Random) -> None:
        self.machine, self.truth, self.chance = machine, truth, chance
        self.now = 0.0
        self.spreads: dict[str, float] = {}
        self.known: set[str] = set()
        """Labels that have been compiled."""
        self._drift, self._lower, self._seen = chance.gauss(0, machine.drift), False, 0.0
        self._spike_ends = -1.0
        self._half_way = chance.uniform(0.2, 0.8) * BUDGET_S

    def search(self) -> Advice:
        """Return the answer."""
        facts: dict[str, Any] = {"hardware": {"name": "simulated"}, "versions": {}, "git": {}}
        advice = Advice("simulated", SPEED, [], "", STEPS, "simulated", **facts)
        timer = Timer(self.launch, lambda: math.inf, min(1.0, max(0.05, BUDGET_S / BLOCKS)), lambda: self.now)
        save, show = (lambda: None), (lambda line: None)
        healthy = {"faults": [], "missed": [], "healthy": True}
        Search(self.truth.space, advice, timer, BUDGET_S, lambda entry: healthy, save, show).run()
        return advice

    def launch(self, candidate: Candidate, fresh: bool) -> Any:
        """Stand for ``evidence.advice.worker.Worker``."""
        return Process(self, candidate, fresh)

    def spread(self, label: str) -> float:
        """Return the spread of the blocks of a setting."""
        own = self.machine.blocks
        return self.spreads.setdefault(label, own * 2 ** self.chance.uniform(-1, 1) if self.machine.uneven else own)

    def slow(self) -> float:
        """Return the factor of the time that a block which begins now takes, by what all processes share."""
        machine, chance, passed_s = self.machine, self.chance, self.now - self._seen
        self._seen, factor = self.now, 1.0
        if machine.drift:
            kept = math.exp(-passed_s / machine.drift_s)
            self._drift = kept * self._drift + machine.drift * math.sqrt(1 - kept * kept) * chance.gauss(0, 1)
            factor *= math.exp(self._drift)
        if machine.clocks:
            if chance.random() < (1 - math.exp(-2 * passed_s / 10)) / 2:
                self._lower = not self._lower
            factor *= 1 + machine.clocks * self._lower
        if machine.spike_s:
            if self.now >= self._spike_ends:
                pause_s = machine.spike_s * (1 - machine.spikes) / machine.spikes
                if chance.random() < 1 - math.exp(-passed_s / pause_s):
                    self._spike_ends = self.now + chance.expovariate(1 / machine.spike_s)
            factor *= chance.uniform(1.5, 3) if self.now < self._spike_ends else 1.0
        elif chance.random() < machine.spikes:
            factor *= chance.uniform(1.5, 3)
        return factor * (machine.half_way if self.now > self._half_way else 1.0)


class Process:
    """A simulated process of one setting."""

    def __init__(self, here: Simulation, candidate: Candidate, fresh: bool) -> None:
        self.here, self.candidate, self.fresh = here, candidate, fresh
        machine, chance = here.machine, here.chance
        self.step_s = here.truth.step_s(candidate) * math.exp(chance.gauss(0, machine.processes))
        if chance.random() < 0.3:
            self.step_s *= 1 + machine.two_kinds

    def start(self, limit_s: float) -> tuple[float, list[float], int]:
        """Warm up as ``Subject.start`` does."""
        here, began = self.here, self.here.now
        label, compiling_s = self.candidate.label, 0.0
        if label not in here.known:
            compiling_s = here.truth.compile_s(self.candidate)
        here.now += FRESH_START_S if self.fresh else START_S
        here.now += compiling_s
        if here.now - began > limit_s:
            here.now = began + limit_s
            raise Failed("too late", label, late=True)
        here.known.add(label)
        seconds = [compiling_s + self.block(1, math.inf), self.block(1, math.inf)]
        while sum(seconds[1:]) < WARM_UP_S and len(seconds) < 10:
            seconds.append(self.block(1, math.inf))
        return here.now - began, seconds, 1

    def block(self, steps: int, limit_s: float) -> float:
        """Take a block of steps."""
        here = self.here
        noise = math.exp(here.chance.gauss(0, here.spread(self.candidate.label)))
        seconds = steps * self.step_s * noise * here.slow()
        here.now += seconds
        return seconds

    def memory(self, limit_s: float) -> int:
        """Take a step; all settings need the same."""
        self.block(1, limit_s)
        return 1

    def close(self) -> None:
        """End."""


def searched(name: str, machine: Machine, settings: int, searches: int) -> Cell:
    """Return the outcome of so many searches of both kinds of truth; the same cell has the same seeds."""
    cell = Cell(name, settings, searches)
    minutes = []
    for number in range(searches):
        for equal in (True, False):
            chance = random.Random(f"{name}, {settings}, {number}, {equal}")
            truth = Truth(settings, equal, chance)
            here = Simulation(machine, truth, chance)
            advice = here.search()
            minutes.append(here.now / 60)
            winner, default = advice.entry(advice.winner).candidate, truth.space.candidate()
            if equal:
                cell.wrong += winner != default
            else:
                near = truth.run_s(winner) < NEAR * truth.best_s()
                cell.near += near
                cell.undecided += not near and advice.stopped in (UNDECIDED, BUDGET)
            for entry in advice.entries:
                if entry.interval and entry.run_interval:
                    run = truth.run_s(default) / truth.run_s(entry.candidate)
                    covered = entry.interval.low <= math.exp(truth.log(entry.candidate)) <= entry.interval.high
                    covered = covered and entry.run_interval.low <= run <= entry.run_interval.high
                    cell.finals, cell.covered = cell.finals + 1, cell.covered + covered
                    if entry.candidate == winner:
                        cell.advised, cell.advised_covered = cell.advised + 1, cell.advised_covered + covered
    longest = sorted(minutes)[-max(1, len(minutes) // 10) :]
    cell.minutes = sum(longest) / len(longest)
    return cell


def missed(cell: Cell) -> list[str]:
    """Return the targets that a cell misses."""
    least = 0.95 if cell.machine in QUIET else 0.8
    targets = {
        "coverage": cell.covered >= 0.93 * cell.finals,
        "wrong": cell.wrong <= 0.05 * cell.searches,
        "near": cell.near + cell.undecided >= least * cell.searches,
    }
    return [name for name, met in targets.items() if not met]


def table(record: dict[str, Any]) -> str:
    """Return the block of docs/advice.md."""
    cells = [Cell(**each) for each in record["cells"]]

    def percent(part: int, of: int) -> str:
        return f"{100 * part / of:.1f} %" if of else "none"

    columns = (
        "machine",
        "settings",
        "a wrong winner among equals",
        "within 5 % of the best",
        "of the others, not called decided",
        "final rounds",
        "whose intervals hold the truth",
        "of advised settings alone",
        "minutes",
    )
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cell in cells:
        far = cell.searches - cell.near
        measured = (
            percent(cell.wrong, cell.searches),
            percent(cell.near, cell.searches),
            f"{cell.undecided} of {far}",
            str(cell.finals),
            percent(cell.covered, cell.finals),
            percent(cell.advised_covered, cell.advised),
            f"{cell.minutes:.1f}",
        )
        held_out = " (held out)" * (cell.machine in HELD_OUT)
        rows.append(f"| {cell.machine}{held_out} | {cell.settings} | {' | '.join(measured)} |")
    finals, covered = (sum(getattr(cell, name) for cell in cells) for name in ("finals", "covered"))
    advised, held = (sum(getattr(cell, name) for cell in cells) for name in ("advised", "advised_covered"))
    return "\n".join(
        [
            f"`{record['command']}` at commit {record['git'].get('commit', 'unknown')[:10]}, {record['date']}: "
            f"{record['searches']} searches of each kind in each row. Of all {finals} final rounds "
            f"{percent(covered, finals)} of the intervals hold the truth, of the {advised} of advised settings "
            f"{percent(held, advised)}. Minutes: the mean of the longest tenth. Held out: nothing in the search was "
            "chosen on this machine.",
            "",
            *rows,
        ]
    )


def write(record: dict[str, Any]) -> None:
    """Append the outcome, and write its table into the page."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    head, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    write_text(PAGE, f"{head}{BEGIN}\n{table(record)}\n{END}{after.partition(END)[2]}")


@dataclass
class Options:
    """Of the command line."""

    only: str = ""
    searches: int = 300


def main(arguments: list[str]) -> int:
    """Simulate the cells that are asked for."""
    options, _ = parse(arguments, Options)
    cells, misses = [], 0
    for name, machine in (MACHINES | HELD_OUT).items():
        for settings in SETTINGS:
            if options.only in f"{name}, {settings}":
                cells.append(searched(name, machine, settings, options.searches))
                wrong = missed(cells[-1]) if name in MACHINES else []
                misses += bool(wrong)
                print(f"{cells[-1]}{f'  MISSED: {wrong}' * bool(wrong)}", flush=True)
    if not options.only:
        command = shlex.join(["python", "benchmarks/advice_simulation.py", *arguments])
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        facts = {"command": command, "date": date, "git": git_facts(), "searches": options.searches}
        write(facts | {"cells": [asdict(cell) for cell in cells]})
        print(f"written: {RESULTS.relative_to(PROJECT)}, {PAGE.relative_to(PROJECT)}")
    return int(misses > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
