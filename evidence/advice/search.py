"""The search for the fastest setting: single changes beside the default, combinations, and six pairs that confirm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evidence.advice.candidates import Candidate, Space
from evidence.advice.timing import Times
from mantissa.display import counted, duration
from mantissa.verdict.report import times
from mantissa.verdict.runs import interleave
from mantissa.verdict.statistics import Interval, ratio_interval
from trainer.errors import RunError, first_line

BLOCKS, FINAL_BLOCKS = 10, 15
"""Blocks of steps in a process: in the search, and in the pairs that confirm."""
PAIRS, LEAST_PAIRS = 6, 3
"""Number of pairs of fresh processes that confirm the winner, and where there is no time for all of them. Nothing
that they measure changes the winner or their number: otherwise the interval would be too narrow."""
RENEW_S = 60.0
"""Seconds after which the default is timed again, so that candidates and default see the same load."""
HELPS = 1.02
"""Times as fast as without it that a change must be to be combined with others. Processes of one setting differ by
1.7 %."""
MOST_FAULTS = 3
"""Number of settings in which the doctor finds a fault, after which the default is advised."""
NO_TIME = "there was no time for it"


@dataclass
class Entry:
    """A candidate with what became of it."""

    candidate: Candidate
    times: Times | None = None
    """Times in the search; None: it failed."""
    reference_s: float = 0.0
    """Seconds of a step of the reference at about that time."""
    failure: str = ""
    """Reason why it failed, in words."""
    health: dict[str, Any] = field(default_factory=dict)
    """Findings of the doctor's check-up: ``faults``, ``missed``, ``healthy``."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of a step, its own and the reference's, in the pairs of fresh processes that confirm it."""

    @property
    def label(self) -> str:
        """Label of the candidate."""
        return self.candidate.label

    @property
    def measured(self) -> Times:
        """Its times; it has not failed."""
        assert self.times
        return self.times

    @property
    def compile_s(self) -> float:
        """Seconds that compiling took."""
        return self.times.compile_s if self.times else 0.0

    @property
    def fault(self) -> str:
        """Fault for which it is not advised, as a sentence; empty: none is known."""
        faults = "; ".join(self.health.get("faults", ()))
        return faults and f"{self.label} is not advised, because the doctor found a fault in it: {faults}"


class Machine(Protocol):
    """What candidates are measured on."""

    def clock(self) -> float:
        """Return seconds of a clock."""

    def too_large(self, candidate: Candidate) -> str:
        """Return why a candidate is not to be started: its forecast memory; empty: it fits."""

    def time(self, candidate: Candidate, blocks: int, limit_s: float) -> Times:
        """Time a candidate by so many blocks in a fresh process; RunError: it failed, or took more seconds."""

    def check_up(self, candidate: Candidate) -> dict[str, Any]:
        """Examine a setting by the doctor; return an entry's ``health``."""


@dataclass
class Search:
    """Measures candidates, and says which one is advised."""

    space: Space
    machine: Machine
    steps: int
    """Number of optimizer steps of the user's run, over which compile time counts."""
    time_budget_s: float
    entries: dict[str, Entry] = field(default_factory=dict)
    """Candidates that were started, by label."""

    def __post_init__(self) -> None:
        self._began = self.machine.clock()
        self._renewed_at = 0.0
        self._process_s = 0.0

    def print(self, line: str) -> None:
        """Print what is done, behind the time that has passed."""
        print(f"[{duration(self.machine.clock() - self._began)}] {line}", flush=True)

    def run(self) -> Entry:
        """Measure, and return the entry of the advised candidate.

        Raises:
            RunError: no candidate works.
        """
        # The default first, which the others are compared with; then each change by itself.
        self._try("reference", Candidate())
        singles = self.space.singles()
        for number, candidate in enumerate(singles, 1):
            self._try(f"single change {number} of {len(singles)}", candidate)
        # The changes that help, combined one after the other, the most helpful first.
        best = self.reference
        for entry in self.faster():
            best = max(best, entry, key=self.speed)
            both = self.space.candidate([*best.candidate.overrides, *entry.candidate.overrides])
            combined = self._try("combination", both)
            if combined and combined.times and self.speed(combined) > HELPS * self.speed(best):
                best = combined
        # What was found so is the winner of many, and by chance too fast: fresh processes decide.
        return self._confirmed()

    @property
    def reference(self) -> Entry:
        """Entry that ratios are over: the default; where it fails, the first candidate that works.

        Raises:
            RunError: none works.
        """
        for entry in self.entries.values():
            if entry.times:
                return entry
        first = next(iter(self.entries.values()))
        raise RunError(f"no candidate can be advised; the first error: {first.label}: {first.failure}")

    def speed(self, entry: Entry, whole: bool = True) -> float:
        """Return its speed in the search over the reference's; ``whole``: of a run, compile time included."""
        return self._ratio(entry, entry.measured.step_s, entry.reference_s, whole)

    def interval(self, entry: Entry, whole: bool = True) -> Interval | None:
        """Return the 95 % interval of its speed over pairs of fresh processes; None: it was not confirmed."""
        ratios = [self._ratio(entry, *pair, whole) for pair in entry.pairs]
        return ratio_interval(ratios) if len(ratios) > 1 else None

    def pays_after(self, entry: Entry) -> int | None:
        """Return the optimizer steps after which compiling has saved the time that it took; None: never."""
        saved_s = self.reference.measured.step_s * (1 - 1 / self.speed(entry, whole=False))
        return math.ceil(entry.compile_s / saved_s) if saved_s > 0 else None

    def _ratio(self, entry: Entry, own_s: float, reference_s: float, whole: bool) -> float:
        if whole:
            own_s += entry.compile_s / self.steps
            reference_s += self.reference.compile_s / self.steps
        return reference_s / own_s

    def faster(self) -> list[Entry]:
        """Return what is faster than the reference so far, the fastest first."""
        faster = [entry for entry in self.entries.values() if entry.times and self.speed(entry) > HELPS]
        return sorted(faster, key=self.speed, reverse=True)

    def _try(self, kind: str, candidate: Candidate) -> Entry | None:
        """Measure a candidate, if it is new, forecast to fit, and there is time; return its entry."""
        label = candidate.label
        if label in self.entries:
            return self.entries[label]
        reference = self.reference if any(entry.times for entry in self.entries.values()) else None
        why = self.machine.too_large(candidate)
        if reference and self._spare_s < self._process_s:
            why = NO_TIME
        if why:
            self.space.left_out[label] = why
            return None
        if reference and self.machine.clock() - self._renewed_at > RENEW_S:
            self._time_again(reference)
        self.print(f"{kind}: {label}")
        entry, began = Entry(candidate), self.machine.clock()
        self.entries[label] = entry
        try:
            entry.times = self.machine.time(candidate, BLOCKS, self._spare_s if reference else math.inf)
        except RunError as error:
            entry.failure = first_line(error)
            return entry
        self._process_s = max(self._process_s, self.machine.clock() - began - entry.compile_s)
        if reference:
            entry.reference_s = reference.measured.step_s
        else:
            self._renew(entry, entry.times)
        return entry

    @property
    def _end(self) -> float:
        return self._began + self.time_budget_s

    @property
    def _spare_s(self) -> float:
        """Seconds until what is left is for the check-up and the pairs, which keep half of the budget at most."""
        pairs_s = min(2 * PAIRS * self._process_s, max(self.time_budget_s / 2, 2 * LEAST_PAIRS * self._process_s))
        return self._end - self.machine.clock() - pairs_s

    def _time_again(self, reference: Entry) -> None:
        """Time the reference again; where that fails its earlier times stay."""
        try:
            self._renew(reference, self.machine.time(reference.candidate, BLOCKS, math.inf))
        except RunError as error:
            self._renewed_at = self.machine.clock()
            self.space.notes.append(f"{reference.label} failed when it was timed again: {first_line(error)}")

    def _renew(self, reference: Entry, times: Times) -> None:
        self._renewed_at = self.machine.clock()
        reference.times = replace(times, compile_s=max(reference.compile_s, times.compile_s))
        reference.reference_s = times.step_s

    def _confirmed(self) -> Entry:
        """Return what is advised: the fastest if the doctor finds no fault in it and fresh pairs confirm it."""
        faulty = 0
        for entry in self.faster():
            if faulty == MOST_FAULTS:
                self.space.notes.append(f"{faulty} settings have a fault, so no further one is examined or advised")
                break
            self.print(f"check-up by the doctor: {entry.label}")
            entry.health = self.machine.check_up(entry.candidate)
            if missed := entry.health.get("missed"):
                self.space.notes.append(f"check-up of {entry.label}: {'; '.join(missed)}")
            if entry.fault:
                faulty += 1
                self.space.notes.append(entry.fault)
                continue
            try:
                return entry if self._confirm(entry) else self.reference
            except RunError as error:
                entry.failure = first_line(error)
                self.space.notes.append(
                    f"{entry.label} was the fastest, and failed when it was measured again: {entry.failure}"
                )
        return self.reference

    def _confirm(self, entry: Entry) -> bool:
        """Time a setting beside the reference in fresh pairs; return whether its interval in a whole run is above 1."""
        reference = self.reference
        seconds: dict[str, list[float]] = {reference.label: [], entry.label: []}
        began = self.machine.clock()
        for turn, (side, pair) in enumerate(interleave([reference, entry], range(PAIRS))):
            if turn % 2 == 0:
                if pair >= LEAST_PAIRS and self.machine.clock() + (self.machine.clock() - began) / pair > self._end:
                    self.space.notes.append(f"there was time for {pair} of {PAIRS} pairs")
                    break
                self.print(f"pair {pair + 1} of {PAIRS} of fresh processes: {reference.label}, {entry.label}")
            seconds[side.label].append(self.machine.time(side.candidate, FINAL_BLOCKS, math.inf).step_s)
        entry.pairs = list(zip(seconds[entry.label], seconds[reference.label], strict=True))
        interval = self.interval(entry)
        assert interval is not None
        if interval.low > 1:
            return True
        speed = f"{times(interval)} as fast as {reference.label}"
        if entry.compile_s:
            speed += f" in a run of {counted(self.steps, 'step')}, compile time included"
        self.space.notes.append(f"{entry.label} was the fastest, which fresh processes did not confirm: {speed}")
        return False
