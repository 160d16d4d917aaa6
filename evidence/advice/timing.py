"""Times candidates beside the reference, in blocks of steps that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable

from evidence.advice.candidates import Candidate
from evidence.advice.schema import Entry, Turn
from evidence.advice.worker import Failed, Worker
from mantissa.compare import interleave

START_S = 1800.0
"""Seconds that a start may take, where the budget does not say it."""
PATIENCE, PATIENCE_S = 20.0, 60.0
"""Times the time that is expected, after which a block counts as hung; and seconds beyond that, since tiny steps are
many times slower where other programs hold the cores."""
ROOM = 1.25
"""Times the memory of a process that must be free for a second one beside it."""


class Timer:
    """Keeps the reference alive, starts a candidate when its turn comes, and times blocks of both."""

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
        """Whether the memory holds one process only: then they run one after the other."""
        self._held_bytes = 0

    def close(self, kept: str = "") -> None:
        """End the processes of all candidates but one."""
        for label in self.running.keys() - {kept}:
            self.running.pop(label).close()

    def turns(
        self, entry: Entry, reference: Entry, count: int, limit_s: float = START_S, fresh: bool = False
    ) -> list[Turn]:
        """Return the seconds of a step of a candidate and of the reference, by blocks of both in turns.

        Args:
            entry: of the candidate; where it is the reference, it is measured alone.
            reference: its entry; its process stays, unless ``fresh``.
            count: blocks of each.
            limit_s: seconds that the candidate's start may take.
            fresh: in new processes of Python, of which every second pair starts in the other order.

        Raises:
            Failed: of either, by its ``label``.
        """
        sides = [reference] * (entry is not reference) + [entry]
        if fresh:
            self.close()
            sides = sides[:: -1 if len(entry.final) % 2 else 1]
        limits = {reference.label: START_S, entry.label: limit_s}
        try:
            found = self._blocks(sides, count, limits, fresh)
        except Failed as error:
            self.close()
            if self.apart or not error.out_of_memory or len(sides) == 1:
                raise
            self.apart = True
            found = self._blocks(sides, count, limits, fresh)
        finally:
            self.close("" if fresh else reference.label)
        return list(zip(found[entry.label], found[reference.label], strict=True))

    def block_of(self, entry: Entry) -> float:
        """Return the seconds that a block of a candidate takes."""
        return max(self.block_s, entry.fastest_s())

    def _blocks(self, sides: list[Entry], count: int, limits: dict[str, float], fresh: bool) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {side.label: [] for side in sides}
        for group in [[side] for side in sides] if self.apart else [sides]:
            for side in group:
                if self.apart:
                    self.close(side.label)
                if side.label not in self.running:
                    self._start(side, limits[side.label], fresh)
            for side, _ in interleave(group, range(count)):
                found[side.label].append(self._block(side))
        return found

    def _start(self, entry: Entry, limit_s: float, fresh: bool) -> None:
        """Start a process; at a candidate's first start its memory is measured."""
        if self.running and self.free_bytes() < ROOM * self._held_bytes:
            raise Failed("there is no memory for a second process", entry.label, out_of_memory=True)
        worker = self.running[entry.label] = self.launch(entry.candidate, fresh)
        entry.start_s, warm_up_s, held_bytes = worker.start(limit_s)
        self._held_bytes = max(self._held_bytes, held_bytes)
        if not entry.warm_up_s:
            entry.warm_up_s, entry.memory_bytes = warm_up_s, worker.memory(_patience(sum(warm_up_s)))

    def _block(self, entry: Entry) -> float:
        """Return the seconds of a step, by one block of a candidate that runs."""
        step_s = entry.fastest_s()
        steps = max(1, round(self.block_s / step_s)) if step_s else 1
        return self.running[entry.label].block(steps, _patience(steps * step_s)) / steps


def _patience(expected_s: float) -> float:
    return PATIENCE * expected_s + PATIENCE_S
