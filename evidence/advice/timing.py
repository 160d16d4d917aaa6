"""Times candidates beside the reference, in blocks of steps that take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evidence.advice.candidates import Candidate
from evidence.advice.schema import FAILED, HUNG, LEFT_OUT, Entry, Turn
from evidence.advice.worker import Failed, Hung, Worker
from evidence.turns import in_turns

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

    def close(self, *kept: Entry) -> None:
        """End the processes of all other candidates."""
        for label in self.running.keys() - {entry.label for entry in kept}:
            self.running.pop(label).close()

    def turns(
        self, entry: Entry, reference: Entry, count: int, left_s: float = math.inf, fresh: bool = False
    ) -> list[Turn]:
        """Return the seconds of a step of a candidate and of the reference, by blocks of both in turns.

        Args:
            entry: of the candidate; where it is the reference, it is measured alone.
            reference: its entry; its process stays, unless ``fresh``.
            count: blocks of each.
            left_s: seconds that the start may take; where that ends it, it is left out and not a failure.
            fresh: in new processes of Python.

        Raises:
            Failed: of either; its entry records the reason.
        """
        sides = [reference] * (entry is not reference) + [entry]
        if fresh:
            self.close()
            sides = sides[:: -1 if len(entry.final) % 2 else 1]
        seconds: dict[str, list[float]] = {side.label: [] for side in sides}
        if not self.apart:
            for side in sides:
                self._begin(side, left_s if side is entry else math.inf, fresh)
        if self.apart:
            for side in sorted(sides, key=lambda side: side.label not in self.running):
                self._begin(side, left_s if side is entry else math.inf, fresh)
                seconds[side.label] = [self._block(side) for _ in range(count)]
        else:
            for side, _ in in_turns(sides, range(count)):
                seconds[side.label].append(self._block(side))
        self.close(*[] if fresh else [reference])
        return list(zip(seconds[entry.label], seconds[reference.label], strict=True))

    def block_of(self, entry: Entry) -> float:
        """Return the seconds that a block of a candidate takes."""
        return max(self.block_s, entry.fastest_s())

    def _begin(self, entry: Entry, left_s: float, fresh: bool) -> None:
        """Make sure that a candidate runs; alone where memory runs out beside the other."""
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
                if not (error.out_of_memory and self.running):
                    raise
                self.apart, spent_s = True, self.clock() - began
                self.close()
                self._start(entry, max(1.0, limit_s - spent_s), fresh, spent_s)

    def _start(self, entry: Entry, limit_s: float, fresh: bool, spent_s: float = 0.0) -> None:
        """Start a process; at a candidate's first start its memory is measured."""
        process = self.launch(entry.candidate, fresh)
        try:
            start_s, warm_up_s, held_bytes = process.start(limit_s)
            if not entry.warm_up_s:
                # A start that ran out of memory may have compiled already.
                entry.warm_up_s = [warm_up_s[0] + spent_s * entry.candidate.compiles, *warm_up_s[1:]]
                entry.memory_bytes = process.memory(_patience(sum(warm_up_s)))
        except BaseException:
            process.close()
            raise
        self.running[entry.label] = process
        entry.start_s = start_s
        self._held_bytes = max(self._held_bytes, held_bytes)
        if not entry.candidate.compiles:
            self._slowest_start_s = max(self._slowest_start_s, start_s)

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
        except Failed as error:
            if entry.label in self.running:
                self.running.pop(entry.label).close()
            if not (isinstance(error, Hung) and all_there_was):
                entry.status, entry.reason = (HUNG if isinstance(error, Hung) else FAILED), str(error)
            elif not entry.turns:  # else it was measured before, and is as good as it was
                what = "compiling" if entry.candidate.compiles else "its start"
                entry.status = LEFT_OUT
                entry.reason = f"{what} did not end within {all_there_was}, which is all the budget had for it"
            raise


def _patience(expected_s: float) -> float:
    return PATIENCE * expected_s + PATIENCE
