"""The search for the best setting within a budget of time: precisions, single changes, combinations, halving."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evidence.advice.candidates import COMPILE, Candidate, Space
from evidence.advice.schema import (
    AHEAD,
    BUDGET,
    FAILED,
    LEFT_OUT,
    MEASURED,
    MEMORY,
    SEVERAL,
    SPEED,
    UNDECIDED,
    Advice,
    Entry,
    Turn,
)
from evidence.advice.timing import START_S, Timer
from evidence.advice.worker import Failed
from mantissa.statistics import Interval, ratio_interval
from trainer.errors import RunError

EQUAL = 1.03
"""Two settings are equal within this factor; among such, the simplest is advised."""
TIME_FOR_MEMORY = 1.5
"""Times the baseline's time that a step may take for goal=memory."""
LEAST_MEMORY = 1.01
"""Two settings need the same memory within this factor."""
TURNS = 3
"""Of each candidate at first; each round of the halving doubles them."""
HALVING = (8, 4, 2)
"""Settings in each of its rounds, at most."""
REACH = 3
"""Values of one option that are tried alone, those nearest to the default."""
HELPS = 0.01
"""The logarithm of a ratio from which on a change is combined with others."""
PROCESS = 0.017
"""Standard deviation between processes of one setting, relative, as measured on two machines: a difference between two
settings counts in the search if it is twice what this and the blocks' own spread explain."""
PAIRS, LEAST_PAIRS, FINAL_TURNS = 8, 4, 7
"""Of fresh processes in the final round, at most and at least, and the turns of each. Their number depends on the time
that is left and not on what they measure: otherwise the interval would be too narrow."""
LEVELS = (0.97, 0.99, 0.99)
"""Of the intervals of a call's final rounds, one after the other; a fault leads to a further one. Nominally all
hold in 95 % of calls; benchmarks/advice_simulation.py shows in how many they do."""
NEAR = 1.05
"""Nothing is decided where another setting may well be this many times as fast as the advised one."""
FRESH_S = 6.0
"""That two new processes of Python take to import torch and the trainer, about."""
MOST_FAULTS = 3
"""Settings in which one call finds a fault, after which it examines no other one."""


@dataclass
class Search:
    """Measures what the advice's entries do not hold yet, and adds the conclusion to the advice."""

    space: Space
    advice: Advice
    timer: Timer
    budget_s: float
    check_up: Callable[[Entry], dict[str, Any]]
    """By the doctor; returns the entry's ``health``."""
    save: Callable[[], None]
    """Called after each measurement."""
    show: Callable[[str], None]

    def __post_init__(self) -> None:
        self._began = self.timer.clock() - self.advice.spent_s
        # What was left out may be tried now: there may be more time.
        self.entries = {entry.label: entry for entry in self.advice.entries if entry.status != LEFT_OUT}
        for entry in self.entries.values():
            entry.final = []  # a new conclusion has a final round of its own
        self.advice.notes = []
        self._mixed = COMPILE in self.space.choices and self.advice.goal == SPEED
        self._out_of_time = False
        self._default = self.space.candidate().label
        self._levels: dict[str, float] = {}  # of the final rounds' intervals, by label

    @property
    def spent_s(self) -> float:
        """Of the budget, by earlier calls too."""
        return self.timer.clock() - self._began

    # --- what is known ---

    @property
    def reference(self) -> Entry:
        """What ratios are over: the default; where it fails, the first candidate that works."""
        default = self.entries.get(self._default)
        if default and default.timed:
            return default
        return next(entry for entry in self.entries.values() if entry.timed)

    def _beside(self, entry: Entry) -> Entry:
        """Return what a candidate takes turns with: itself, where nothing works yet."""
        return self.reference if any(each.timed for each in self.entries.values()) else entry

    @property
    def compile_s(self) -> list[float]:
        """Seconds to compile, of each candidate that compiles; a single time is not exact. None does: 0."""
        known = [entry for entry in self.entries.values() if entry.candidate.compiles and entry.timed]
        return [entry.compiling_s() for entry in known] or [0.0]

    def ratios(self, entry: Entry, turns: Sequence[Turn], compile_s: float = 0.0) -> list[float]:
        """Return how many times as fast as the reference it is, by each turn, in a run with this time to compile."""
        extra_s = compile_s / self.advice.steps
        own_s, reference_s = (extra_s * each.candidate.compiles for each in (entry, self.reference))
        return [(turn[1] + reference_s) / (turn[0] + own_s) for turn in turns]

    def logs(self, entry: Entry, whole: bool = True) -> list[float]:
        """Return the logarithms of its ratios in the search.

        With ``whole`` and goal=speed they are of a run with the time to compile, unless all or none compile.
        """
        compile_s = statistics.median(self.compile_s) if whole and self._mixed else 0.0
        return [math.log(each) for each in self.ratios(entry, entry.turns, compile_s)]

    def speed(self, entry: Entry, whole: bool = True) -> float:
        """Return the logarithm of its speed over the reference's.

        It is the median of the turns, on which a single block that another program has slowed down has little effect.
        """
        return statistics.median(self.logs(entry, whole))

    def merit(self, entry: Entry) -> float:
        """Return how much better than the reference it is, as a logarithm; minus infinity where it is no candidate."""
        speed = self.speed(entry) if entry.timed else -math.inf
        if self.advice.goal == SPEED:
            return speed
        fast = speed >= -math.log(TIME_FOR_MEMORY)
        return math.log((self.reference.memory_bytes or 1) / (entry.memory_bytes or 1)) if fast else -math.inf

    def ranked(self) -> list[Entry]:
        """Return the entries that may be advised, the best first.

        Raises:
            RunError: there is none.
        """
        allowed = (entry for entry in self.entries.values() if not entry.refused)
        found = sorted((entry for entry in allowed if self.merit(entry) > -math.inf), key=self.merit, reverse=True)
        if not found:
            raise self._nothing()
        return found

    def contenders(self) -> list[Entry]:
        """Return the best setting, and those that are not clearly slower (or, for memory, larger) than it."""
        best, *others = self.ranked()

        def difference(other: Entry) -> float:
            if self.advice.goal == MEMORY:
                return math.log(LEAST_MEMORY)
            return 2 * math.hypot(self._error(best), self._error(other))

        return [best, *(each for each in others if self.merit(best) - self.merit(each) < difference(each))]

    def _nothing(self) -> RunError:
        errors = [f"{entry.label}: {entry.reason}" for entry in self.entries.values() if entry.reason]
        return RunError(f"no candidate can be advised; the first error: {[*self._refused(), *errors][0]}")

    def _refused(self) -> list[str]:
        return [entry.refused for entry in self.entries.values() if entry.refused]

    def _error(self, entry: Entry) -> float:
        """Return the standard error of its merit, that of the process included."""
        logs = self.logs(entry)
        blocks = float(np.var(logs, ddof=1)) / len(logs) if len(logs) > 1 else 0.0
        return math.sqrt(blocks + self._between_processes() ** 2 / max(1, entry.processes))

    def _between_processes(self) -> float:
        """Return the spread between processes of one setting: ``PROCESS``, or what a final round shows where more."""
        found = [PROCESS]
        for pairs in (entry.final for entry in self.entries.values() if entry.timed and len(entry.final) > 1):
            logs = [math.log(statistics.median(base_s / own_s for own_s, base_s in pair)) for pair in pairs]
            found.append(float(np.std(logs, ddof=1)) / math.sqrt(2))  # a pair has two processes
        return max(found)

    def choose(self) -> Entry:
        """Return the simplest of the settings that are as good as the best."""
        contenders = self.contenders()
        near = math.log(EQUAL if self.advice.goal == SPEED else LEAST_MEMORY)
        alike = [each for each in contenders if self.merit(contenders[0]) - self.merit(each) < near]
        return min(alike, key=lambda each: (len(each.candidate.overrides), -self.merit(each)))

    # --- measuring ---

    def run(self) -> None:
        """Measure until one setting is ahead, several are equal, or the budget is spent, and conclude.

        Raises:
            RunError: no candidate works, or none can be advised.
        """
        default = self.space.candidate()
        if default.label not in self.entries:
            self.show(f"train.py's default: {default.label}")
            self._visit(Entry(default), TURNS)
        precisions = self.space.precisions()
        self._try("precision", precisions)
        working = [entry for entry in self.entries.values() if entry.timed and entry.candidate in precisions]
        if not working:
            raise self._nothing()
        first = max(working, key=self.merit).candidate
        self._first = first  # what single changes are of
        singles = list(self.space.one_change(first, REACH))
        self._try("single change", singles)
        for change in self._helpful(first, singles):
            # One with a fault too: several calls try what one with all of the budget tries, before any check-up.
            best = max(self.entries.values(), key=self.merit).candidate
            self._try("combination", [self.space.candidate([*best.overrides, change])])
        for number, most in enumerate(HALVING, 1):
            contenders = self.contenders()
            if len(contenders) > 1 and self.advice.goal == SPEED:
                self._measure("halving", contenders[:most], TURNS * 2**number)
        self._conclude(self._confirmed())

    def _helpful(self, best: Candidate, singles: Sequence[Candidate]) -> list[str]:
        """Return the changes of one setting that are worth combining, the most helpful first."""
        merits = {each.candidate: self.merit(each) for each in self.entries.values()}
        gains = {
            override: merits[single] - merits[best]
            for single in singles
            for override in single.overrides
            if single in merits and override not in best.overrides
        }
        return sorted((each for each in gains if gains[each] > HELPS), key=gains.__getitem__, reverse=True)

    def _try(self, kind: str, candidates: Iterable[Candidate]) -> None:
        """Measure those that are new and forecast to fit; none compiles where that took too long."""
        compiled = [entry for entry in self.entries.values() if entry.candidate.compiles]
        endless = any(each.status == LEFT_OUT for each in compiled) and not any(each.timed for each in compiled)
        wanted = []
        for each in dict.fromkeys(candidates):
            if each.label in self.entries or (endless and each.compiles):
                continue
            if why := self.space.refused(each):
                self.show(f"left out: {each.label} ({why})")
            else:
                wanted.append(Entry(each))
        self._measure(kind, wanted)

    def _measure(self, kind: str, entries: Sequence[Entry], turns: int = TURNS) -> None:
        """Give candidates so many turns, those for which there is time."""
        for entry in (each for each in entries if len(each.turns) < turns):
            known = self._beside(entry)
            # The rest is for the final round.
            pair_s = FRESH_S + 2 * (known.start_s + FINAL_TURNS * self.timer.block_of(known))
            left_s = self.budget_s - min(LEAST_PAIRS * pair_s, 0.3 * self.budget_s) - self.spent_s
            more = turns - len(entry.turns)
            need_s = (entry.start_s or known.start_s) + 2 * more * self.timer.block_of(entry)
            if left_s >= need_s:
                self.show(f"{kind}: {entry.label}")
                self._visit(entry, more, max(need_s, left_s / 2))  # compiling may take much longer than all else
                continue
            self._out_of_time = True
            if not entry.turns:
                entry.status, entry.reason = LEFT_OUT, "the budget had no time for it"
                self.entries[entry.label] = entry

    def _visit(self, entry: Entry, turns: int, limit_s: float = START_S, fresh: bool = False) -> None:
        """Time a candidate beside the reference; the first that works is the reference. A failure is in its entry.

        Raises:
            RunError: the reference failed.
        """
        reference = self._beside(entry)
        self.entries[entry.label] = entry
        try:
            found = self.timer.turns(entry, reference, turns, limit_s, fresh)
        except Failed as error:
            failed = self.entries[error.label]
            if error.late and not fresh:
                self._out_of_time = True
            if not (error.late and failed.turns) or fresh:  # else it was measured before, and is as good as it was
                failed.status, failed.reason = LEFT_OUT if error.late and not fresh else FAILED, str(error)
            if failed is not entry:
                self.entries = {label: each for label, each in self.entries.items() if each.status != MEASURED}
                self._save()
                raise RunError(
                    f"the reference {failed.label} failed: {error}; run the same command again to compare with "
                    "the next setting that works"
                ) from error
        else:
            if fresh:
                entry.final.append(found)
            else:
                entry.turns += found
                entry.processes += 1
                reference.turns += [(turn[1], turn[1]) for turn in found if entry is not reference]
        self._save()

    def _save(self) -> None:
        self.advice.entries = list(self.entries.values())
        self.advice.spent_s = self.spent_s
        self.save()

    # --- the conclusion ---

    def _confirmed(self) -> Entry:
        """Return what is advised: the choice if fresh processes confirm it and the doctor finds no fault in it.

        Otherwise the reference; after a fault the next best setting, with a final round of its own.
        """
        known = len(self._refused())
        while len(self._refused()) - known < MOST_FAULTS:
            chosen = self.choose()
            if chosen is not self.reference:
                self._final(chosen)
                if not chosen.timed:
                    continue
                if (why := self._unconfirmed(chosen)) and not self.reference.refused:
                    self.advice.notes.append(
                        f"{chosen.label} was the best until the final round, which did not confirm it: {why}"
                    )
                    chosen = self.reference
            if chosen.label == self._default:
                return chosen
            chosen.health = chosen.health or self.check_up(chosen)
            self._save()
            if not chosen.refused:
                return chosen
        if self.reference.label != self._default:
            raise self._nothing()
        faults = len(self._refused())
        self.advice.notes.append(f"{faults} settings have a fault, so no further one is examined or advised")
        return self.reference

    def _final(self, chosen: Entry) -> None:
        """Time a setting beside the reference in pairs of fresh processes, which played no part in the choice."""
        self.show(f"final round, in fresh processes: {self.reference.label}, {chosen.label}")
        self._levels[chosen.label] = LEVELS[min(len(self._levels), len(LEVELS) - 1)]
        pair_s = 0.0
        while chosen.timed and len(chosen.final) < PAIRS:
            if len(chosen.final) >= LEAST_PAIRS and self.spent_s + pair_s > self.budget_s:
                return
            began = self.timer.clock()
            self._visit(chosen, FINAL_TURNS, fresh=True)
            pair_s = self.timer.clock() - began

    def _final_interval(self, entry: Entry, whole: bool) -> Interval | None:
        """Return the speed by pairs of processes; None: no final round.

        The spread between processes is included, and with ``whole`` that between times to compile.
        """
        if len(entry.final) < 2:
            return None

        def by(compile_s: float) -> Interval:
            medians = [statistics.median(self.ratios(entry, pair, compile_s)) for pair in entry.final]
            return ratio_interval(medians, self._levels[entry.label])

        times = self.compile_s if whole and self._mixed else [0.0]
        ends = by(min(times)), by(max(times))
        low, high = min(each.low for each in ends), max(each.high for each in ends)
        return replace(by(statistics.median(times)), low=low, high=high)

    def _unconfirmed(self, chosen: Entry) -> str:
        """Return why the final round does not confirm that a setting is better than the reference; empty: it does."""
        found, reference = self._final_interval(chosen, whole=True), self.reference
        assert found is not None
        shown = f"{found.mean:.2f}x [{found.low:.2f}, {found.high:.2f}] as fast as {reference.label}"
        if self.advice.goal == MEMORY:
            larger = (chosen.memory_bytes or 0) >= (reference.memory_bytes or 0)
            return shown if found.mean < 1 / TIME_FOR_MEMORY else "it needs no less memory" if larger else ""
        if chosen.candidate.compiles or reference.candidate.compiles:
            shown += f" in a run of {self.advice.steps} steps, compile time included"
        return "" if found.low > 1 else shown

    def _conclude(self, winner: Entry) -> None:
        """Write the conclusion into the advice."""
        advice = self.advice
        for entry in self.entries.values():
            if entry.timed:
                self._describe(entry)
        contenders = [entry.label for entry in self.contenders()]
        advice.baseline, advice.winner = self.reference.label, winner.label
        advice.equal = [each for each in contenders if each != winner.label] if winner.label in contenders else []

        def place(entry: Entry) -> tuple[bool, bool, float]:
            rank = -(entry.run_speed or 0.0) if advice.goal == SPEED else float(entry.memory_bytes or 0)
            return entry is not winner, not entry.timed, rank

        others = [Entry(Candidate(label), LEFT_OUT, why) for label, why in self.space.left_out.items()]
        advice.entries = [*sorted(self.entries.values(), key=place), *others]
        advice.notes = [*self.space.notes, *self._refused(), *advice.notes]
        if missed := winner.health.get("missed"):
            advice.notes.append(f"check-up of {winner.label}: {'; '.join(missed)}")
        decided = SEVERAL if len(contenders) > 1 else AHEAD
        advice.stopped = BUDGET if self._out_of_time else UNDECIDED if self._open(winner) else decided
        advice.spent_s = self.spent_s
        self.save()

    def _open(self, winner: Entry) -> bool:
        """Return whether a setting may be faster than the winner by more than ``NEAR``, within a standard error.

        That is one that was measured, or the winner with a further change that was measured alone.
        """
        if self.advice.goal == MEMORY:
            return False
        known = [entry for entry in self.entries.values() if entry.timed]
        if winner is self.reference and any(
            each.run_interval and each.run_interval.high > NEAR for each in known if not each.refused
        ):
            return True

        standing = {entry.label: (self.merit(entry), self._error(entry)) for entry in known}

        def open_over(other: Entry, entry: Entry) -> bool:
            (one, error), (than, than_error) = standing[other.label], standing[entry.label]
            return one - than + math.hypot(error, than_error) > math.log(NEAR)

        def further(entry: Entry) -> bool:
            own, had = set(entry.candidate.overrides), set(first.candidate.overrides)
            return len(own ^ had) == 1 and not own - had <= set(winner.candidate.overrides)

        first = self.entries[self._first.label]
        others = [each for each in known if each is not winner and not each.final and not each.refused]
        return any(open_over(each, winner) or (further(each) and open_over(each, first)) for each in others)

    def _describe(self, entry: Entry) -> None:
        """Add to an entry what follows from its times."""
        entry.interval = self._final_interval(entry, whole=False)
        entry.speed = entry.interval.mean if entry.interval else math.exp(self.speed(entry, whole=False))
        if self.advice.goal == SPEED:
            entry.run_interval = self._final_interval(entry, whole=True)
            entry.run_speed = entry.run_interval.mean if entry.run_interval else math.exp(self.speed(entry))
        entry.compile_s, entry.pays_after_steps = entry.compiling_s(), None
        if entry.candidate.compiles and COMPILE in self.space.choices:
            off = None if not self.space.compiles else self.space.choices[COMPILE][0]
            eager = self.entries.get(self.space.changed(entry.candidate, COMPILE, off).label)
            if eager and eager.timed:
                gain = math.exp(self.speed(entry, whole=False) - self.speed(eager, whole=False))
                saved_s = statistics.median(entry.step_s) * (gain - 1)
                entry.pays_after_steps = math.ceil(statistics.median(self.compile_s) / saved_s) if gain > 1 else None
