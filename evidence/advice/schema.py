"""What the advice consists of: the candidates, what was measured of each, and the conclusion."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from evidence.intervals import Interval

MEASURED, FAILED, HUNG, LEFT_OUT = "measured", "failed", "hung", "left out"


@dataclass(frozen=True)
class Candidate:
    """One setting of the recipe."""

    label: str
    """What differs from the baseline, in the words of the command line: ``bf16 + compile, micro_batch_size=32``."""
    overrides: tuple[str, ...]
    """Of train.py; they come after the user's own."""
    threads: int | None = None
    """Of torch's operators on a CPU; None: torch's default."""


@dataclass
class Entry:
    """A candidate with what became of it."""

    candidate: Candidate
    status: str = MEASURED
    """``measured``, ``failed``, ``hung`` or ``left out`` (never run)."""
    reason: str = ""
    """Why it was not measured, in words."""
    rounds: int = 0
    """Rounds of any kind in which it was timed, with the final one."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of one optimizer step in each repeat of its last round."""
    speed: Interval | None = None
    """Throughput over the baseline's: geometric mean and 95 % interval of ratios of alternating blocks."""
    memory_bytes: int | None = None
    """Peak of a step: allocated on a GPU; elsewhere the tensors that training keeps and the most that a step adds."""
    compile_s: float = 0.0
    """Seconds that the first steps took longer than later ones; compilation, where the candidate compiles."""
    pays_after_steps: int | None = None
    """Optimizer steps after which compiling has saved the time it took; None: not compiled, never, or not known."""
    never_pays: bool = False
    """Whether compiling makes no step faster."""


@dataclass
class Advice:
    """The answer of scripts/advise.py, and what it is based on. As JSON it is ``advice.json``."""

    recipe: str
    goal: str
    """``speed`` or ``memory``."""
    overrides: list[str]
    """The user's own."""
    machine: str
    """See ``evidence.claims.reproduce.machine_name``."""
    hardware: dict[str, Any]
    versions: dict[str, str]
    git: dict[str, str]
    baseline: str
    """The label of the candidate that ratios are over: train.py's default with the user's options; where that
    fails, the first that works."""
    entries: list[Entry]
    """All candidates, the best first."""
    winner: str
    """The label of the advised candidate."""
    equal: list[str]
    """Labels of other candidates that are not clearly slower (or larger) than the winner."""
    noise: float
    """Spread of the null pairs, in which the baseline runs against itself: highest over lowest ratio, minus 1."""
    spent_s: float
    stopped: str
    """Why it ended: ``one is ahead``, ``several are equal``, ``budget``."""
    health: dict[str, Any] = field(default_factory=dict)
    """Of the doctor's quick check-up of the winner: ``faults`` and ``notes``."""
    quality: dict[str, Any] = field(default_factory=dict)
    """Of an equivalence test of the winner against the baseline; empty without ``quality=true``."""
    date: str = ""
    """Of the measurement, in ISO format and UTC."""
    exhaustive: dict[str, Any] = field(default_factory=dict)
    """Of the comparison with the whole grid; empty without ``exhaustive=true``."""

    @property
    def key(self) -> str:
        """What names the measurement, the same whatever is found out about the winner later."""
        of = [self.recipe, self.goal, self.overrides, self.machine, self.versions, self.git, self.date]
        times = sorted([entry.candidate.label, entry.step_s] for entry in self.entries)
        return hashlib.sha256(json.dumps([*of, times]).encode()).hexdigest()[:32]

    def entry(self, label: str) -> Entry:
        """Return the entry of a candidate."""
        return next(entry for entry in self.entries if entry.candidate.label == label)
