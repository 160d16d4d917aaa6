"""Times candidates against each other in alternating blocks, and keeps what was measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from evidence.advice.schema import FAILED, HUNG, LEFT_OUT, MEASURED, Candidate, Log, Record, Round, compiles
from evidence.advice.worker import Failed, Hung, Started
from evidence.intervals import Interval, ratio_interval

CLEARLY_SLOWER = 1.5
"""Times the fastest candidate's time; after two repeats of a round, slower ones are dropped from it."""
LEAST_REPEATS = 2
"""Of a round, without which there is no interval."""
PATIENCE = 20.0
"""Times the time that is expected, after which a candidate counts as hung; and seconds beyond that."""


FIRST_LIMIT_S = 1800.0
"""Seconds that any start may take at most. It is the limit of the first start, whose time is not known."""


class Runner(Protocol):
    """What measures one candidate; see ``evidence.advice.worker.Worker``."""

    def start(self, limit_s: float) -> Started:
        """Build it and warm it up."""

    def block(self, steps: int, limit_s: float) -> float:
        """Return the seconds of so many optimizer steps."""

    def memory(self, limit_s: float) -> int:
        """Return the peak bytes of a step."""

    def close(self) -> None:
        """End it."""


def interval(ratios: Sequence[float]) -> Interval | None:
    """Return the geometric mean and its 95 % interval; None of fewer than two ratios."""
    return ratio_interval(ratios) if len(ratios) > 1 else None


class Deadline(Exception):
    """The time that was given has ended."""


class Bench:
    """Starts candidates when their turn comes, keeps them alive while the memory suffices, and times their blocks."""

    def __init__(
        self,
        runner: Callable[[Candidate], Runner],
        free_bytes: Callable[[], float],
        log: Log,
        block_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            runner: starts the process of a candidate.
            free_bytes: memory for more of them.
            log: takes what is measured.
            block_s: what a block takes, unless a single step takes longer.
            clock: seconds.
        """
        self.runner = runner
        self.free_bytes = free_bytes
        self.log = log
        self.block_s = block_s
        self.clock = clock
        self.alive: dict[str, Runner] = {}
        """The one that was used last comes last."""
        self.held: list[int] = []

    def close(self) -> None:
        """End all processes."""
        while self.alive:
            self.alive.popitem()[1].close()

    def expected_start_s(self, candidate: Candidate) -> float:
        """Return how long a start will take, by those that were."""
        known = self.log.records.get(candidate.label)
        if known is not None and known.start_s:
            return known.start_s
        starts = [(label, record.start_s) for label, record in self.log.records.items() if record.start_s]
        alike = [seconds for label, seconds in starts if compiles(label) == compiles(candidate.label)]
        return statistics.median(alike or [seconds for _, seconds in starts] or [0.0])

    def expected_block_s(self, label: str) -> float:
        """Return how long a block of a candidate takes; of an unknown one, as long as the median."""
        steps = [record.step_s() for record in self.log.records.values() if record.warm_up_s]
        record = self.log.records.get(label)
        step = record.step_s() if record and record.warm_up_s else statistics.median(steps or [0.0])
        return max(self.block_s, step)

    def begin(self, candidate: Candidate, deadline: float, others_s: float = math.inf) -> bool:
        """Make sure that a candidate runs; return False where it cannot.

        ``others_s``: what others still need until then. A compilation may use the rest, or half of the time.

        Raises:
            Deadline: there is not enough time for it.
        """
        label = candidate.label
        if label in self.alive:
            self.alive[label] = self.alive.pop(label)
            return True
        record = self.log.records.get(label)
        if record is not None and record.status != MEASURED:
            return False
        left = deadline - self.clock()
        if left < self.expected_start_s(candidate):
            raise Deadline
        while self.alive and self.held and self.free_bytes() < 1.25 * max(self.held):
            self.alive.pop(next(iter(self.alive))).close()
        limit_s, patient = self._limit(candidate, left, others_s)
        try:
            self.alive[label] = self._start(candidate, limit_s)
        except (Failed, Hung) as error:
            if isinstance(error, Failed) or patient:
                self.fail(label, error)
                return False
            if record is not None:  # it was measured before, and is as good as it was
                raise Deadline from error
            what = "compiling" if compiles(label) else "its start"
            why = f"{what} did not end within {limit_s:.0f} s, which is all the budget had for it"
            self.log.records[label] = Record(LEFT_OUT, why)  # with more time it may end
            return False
        return True

    def _start(self, candidate: Candidate, limit_s: float, spent_s: float = 0.0) -> Runner:
        """Start a process, and measure the memory of a new candidate; alone, if memory runs out beside others.

        Args:
            candidate: to start.
            limit_s: seconds for it.
            spent_s: what a start without enough memory took: it may have compiled already.

        Raises:
            Failed, Hung: see ``Worker``.
        """
        runner, began = self.runner(candidate), self.clock()
        try:
            started = runner.start(limit_s - spent_s)
            if candidate.label not in self.log.records:
                first_s, *later_s = started.warm_up_s
                warm_up_s = [first_s + spent_s * compiles(candidate.label), *later_s]
                kept = Record(warm_up_s=warm_up_s, start_s=started.start_s + spent_s)
                kept.memory_bytes = runner.memory(_patience(sum(started.warm_up_s)))
                self.log.records[candidate.label] = kept
        except BaseException as error:
            runner.close()
            if not (isinstance(error, Failed) and error.out_of_memory and self.alive):
                raise
            self.close()
            spent_s = self.clock() - began
            if spent_s >= limit_s:
                raise
            return self._start(candidate, limit_s, spent_s)
        self.held.append(started.held_bytes)
        return runner

    def _limit(self, candidate: Candidate, left: float, others_s: float) -> tuple[float, bool]:
        """Return how long a start may take, and whether one that takes longer counts as hung."""
        starts = [
            record.start_s for label, record in self.log.records.items() if record.start_s and not compiles(label)
        ]
        if not starts:  # the first of all
            return FIRST_LIMIT_S, True
        patience = FIRST_LIMIT_S if compiles(candidate.label) else min(_patience(max(starts)), FIRST_LIMIT_S)
        given = max(left / 2, left - others_s) if compiles(candidate.label) else left
        return min(max(given, 1.0), patience), given >= patience

    def fail(self, label: str, error: Failed | Hung) -> None:
        """Leave a candidate out from now on, and name the reason."""
        record = self.log.records.setdefault(label, Record())
        record.status, record.reason = (HUNG if isinstance(error, Hung) else FAILED), str(error)

    def time(self, candidate: Candidate) -> float:
        """Return the seconds of a step, by one block of a candidate that runs.

        Raises:
            Failed: see ``Worker``. (So for the others.)
            Hung: no answer.
        """
        record = self.log.records[candidate.label]
        step = record.step_s()
        steps = max(1, round(self.block_s / step)) if step else 1
        seconds = self.alive[candidate.label].block(steps, _patience(steps * step)) / steps
        record.fastest_s = min(step, seconds)
        return seconds

    def round(
        self,
        kind: str,
        candidates: Sequence[Candidate],
        repeats: int,
        deadline: float,
        kept: Sequence[str] = (),
        enough: Callable[[Round], bool] = lambda done: False,
    ) -> list[Candidate]:
        """Take blocks in turn, in reverse order every second repeat; return those for which there was no time.

        A candidate that fails is named and left out. One that is clearly slower leaves the round after two repeats.
        The round is in the log from its beginning; each block is added when it has ended.

        Args:
            kind: of the round.
            candidates: the first has its turn first.
            repeats: blocks of each of them.
            deadline: by the clock; nothing is started that would end later, except the second repeat.
            kept: labels that are never dropped.
            enough: asked after each repeat from the second on, whether the round can end.
        """
        running, late = list(candidates), []
        blocks_s = LEAST_REPEATS * sum(self.expected_block_s(each.label) for each in candidates)
        for number, candidate in enumerate(candidates, 1):
            others_s = blocks_s + sum(map(self.expected_start_s, candidates[number:]))
            try:
                if not self.begin(candidate, deadline, others_s):
                    running.remove(candidate)
            except Deadline:
                running.remove(candidate)
                late.append(candidate)
        late += self._fewer(running, deadline)
        done = Round(kind, {candidate.label: [] for candidate in running})
        self.log.rounds.append(done)
        for repeat in range(repeats):
            if repeat >= LEAST_REPEATS and self.clock() + self._repeat_s(running) > deadline:
                break
            for candidate in running[:: -1 if repeat % 2 else 1]:
                try:
                    if self.begin(candidate, math.inf):
                        done.times[candidate.label].append(self.time(candidate))
                        continue
                except (Failed, Hung) as error:
                    self.alive.pop(candidate.label).close()
                    self.fail(candidate.label, error)
                running.remove(candidate)
            if repeat + 1 < LEAST_REPEATS:
                continue
            means = {each.label: statistics.geometric_mean(done.times[each.label]) for each in running}
            slow = CLEARLY_SLOWER * min(means.values(), default=0.0)
            # One block may have been slowed down by another program: the fastest decides.
            running = [each for each in running if min(done.times[each.label]) <= slow or each.label in kept]
            if enough(done):
                break
        return late

    def need_s(self, candidates: Sequence[Candidate], repeats: int) -> float:
        """Return what the starts and so many repeats of a round are expected to take, if the memory holds them all."""
        blocks_s = sum(self.expected_block_s(each.label) for each in candidates)
        return sum(map(self._start_again_s, candidates)) + repeats * blocks_s

    def _start_again_s(self, candidate: Candidate) -> float:
        return 0.0 if candidate.label in self.alive else self.expected_start_s(candidate)

    def _repeat_s(self, running: Sequence[Candidate]) -> float:
        """Return what a repeat is expected to take, with the starts of processes that the memory does not hold."""
        return sum(self.expected_block_s(each.label) + self._start_again_s(each) for each in running)

    def _fewer(self, running: list[Candidate], deadline: float) -> list[Candidate]:
        """Take the last candidates out of a round where the memory does not hold all, and their starts take too long.

        Returns:
            Those that were taken out.
        """
        ended = [each for each in running if each.label not in self.alive]
        if not ended or self.clock() + LEAST_REPEATS * self._repeat_s(running) <= deadline:
            return []
        fit = max(2, len(running) - len(ended))
        dropped = running[fit:]
        del running[fit:]
        for each in dropped:
            if each.label in self.alive:
                self.alive.pop(each.label).close()
            if not self.log.times(each.label):
                why = f"the memory holds {fit} processes at a time, and the budget had no time to start more in turn"
                self.log.records[each.label] = Record(LEFT_OUT, why)
        return dropped


def _patience(expected_s: float) -> float:
    return PATIENCE * expected_s + PATIENCE
