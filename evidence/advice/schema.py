"""What the advice consists of: the candidates, what was measured of each, and the conclusion."""

from __future__ import annotations

import statistics
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.advice.candidates import Candidate
from mantissa.statistics import Interval
from trainer.files import read_object

MEASURED, FAILED, LEFT_OUT = "measured", "failed", "left out"
SPEED, MEMORY = GOALS = ("speed", "memory")
AHEAD, SEVERAL, UNDECIDED, BUDGET = "one is ahead", "several are equal", "not decided", "budget"

Turn = tuple[float, float]
"""Seconds of a step in two blocks that took turns: a candidate's, and the reference's."""


@dataclass
class Entry:
    """A candidate with what became of it. All its times are kept."""

    candidate: Candidate
    status: str = MEASURED
    """``measured``, ``failed`` or ``left out`` (not measured, and might be with more time)."""
    reason: str = ""
    """Why it was not measured, in words."""
    start_s: float = 0.0
    """From nothing to the end of the warm-up, at its last start."""
    warm_up_s: list[float] = field(default_factory=list)
    """Seconds of each step of its first warm-up, which compiles."""
    turns: list[Turn] = field(default_factory=list)
    """Of the search; where it is the reference, both numbers are its own."""
    processes: int = 0
    """In which ``turns`` were measured."""
    final: list[list[Turn]] = field(default_factory=list)
    """The turns of each pair of fresh processes in the final round."""
    memory_bytes: int | None = None
    """Peak of a step: allocated on a GPU; elsewhere the tensors that training keeps and the most that a step adds."""
    health: dict[str, Any] = field(default_factory=dict)
    """Of the doctor's check-up: ``faults``, ``missed``, ``healthy``."""
    speed: float | None = None
    """Throughput of steps over the baseline's: of the final round, or an estimate by the search."""
    run_speed: float | None = None
    """The same of whole runs of ``Advice.steps`` steps, the time to compile included; None for goal=memory."""
    interval: Interval | None = None
    """Of ``speed``, over pairs of fresh processes; None: no final round."""
    run_interval: Interval | None = None
    """The same of ``run_speed``."""
    compile_s: float = 0.0
    """Seconds that compiling took; 0: it does not compile."""
    pays_after_steps: int | None = None
    """Optimizer steps after which compiling has saved the time it took; None: not compiled, never, or not known."""

    @property
    def label(self) -> str:
        """Of the candidate."""
        return self.candidate.label

    @property
    def timed(self) -> bool:
        """Whether it was measured without a failure."""
        return self.status == MEASURED and bool(self.turns)

    @property
    def step_s(self) -> list[float]:
        """Seconds of one optimizer step in each block of the search."""
        return [own_s for own_s, _ in self.turns]

    @property
    def refused(self) -> str:
        """Why it may not be advised, as a sentence; empty: it may."""
        faults = "; ".join(self.health.get("faults", ()))
        return faults and f"{self.label} is not advised, because the doctor found a fault in it: {faults}"

    def fastest_s(self) -> float:
        """Return the seconds of a step, of the fastest: other programs may have slowed down single ones."""
        return min([*self.step_s, *(self.warm_up_s[1:] or self.warm_up_s)], default=0.0)

    def compiling_s(self) -> float:
        """Return the seconds by which its first steps took longer than later ones; 0: it does not compile."""
        if not (self.candidate.compiles and self.timed):
            return 0.0
        return max(0.0, sum(self.warm_up_s) - len(self.warm_up_s) * statistics.median(self.step_s))


@dataclass
class Advice:
    """The answer of scripts/advise.py, and what it is based on. As JSON it is ``advice.json``."""

    recipe: str
    goal: str
    """``speed`` or ``memory``."""
    overrides: list[str]
    """The user's own, and what the default needs to fit into the memory."""
    command: str
    """That was typed."""
    steps: int
    """Optimizer steps of the user's run."""
    machine: str
    """Name of the device."""
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    git: dict[str, str]
    budget_minutes: float = 0.0
    date: str = ""
    """Of the measurement, in ISO format and UTC."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names the search that came to the conclusion, in MLflow."""
    entries: list[Entry] = field(default_factory=list)
    """All candidates: the winner, then by the speed of a whole run (goal=memory: by memory)."""
    spent_s: float = 0.0
    baseline: str = ""
    """The label of the reference that ratios are over: train.py's default with the user's options; where that fails,
    the first candidate that works."""
    winner: str = ""
    """The label of the advised candidate; empty: the search has not ended."""
    equal: list[str] = field(default_factory=list)
    """Labels of other candidates that are not clearly slower (or larger) than the winner."""
    stopped: str = ""
    """Why it ended: ``one is ahead``, ``several are equal``, ``not decided``, ``budget``."""
    notes: list[str] = field(default_factory=list)
    """For the user, in sentences."""

    @property
    def mixed(self) -> bool:
        """Whether some settings compile and some do not, so that whole runs are another matter than steps."""
        timed = [entry for entry in self.entries if entry.run_speed is not None]
        return len({entry.candidate.compiles for entry in timed}) > 1

    def entry(self, label: str) -> Entry:
        """Return the entry of a candidate."""
        return next(entry for entry in self.entries if entry.label == label)


def read(path: Path) -> Advice | None:
    """Return the advice that was written; None: there is none that this version can read."""
    content = read_object(path)
    try:
        return Advice(**content | {"entries": [_entry(each) for each in content["entries"]]})
    except (KeyError, TypeError):
        return None


def _entry(content: dict[str, Any]) -> Entry:
    candidate = content["candidate"] | {"overrides": tuple(content["candidate"]["overrides"])}
    found = {name: content[name] and Interval(**content[name]) for name in ("interval", "run_interval")}
    return Entry(**content | found | {"candidate": Candidate(**candidate)})
