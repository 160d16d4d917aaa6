"""Times candidates beside the reference, in blocks of steps that take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evidence.advice.candidates import Candidate
from evidence.advice.schema import FAILED, HUNG, LEFT_OUT, Entry, Turn
from evidence.advice.worker import OUT_OF_MEMORY, Failed, Hung, Worker

PATIENCE = 20.0
"""Times the time that is expected, after which a candidate counts as hung; and seconds beyond that."""
FIRST_LIMIT_S = 1800.0
"""Seconds that any start may take at most. It is the limit of the first start, whose time is not known."""
ROOM = 1.25
"""Times the memory of a process that must be free for a second one beside it."""


class Timer:
    """Keeps the reference alive, starts a candidate when its turn comes, and times blocks of both.

    Where the memory does not hold two processes, they run one after the other.
    """

    def __init__(
        self,
        launch: Callable[[Candidate, bool], Worker],
        free_bytes: Callable[[], float],
        block_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            launch: starts the process of a candidate; a fresh one where the second argument says so.
            free_bytes: memory for more of them.
            block_s: what a block takes, unless a single step takes longer.
            clock: seconds.
        """
        self.launch, self.free_bytes, self.block_s, self.clock = launch, free_bytes, block_s, clock
        self.running: dict[str, Worker] = {}
        self.apart = False
        """Whether the memory holds one process only."""
        self._held_bytes = 0
        self._slowest_start_s = 0.0
        """Of a candidate that does not compile."""

    def close(self, entry: Entry | None = None) -> None:
        """End the process of a candidate, or all."""
        for label in list(self.running) if entry is None else [entry.label] * (entry.label in self.running):
            self.running.pop(label).close()

    def visit(self, entry: Entry, reference: Entry, turns: int, left_s: float = math.inf) -> None:
        """Time a candidate beside the reference, and record it in their entries; or the reference alone.

        A failure is recorded in the entry of the candidate or of the reference, with its reason.

        Args:
            entry: of the candidate.
            reference: its entry.
            turns: blocks of each.
            left_s: seconds that its start may take; where that ends it, it is left out and not a failure.

        Raises:
            Failed: of either. (So for the other.)
            Hung: see there.
        """
        if entry is reference:
            self._begin(entry, left_s)
            entry.step_s += [self._block(entry) for _ in range(turns)]
        else:
            if not self.apart:
                self._begin(reference)
            self._begin(entry, left_s)
            for own_s, reference_s in self._turns(entry, reference, turns):
                entry.step_s.append(own_s)
                entry.reference_s.append(reference_s)
                reference.step_s.append(reference_s)
            self.close(entry)
        entry.rounds += 1

    def confirm(self, entry: Entry, reference: Entry, turns: int) -> list[Turn]:
        """Return the turns of a candidate and the reference in two fresh processes; see ``visit``."""
        self.close()
        both = (entry, reference)
        for each in both[:: -1 if len(entry.final) % 2 else 1]:
            if not self.apart:
                self._begin(each, fresh=True)
        found = self._turns(*both, turns, fresh=True)
        self.close()
        return found

    def block_of(self, entry: Entry) -> float:
        """Return the seconds that a block of a candidate takes."""
        return max(self.block_s, entry.fastest_s())

    def _turns(self, entry: Entry, reference: Entry, count: int, fresh: bool = False) -> list[Turn]:
        """Return blocks in turn, in reverse order every second time; one after the other where both do not fit."""
        if self.apart:
            times: list[list[float]] = []
            for each in (entry, reference):
                self._begin(each, fresh=fresh)
                times.append([self._block(each) for _ in range(count)])
            return list(zip(*times, strict=True))
        found: list[Turn] = []
        for turn in range(count):
            first, second = (entry, reference)[:: -1 if turn % 2 else 1]
            pair = (self._block(first), self._block(second))
            found.append(pair[:: -1 if turn % 2 else 1])
        return found

    def _begin(self, entry: Entry, left_s: float = math.inf, fresh: bool = False) -> None:
        """Make sure that a candidate runs; at its first start its memory is measured.

        It starts alone where memory runs out beside the other.
        """
        if entry.label in self.running:
            return
        if self.running and self.free_bytes() < ROOM * self._held_bytes:
            self.apart = True
        if self.apart:
            self.close()
        known, began = self._slowest_start_s and not entry.candidate.compiles, self.clock()
        patience_s = min(_patience(self._slowest_start_s), FIRST_LIMIT_S) if known else FIRST_LIMIT_S
        limit_s = min(max(left_s, 1.0), patience_s)
        with self._watched(entry, f"{limit_s:.0f} s" if limit_s < patience_s else ""):
            try:
                self._start(entry, limit_s, fresh)
            except Failed as error:
                if not (str(error).startswith(OUT_OF_MEMORY) and self.running):
                    raise
                self.apart, spent_s = True, self.clock() - began
                self.close()
                self._start(entry, max(1.0, limit_s - spent_s), fresh, spent_s)

    def _start(self, entry: Entry, limit_s: float, fresh: bool, spent_s: float = 0.0) -> None:
        process = self.launch(entry.candidate, fresh)
        try:
            started = process.start(limit_s)
            if not entry.warm_up_s:
                first_s, *later_s = started.warm_up_s
                # A start that ran out of memory may have compiled already.
                entry.warm_up_s = [first_s + spent_s * entry.candidate.compiles, *later_s]
                entry.memory_bytes = process.memory(_patience(sum(started.warm_up_s)))
        except BaseException:
            process.close()
            raise
        self.running[entry.label] = process
        entry.start_s = started.start_s
        self._held_bytes = max(self._held_bytes, started.held_bytes)
        if not entry.candidate.compiles:
            self._slowest_start_s = max(self._slowest_start_s, started.start_s)

    def _block(self, entry: Entry) -> float:
        """Return the seconds of a step, by one block of a candidate that runs."""
        step_s = entry.fastest_s()
        steps = max(1, round(self.block_s / step_s)) if step_s else 1
        with self._watched(entry):
            return self.running[entry.label].block(steps, _patience(steps * step_s)) / steps

    @contextmanager
    def _watched(self, entry: Entry, all_there_was: str = "") -> Iterator[None]:
        """Record a failure; where the budget has ended a start, that it had no more than ``all_there_was``."""
        try:
            yield
        except (Failed, Hung) as error:
            self.close(entry)
            if isinstance(error, Failed) or not all_there_was:
                entry.status, entry.reason = (HUNG if isinstance(error, Hung) else FAILED), str(error)
            elif not entry.step_s:  # else it was measured before, and is as good as it was
                what = "compiling" if entry.candidate.compiles else "its start"
                entry.status = LEFT_OUT
                entry.reason = f"{what} did not end within {all_there_was}, which is all the budget had for it"
            raise


def _patience(expected_s: float) -> float:
    return PATIENCE * expected_s + PATIENCE
