"""What the advice consists of: the candidates, what was measured of each, and the conclusion."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from evidence.intervals import Interval

MEASURED, FAILED, HUNG, LEFT_OUT = "measured", "failed", "hung", "left out"


FINAL = "final"
"""The kind of the round after the choice, which alone gives the ratio that is reported."""
TWIN = " (again)"
"""Ends the label of the baseline's second process."""


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
    run_speed: Interval | None = None
    """The same of whole runs of ``Advice.steps`` steps, the time to compile included; None for goal=memory."""
    memory_bytes: int | None = None
    """Peak of a step: allocated on a GPU; elsewhere the tensors that training keeps and the most that a step adds."""
    compile_s: float = 0.0
    """Seconds that compiling took; 0: it does not compile."""
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
    steps: int
    """Optimizer steps of the user's run."""
    baseline: str
    """The label of the candidate that ratios are over: train.py's default with the user's options; where that
    fails, the first that works."""
    entries: list[Entry]
    """All candidates: the winner, then by the speed of a whole run (goal=memory: by memory)."""
    winner: str
    """The label of the advised candidate."""
    equal: list[str]
    """Labels of other candidates that are not clearly slower (or larger) than the winner."""
    noise: float
    """Spread of the null pairs, in which the baseline runs against itself: highest over lowest ratio, minus 1."""
    spent_s: float
    stopped: str
    """Why it ended: ``one is ahead``, ``several are equal``, ``budget``."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Labels that may not be advised, with the reasons, as sentences."""
    faults: dict[str, list[str]] = field(default_factory=dict)
    """What the doctor found in some of these."""
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


@dataclass
class Record:
    """What is known of one candidate."""

    status: str = MEASURED
    reason: str = ""
    warm_up_s: list[float] = field(default_factory=list)
    """Seconds of each step of its first start's warm-up."""
    start_s: float = 0.0
    memory_bytes: int | None = None

    fastest_s: float = 0.0
    """Of a step, in any block or in the warm-up after its first step."""

    def step_s(self) -> float:
        """Return the seconds of a step, of the fastest: other programs may have slowed down single ones."""
        return self.fastest_s or min(self.warm_up_s[1:] or self.warm_up_s)


@dataclass
class Round:
    """The step times of one round, in seconds; a candidate that left the round early has fewer."""

    kind: str
    times: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Log:
    """Everything measured for the advice. As JSON it is what an interrupted advice continues from."""

    records: dict[str, Record] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    spent_s: float = 0.0

    def ok(self, label: str) -> bool:
        """Return whether a candidate was measured without a failure."""
        record = self.records.get(label)
        return record is not None and record.status == MEASURED and bool(self.times(label))

    def times(self, label: str) -> list[float]:
        """Return a candidate's step times in its last round."""
        return next((done.times[label] for done in reversed(self.rounds) if done.times.get(label)), [])

    @property
    def final(self) -> list[Round]:
        """The last final round; empty: there was none."""
        return [done for done in self.rounds if done.kind == FINAL][-1:]

    def compile_s(self, label: str) -> float:
        """Return the seconds by which a candidate's first steps took longer than later ones; 0: it does not compile."""
        record = self.records.get(label)
        if record is None or not record.warm_up_s or not compiles(label):
            return 0.0
        later_s = [step_s for done in self.rounds if done.kind != FINAL for step_s in done.times.get(label, [])]
        step_s = statistics.median(later_s) if later_s else record.step_s()
        return max(0.0, sum(record.warm_up_s) - len(record.warm_up_s) * step_s)

    def pairs(self, label: str, over: str, rounds: Sequence[Round] | None = None) -> list[tuple[float, float]]:
        """Return the seconds of a step of two candidates, for each repeat in which both took a block.

        Args:
            label: of one.
            over: that of the other.
            rounds: that count; None: all but the final ones, whose times nothing is chosen by.
        """
        if rounds is None:
            rounds = [done for done in self.rounds if done.kind != FINAL]
        both = ((done.times.get(label, []), done.times.get(over, [])) for done in rounds)
        return [pair for own, other in both for pair in zip(own, other, strict=False)]

    def ratios(self, label: str, over: str, rounds: Sequence[Round] | None = None) -> list[float]:
        """Return how many times as fast as ``over`` its steps are, one number for each of the ``pairs``."""
        return [other / own for own, other in self.pairs(label, over, rounds)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Log:
        """Return what ``to_dict`` was given."""
        records = {label: Record(**record) for label, record in content["records"].items()}
        return cls(records, [Round(**each) for each in content["rounds"]], content["spent_s"])


def compiles(label: str) -> bool:
    """Return whether the candidate of this label runs under torch.compile."""
    return "compile" in label.removesuffix(TWIN).partition(",")[0].split(" + ")
