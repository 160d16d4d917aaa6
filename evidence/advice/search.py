"""The search for the fastest setting: single changes beside the default, combinations, and six pairs that confirm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evidence.advice.candidates import Candidate, Space
from evidence.advice.worker import Failed, Worker
from mantissa.compare import interleave
from mantissa.statistics import Interval, ratio_interval
from trainer.errors import RunError

MEASURED, FAILED, LEFT_OUT = "measured", "failed", "left out"
TURNS, FINAL_TURNS = 5, 7
"""Blocks of each side in a pair of processes: in the search, and in the pairs that confirm."""
PAIRS = 6
"""Number of pairs of fresh processes that confirm the winner. Nothing that they measure changes it: otherwise the
interval would be too narrow."""
HELPS = 1.02
"""Times as fast as without it that a change must be to be combined with others. Processes of one setting differ by
1.7 %."""
MOST_FAULTS = 3
"""Number of settings in which the doctor finds a fault, after which the default is advised."""
BLOCK_S = 0.3
"""Seconds of a block, unless a single step takes longer."""
LIMIT_S, PATIENCE = 1800.0, 20.0
"""Seconds that a start may take; and times the expected time after which a block counts as hung."""
ROOM = 1.25
"""Times the memory of a process that must be free for a second one beside it."""

Turn = tuple[float, float]
"""Seconds of a step in two blocks that took turns: a candidate's, and the reference's."""


@dataclass
class Entry:
    """A candidate with what became of it."""

    candidate: Candidate
    status: str = MEASURED
    reason: str = ""
    """Reason why it was not measured, in words."""
    turns: list[Turn] = field(default_factory=list)
    """Blocks of the search; where it is the reference, both numbers are its own."""
    compile_s: float = 0.0
    """Seconds by which its first steps took longer than later ones; 0: it does not compile."""
    memory_bytes: int | None = None
    """Peak of a step: allocated on a GPU; elsewhere the tensors that training keeps and the most that a step adds."""
    health: dict[str, Any] = field(default_factory=dict)
    """What the doctor's check-up found: ``faults``, ``missed``, ``healthy``."""
    pairs: list[list[Turn]] = field(default_factory=list)
    """Blocks of each pair of fresh processes that confirm it."""

    @property
    def label(self) -> str:
        """Label of the candidate."""
        return self.candidate.label

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step, the median of the blocks."""
        return statistics.median(own_s for own_s, _ in self.turns)

    @property
    def fault(self) -> str:
        """Fault for which it is not advised, as a sentence; empty: none is known."""
        faults = "; ".join(self.health.get("faults", ()))
        return faults and f"{self.label} is not advised, because the doctor found a fault in it: {faults}"


@dataclass
class Search:
    """Measures candidates, and says which one is advised."""

    space: Space
    steps: int
    """Number of optimizer steps of the user's run, over which compile time counts."""
    budget_s: float
    launch: Callable[[Candidate], Worker]
    free_bytes: Callable[[], float]
    """Returns the device's memory that a further process may take."""
    check_up: Callable[[Entry], dict[str, Any]]
    """Examines a setting by the doctor; returns the entry's ``health``."""
    say: Callable[[str], None]
    clock: Callable[[], float]
    entries: dict[str, Entry] = field(default_factory=dict)
    """Every candidate so far, by its label."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""

    def __post_init__(self) -> None:
        self._end = self.clock() + self.budget_s
        self._apart = False  # whether the memory holds one process only: then they run one after the other
        self._running: dict[str, Worker] = {}
        self._held_bytes = 0
        self._start_s = 0.0

    # --- the search ---

    def run(self) -> Entry:
        """Measure, and return the entry of the advised candidate.

        Raises:
            RunError: no candidate works.
        """
        try:
            self._try("default", self.space.candidate())
            singles = self.space.singles()
            for candidate in singles:
                self._try("single change", candidate)
            best = self.reference
            helpful = [entry for entry in self.entries.values() if entry.turns and self.speed(entry) > HELPS]
            for entry in sorted(helpful, key=self.speed, reverse=True):
                best = max(best, entry, key=self.speed)
                combined = self._try(
                    "combination", self.space.candidate([*best.candidate.overrides, *entry.candidate.overrides])
                )
                if combined and combined.turns and self.speed(combined) > HELPS * self.speed(best):
                    best = combined
            return self._confirmed()
        finally:
            self._close()

    @property
    def reference(self) -> Entry:
        """Entry that ratios are over: the default; where it fails, the first candidate that works.

        Raises:
            RunError: none has worked.
        """
        for entry in self.entries.values():
            if entry.turns:
                return entry
        first = next(iter(self.entries.values()))
        raise RunError(f"no candidate can be advised; the first error: {first.label}: {first.reason}")

    def ratio(self, entry: Entry, turn: Turn, whole: bool = True) -> float:
        """Return how many times as fast as the reference it is; ``whole``: in a whole run, compile time included."""
        own_s, reference_s = turn
        if whole:
            own_s += entry.compile_s / self.steps
            reference_s += self.reference.compile_s / self.steps
        return reference_s / own_s

    def speed(self, entry: Entry, whole: bool = True) -> float:
        """Return its speed in the search over the reference's.

        It is the median of the turns, on which a single block that was disturbed has little effect.
        """
        return statistics.median(self.ratio(entry, turn, whole) for turn in entry.turns)

    def interval(self, entry: Entry, whole: bool = True) -> Interval | None:
        """Return the 95 % interval of its speed over pairs of fresh processes; None: it was not confirmed."""
        medians = [statistics.median(self.ratio(entry, turn, whole) for turn in pair) for pair in entry.pairs]
        return ratio_interval(medians) if len(medians) > 1 else None

    def pays_after(self, entry: Entry) -> int | None:
        """Return the optimizer steps after which compiling has saved the time that it took; None: never."""
        saved_s = self.reference.step_s * (1 - 1 / self.speed(entry, whole=False))
        return math.ceil(entry.compile_s / saved_s) if saved_s > 0 else None

    def _try(self, kind: str, candidate: Candidate) -> Entry | None:
        """Measure a candidate, if it is new, forecast to fit, and there is time; return its entry."""
        if candidate.label in self.entries:
            return self.entries[candidate.label]
        if why := self.space.refused(candidate):
            self.say(f"left out: {candidate.label} ({why})")
            return None
        entry = self.entries[candidate.label] = Entry(candidate)
        reference = self.reference if any(other.turns for other in self.entries.values()) else entry
        if reference is not entry and self.clock() + self._seconds_left_to_need() > self._end:
            entry.status, entry.reason = LEFT_OUT, "the budget had no time for it"
            return entry
        self.say(f"{kind}: {entry.label}")
        try:
            turns = self._pair(entry, reference, TURNS)
            entry.memory_bytes = self._running[entry.label].memory(LIMIT_S)
            entry.turns = turns
        except Failed as error:
            self._fail(entry, error)
        self._close(kept=reference.label if reference.turns else "")
        return entry

    def _fail(self, entry: Entry, error: Failed) -> None:
        """Note that a candidate failed. Raises RunError: it was the reference."""
        if error.label != entry.label:
            raise RunError(f"the reference {error.label} failed: {error}") from error
        entry.status, entry.reason = FAILED, str(error)

    def _seconds_left_to_need(self) -> float:
        """Return the seconds that one more candidate and the pairs that confirm the winner take, about."""
        block_s = max(BLOCK_S, self.reference.step_s)
        return (2 * PAIRS + 1) * self._start_s + 2 * (PAIRS * FINAL_TURNS + TURNS) * block_s

    # --- the conclusion ---

    def _confirmed(self) -> Entry:
        """Return what is advised: the fastest if the doctor finds no fault in it and six pairs confirm it."""
        reference = self.reference
        faulty = 0
        faster = [entry for entry in self.entries.values() if entry.turns and self.speed(entry) > HELPS]
        for entry in sorted(faster, key=self.speed, reverse=True):
            if faulty == MOST_FAULTS:
                self.notes.append(f"{faulty} settings have a fault, so no further one is examined or advised")
                break
            self._close()  # the doctor has the memory for itself
            self.say(f"check-up by the doctor: {entry.label}")
            entry.health = self.check_up(entry)
            if missed := entry.health.get("missed"):
                self.notes.append(f"check-up of {entry.label}: {'; '.join(missed)}")
            if entry.fault:
                faulty += 1
                self.notes.append(entry.fault)
                continue
            confirmed = self._confirm(entry)
            if entry.status == MEASURED:
                return entry if confirmed else reference
        return reference

    def _confirm(self, entry: Entry) -> bool:
        """Time a setting beside the reference in fresh pairs; return whether its interval in a whole run is above 1."""
        reference = self.reference
        self.say(f"{PAIRS} pairs of fresh processes: {reference.label}, {entry.label}")
        try:
            for number in range(PAIRS):
                self._close()
                entry.pairs.append(self._pair(entry, reference, FINAL_TURNS, swapped=number % 2 == 1))
        except Failed as error:
            self._fail(entry, error)
            self.notes.append(f"{entry.label} was the fastest, and failed when it was measured again: {error}")
            return False
        found = self.interval(entry)
        assert found is not None
        if found.low > 1:
            return True
        times = f"{found.mean:.2f}x [{found.low:.2f}, {found.high:.2f}] as fast as {reference.label}"
        run = f" in a run of {self.steps} steps, compile time included" * (entry.compile_s > 0)
        self.notes.append(f"{entry.label} was the fastest, which fresh processes did not confirm: {times}{run}")
        return False

    # --- processes ---

    def _pair(self, entry: Entry, reference: Entry, count: int, swapped: bool = False) -> list[Turn]:
        """Return the seconds of a step of a candidate and of the reference, by blocks of both in turns."""
        sides = [reference] * (entry is not reference) + [entry]
        sides = sides[::-1] if swapped else sides
        try:
            found = self._blocks(sides, count)
        except Failed as error:
            if self._apart or not error.out_of_memory or len(sides) == 1:
                raise
            self._apart = True
            found = self._blocks(sides, count)
        return list(zip(found[entry.label], found[reference.label], strict=True))

    def _blocks(self, sides: list[Entry], count: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {side.label: [] for side in sides}
        for group in [[side] for side in sides] if self._apart else [sides]:
            if self._apart:
                self._close(kept=group[0].label)
            for side in group:
                self._start(side)
            for side, _ in interleave(group, range(count)):
                found[side.label].append(self._block(side, found[side.label]))
        return found

    def _start(self, entry: Entry) -> None:
        """Start the process of a candidate that has none."""
        if entry.label in self._running:
            return
        if self._running and self.free_bytes() < ROOM * self._held_bytes:
            raise Failed("there is no memory for a second process", entry.label, out_of_memory=True)
        worker = self._running[entry.label] = self.launch(entry.candidate)
        start_s, warm_up_s, held_bytes = worker.start(LIMIT_S)
        self._held_bytes = max(self._held_bytes, held_bytes)
        if not entry.turns and entry.candidate.compiles:
            entry.compile_s = max(0.0, sum(warm_up_s) - len(warm_up_s) * min(warm_up_s))
        self._start_s = max(self._start_s, start_s - entry.compile_s)

    def _block(self, entry: Entry, known: list[float]) -> float:
        """Return the seconds of a step, by one block of a candidate that runs."""
        step_s = min(known, default=0.0)
        steps = max(1, round(BLOCK_S / step_s)) if step_s else 1
        return self._running[entry.label].block(steps, 60 + PATIENCE * steps * step_s) / steps

    def _close(self, kept: str = "") -> None:
        """End the processes of all candidates but one."""
        for label in self._running.keys() - {kept}:
            self._running.pop(label).close()
