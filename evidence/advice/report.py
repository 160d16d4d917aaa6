"""The advice in words: one sentence, the commands that follow from it, and a table of what was measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evidence.advice.candidates import Candidate
from evidence.advice.search import NO_TIME, Entry, Search
from evidence.advice.timing import TIMED, WHOLE
from evidence.runs import merge_overrides
from mantissa.display import counted, duration, size
from mantissa.verdict.page import Report, Section, measured_on
from mantissa.verdict.report import times
from trainer.config.compose import key_of

NOT_ADVISED = ("output_dir", "run_name", "resume", "tracking", "checkpoint", "profiler")
"""Keys and groups that say where and how a run is recorded: those of the advice are not those of later runs."""

_COMPOSED = (
    f"Of a step of more than {WHOLE} microbatches, {TIMED} were timed with the update and {TIMED} without it; the time "
    "of the step is computed from both."
)

EQUAL_LOSS = "Does it train as well, and which setting needs the least time to an equal loss?"


def overrides_of(given: Sequence[str], candidate: Candidate) -> list[str]:
    """Return the overrides of train.py that make up a candidate, the user's own (``given``) before it."""
    kept = [text for text in given if key_of(text).partition(".")[0] not in NOT_ADVISED]
    return merge_overrides(kept, candidate.overrides)


@dataclass
class Advice:
    """The answer of scripts/advise.py, and what it is based on."""

    search: Search
    winner: Entry
    recipe: str
    overrides: list[str]
    """Overrides of all candidates: the user's own, and what the default needs to fit into the memory."""
    command: str
    """Command that was typed."""
    seconds: float
    """Time that it took."""
    facts: dict[str, Any]
    """Hardware, versions and commit."""

    @property
    def mixed(self) -> bool:
        """Whether some settings compile and some do not, so that whole runs are another matter than steps."""
        return any(entry.compile_s for entry in self.search.entries.values())

    @property
    def alone(self) -> bool:
        """Whether nothing was started beside the reference, so that nothing is known of other settings."""
        return len(self.search.entries) == 1

    def training(self) -> str:
        """Return the command that trains with the winner."""
        return shlex.join(["python", "scripts/train.py", *overrides_of(self.overrides, self.winner.candidate)])

    def comparison(self) -> str:
        """Return the command that tests whether the winner trains as well as the reference.

        The next fastest settings are trained, too, because another one may be sooner at the reference's final loss.
        """
        common = [text for text in overrides_of(self.overrides, Candidate()) if key_of(text) != "seed"]
        settings = [self.winner, *(one for one in self.search.faster() if not (one.fault or one.failure))]
        fastest = list({entry.label: entry for entry in settings}.values())
        roles = {"baseline": self.search.reference, **dict(zip(("advised", "second", "third"), fastest, strict=False))}
        arms = [f"arm.{role}={' '.join(entry.candidate.overrides)}" for role, entry in roles.items()]
        return shlex.join(["python", "scripts/compare.py", *common, *arms])

    def sentence(self) -> str:
        """Return the advice in one sentence of measured facts."""
        search, winner, base = self.search, self.winner, self.search.reference
        some = NO_TIME in search.space.left_out.values()
        run = f"in a run of {counted(search.steps, 'step')}"
        if self.alone and some:
            first = next(label for label, why in search.space.left_out.items() if why == NO_TIME)
            return f"{base.label} alone was measured: the time budget was too short to try {first}"

        # Nothing is faster, among what was measured.
        if winner is base:
            faulty = any(entry.fault for entry in search.entries.values())
            words = [f"{base.label}: no setting"]
            words += ["that can be advised"] if faulty else []
            words += ["is clearly faster here"]
            words += [f"among those measured in {duration(self.seconds)} min"] if some else []
            words += [run] if self.mixed else []
            return " ".join(words)

        # By how much the winner is, and what that rests on.
        interval, whole = search.interval(winner, whole=False), search.interval(winner)
        assert interval is not None and whole is not None  # noqa: PT018
        healthy = ", numerics healthy" if winner.health.get("healthy") else ""
        clauses = [
            f"{winner.label}: {times(interval)} as fast as {base.label}, {_memory(winner, base)}{healthy}",
        ]
        if winner.compile_s > base.compile_s:
            clauses.append(f"compiling pays off after {search.pays_after(winner)} steps")
        if self.mixed:
            clauses.append(f"{times(whole)} as fast {run}, compile time included")
        if some:
            clauses.append("not all settings were measured")
        return "; ".join(clauses)

    def report(self) -> Report:
        """Return the report for a terminal and as a page."""
        sections = [Section("Train with it", text=self.training())]
        if self.winner is not self.search.reference:
            sections.append(Section(EQUAL_LOSS, [EQUAL_LOSS], text=self.comparison()))
        spent = f"Measured for {duration(self.seconds)} min on {self.facts['hardware']['name']}."
        sections.insert(0, Section("What was measured", [spent], self.remarks(), self.rows()))
        origin = measured_on(self.facts["hardware"], self.facts["versions"], self.facts["git"])
        title = f"{self.recipe} on {self.facts['hardware']['name']}"
        return Report("Advice", title, [f"{self.sentence()}."], self.command, origin, sections)

    def remarks(self) -> list[str]:
        """Return what was not measured and why, and what compiling took."""
        space, entries = self.search.space, self.search.entries.values()
        return [
            *(f"failed: {entry.label} ({entry.failure})" for entry in entries if entry.failure),
            *(f"left out: {label} ({why})" for label, why in space.left_out.items()),
            *(f"compiling took {entry.compile_s:.1f} s: {entry.label}" for entry in entries if entry.compile_s),
            *(f"Note: {note}." for note in space.notes),
            *([_COMPOSED] if any(entry.times and entry.times.composed for entry in entries) else []),
        ]

    def rows(self) -> list[list[str]]:
        """Return the head of the table and the measured entries, the advised one first, then the fastest.

        A speed without an interval is of one process.
        """
        search, run = self.search, [f"run of {self.search.steps}"] if self.mixed else []
        table = [["setting", "speed", *run, "step, ms", "memory"]]
        timed = [entry for entry in search.entries.values() if entry.times]
        for entry in sorted(timed, key=lambda one: (one is not self.winner, -search.speed(one))):
            interval, whole = search.interval(entry, whole=False), search.interval(entry)
            setting = f"{entry.label} (advised)" if entry is self.winner and not self.alone else entry.label
            speed = times(interval) if interval else f"about {search.speed(entry, whole=False):.3g}x"
            of_run = [f"{whole.mean if whole else search.speed(entry):.3g}x"] if self.mixed else []
            step = f"{1e3 * entry.measured.step_s:.4g}"
            table.append([setting, speed, *of_run, step, size(entry.measured.memory_bytes)])
        return table

    def content(self) -> dict[str, Any]:
        """Return the advice for ``advice.json``."""
        interval = self.search.interval(self.winner)
        return {
            "recipe": self.recipe,
            "command": self.command,
            "overrides": self.overrides,
            "steps": self.search.steps,
            "seconds": self.seconds,
            "baseline": self.search.reference.label,
            "winner": self.winner.label,
            "speed": interval and asdict(interval),
            "training": self.training(),
            "entries": [{"label": entry.label} | asdict(entry) for entry in self.search.entries.values()],
            "notes": self.search.space.notes,
            **self.facts,
        }


def _memory(entry: Entry, base: Entry) -> str:
    change = entry.measured.memory_bytes / base.measured.memory_bytes - 1
    if abs(change) < 0.01:
        return "the same memory"
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'} memory"
