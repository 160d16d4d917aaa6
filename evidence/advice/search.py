"""The search for the best setting within a budget of time: precisions, single changes, combinations, halving."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evidence.advice.candidates import COMPILE, PRECISION, Candidate, Space, key_of
from evidence.advice.schema import (
    AHEAD,
    BUDGET,
    LEFT_OUT,
    MEASURED,
    MEMORY,
    SEVERAL,
    SPEED,
    Advice,
    Entry,
    Turn,
)
from evidence.advice.timing import Timer
from evidence.advice.worker import Failed
from mantissa.statistics import Interval, ratio_interval
from trainer.errors import RunError, UserError

EQUAL = 1.03
"""Two settings are equal within this factor; among such, the simplest is advised."""
TIME_FOR_MEMORY = 1.5
"""Times the baseline's time that a step may take for goal=memory."""
LEAST_MEMORY = 1.01
"""Two settings need the same memory within this factor."""
TURNS = 3
"""Of each candidate at first; each round of the halving doubles them."""
EXPLORE = 0.6
"""The part of the budget after which no new settings are tried."""
EXPLORATIONS, AT_ONCE = 6, 6
"""Rounds of new combinations at most, and settings in one."""
HALVING = (8, 4, 2)
"""Settings in each of its rounds, at most."""
REACH = 3
"""Values of one option that are tried alone, those nearest to the default."""
HELPS, WORTH = 0.01, 0.25
"""Logarithms of ratios: from the first on a change is combined with others; a neighbour of the best is tried if its
change is not known to lose the second, since it may gain beside the others."""
PROCESS = 0.017
"""Standard deviation between processes of one setting, relative, as measured on two machines: a difference between two
settings counts in the search if it is twice what this and the blocks' own spread explain."""
PAIRS, LEAST_PAIRS, FINAL_TURNS = 6, 3, 5
"""Of fresh processes in the final round, at most and at least, and the turns of each. Their number depends on the time
that is left and not on what they measure: otherwise the interval would be too narrow."""
FRESH_S = 6.0
"""That two new processes of Python take to import torch and the trainer, about."""
MOST_FAULTS = 3
"""Settings with a fault, after which no other one is examined."""


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
    late: set[str] = field(default_factory=set)
    """Labels of candidates for which there was no time."""

    def __post_init__(self) -> None:
        self._began = self.timer.clock() - self.advice.spent_s
        # What was left out may be tried now: there may be more time.
        self.entries = {entry.label: entry for entry in self.advice.entries if entry.status != LEFT_OUT}
        for entry in self.entries.values():  # a new conclusion has a final round of its own
            entry.final, entry.interval, entry.run_interval = [], None, None
        self.advice.excluded, self.advice.notes = {}, []
        self._mixed = COMPILE in self.space.choices and self.advice.goal == SPEED

    # --- what is known ---

    def entry(self, candidate: Candidate) -> Entry:
        """Return what is known of a candidate; a new entry is kept as soon as it holds a measurement."""
        return self.entries.get(candidate.label) or Entry(candidate)

    @property
    def reference(self) -> Entry:
        """What ratios are over: the default; where it fails, the first candidate that works.

        Raises:
            RunError: none works.
        """
        working = [entry for entry in self.entries.values() if entry.timed]
        if not working:
            raise RunError(f"no candidate works; the first error: {self._first_error()}")
        default = self.entry(self.space.candidate())
        return default if default.timed else working[0]

    def _first_error(self) -> str:
        failed = (f"{entry.label}: {entry.reason}" for entry in self.entries.values() if entry.reason)
        return next(failed, "none was started")

    @property
    def compile_s(self) -> float:
        """Seconds to compile a candidate: the median of all that compile, since a single time is not exact."""
        times = [entry.compiling_s() for entry in self.entries.values() if entry.candidate.compiles and entry.timed]
        return statistics.median(times) if times else 0.0

    def ratio(self, entry: Entry, turn: Turn, whole: bool = True) -> float:
        """Return how many times as fast as the reference it is, by one turn.

        With ``whole`` and goal=speed it is in a run of ``steps`` with the time to compile, unless all or none compile.
        """
        extra_s = self.compile_s / self.advice.steps if whole and self._mixed else 0.0
        own_s = turn[0] + extra_s * entry.candidate.compiles
        return (turn[1] + extra_s * self.reference.candidate.compiles) / own_s

    def logs(self, entry: Entry, whole: bool = True) -> list[float]:
        """Return the logarithms of its ratios in the search; 0 for the reference."""
        if entry is self.reference:
            return [0.0]
        return [math.log(self.ratio(entry, turn, whole)) for turn in entry.turns]

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
        """Return the entries that may be advised, the best first."""
        allowed = (entry for entry in self.entries.values() if entry.label not in self.advice.excluded)
        return sorted((entry for entry in allowed if self.merit(entry) > -math.inf), key=self.merit, reverse=True)

    def contenders(self) -> list[Entry]:
        """Return the best setting, and those that are not clearly slower (or, for memory, larger) than it."""
        best, *others = self.ranked()

        def difference(other: Entry) -> float:
            if self.advice.goal == MEMORY:
                return math.log(LEAST_MEMORY)
            return 2 * math.hypot(self._error(best), self._error(other))

        return [best, *(each for each in others if self.merit(best) - self.merit(each) < difference(each))]

    def _error(self, entry: Entry) -> float:
        """Return the standard error of its merit, that of the process included."""
        logs = self.logs(entry)
        blocks = statistics.variance(logs) / len(logs) if len(logs) > 1 else 0.0
        return math.sqrt(blocks + PROCESS**2 / max(1, entry.processes))

    def choose(self) -> Entry:
        """Return the simplest of the settings that are as good as the best."""
        contenders = self.contenders()
        near = math.log(EQUAL if self.advice.goal == SPEED else LEAST_MEMORY)
        alike = [each for each in contenders if self.merit(contenders[0]) - self.merit(each) < near]
        return min(alike, key=lambda each: (len(each.candidate.overrides), -self.merit(each)))

    def effects(self) -> dict[str, float]:
        """Return the most that each change added to the merit of a measured setting; 0 where that is not known.

        A pair of settings that differ in nothing else measures it.
        """
        merits = {entry.candidate: self.merit(entry) for entry in self.ranked()}
        known: dict[str, list[float]] = {each: [] for choices in self.space.choices.values() for each in choices}
        for candidate, merit in merits.items():
            for change in candidate.overrides:
                without = self.space.changed(candidate, key_of(change), None)
                if without in merits:
                    known[change].append(merit - merits[without])
        return {change: max(found, default=0.0) for change, found in known.items()}

    # --- what comes next ---

    def untried(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return those that were not started and are forecast to fit; none compiles where that took too long."""
        compiled = [entry for entry in self.entries.values() if entry.candidate.compiles]
        endless = any(each.status == LEFT_OUT for each in compiled) and not any(each.timed for each in compiled)
        return [
            each
            for each in dict.fromkeys(candidates)
            if each.label not in self.entries.keys() | self.late
            and not (endless and each.compiles)
            and not self.space.refused(each)
        ]

    def precisions(self) -> list[Candidate]:
        """Return the default and the other precisions."""
        changes = [[], *([each] for each in self.space.choices.get(PRECISION, []))]
        return [self.space.candidate(each) for each in changes]

    def single_changes(self) -> list[Candidate]:
        """Return the candidates with one change of the best precision."""
        known = [entry for each in self.precisions() if (entry := self.entry(each)).timed]
        best = max(known, key=self.merit, default=self.reference).candidate
        precision = {each for each in best.overrides if key_of(each) == PRECISION}
        return [
            each for each in self.space.one_change(best, REACH) if precision == {*best.overrides} & {*each.overrides}
        ]

    def promising(self) -> list[Candidate]:
        """Return untried candidates: the best with the changes that helped elsewhere, and with each other change."""
        best = self.ranked()[0].candidate
        effects = self.effects()
        helpful = {key_of(each): each for each in sorted(effects, key=effects.__getitem__) if effects[each] > HELPS}
        combined = self.space.candidate([*helpful.values(), *best.overrides])

        def gain(other: Candidate) -> float:
            return sum(effects[each] for each in other.overrides) - sum(effects[each] for each in best.overrides)

        near = [each for each in self.space.one_change(best) if gain(each) > -WORTH]
        return self.untried([combined, *sorted(near, key=gain, reverse=True)])[:AT_ONCE]

    # --- measuring ---

    def run(self) -> None:
        """Measure until one setting is ahead, several are equal, or the budget is spent, and conclude.

        Raises:
            UserError: the budget does not allow one pair.
            RunError: no candidate works, or none can be advised.
        """
        self._first()
        self._measure("precisions", self.untried(self.precisions()))
        self._measure("single changes", self.untried(self.single_changes()))
        out_of_time = False
        for _ in range(EXPLORATIONS):
            if not self.ranked() or not (found := self.promising()):
                break
            if out_of_time := self.timer.clock() - self._began > EXPLORE * self.budget_s:
                break
            self._measure("combinations", found)
        for number, most in enumerate(HALVING, 1):
            contenders = self.contenders() if self.ranked() else []
            if len(contenders) < 2 or self.advice.goal == MEMORY:
                break
            self._measure("halving", [each.candidate for each in contenders[:most]], TURNS * 2**number)
        dropped = any(entry.status == LEFT_OUT for entry in self.entries.values())
        winner = self._confirmed()
        several = SEVERAL if len(self.contenders()) > 1 else AHEAD
        self.advice.stopped = BUDGET if out_of_time or dropped or self.late else several
        self._conclude(winner)

    def _first(self) -> None:
        """Time the default, and refuse a budget in which it and one more candidate cannot be compared."""
        default = self.entry(self.space.candidate())
        if self.entries:
            return
        self.show(f"starting {default.label}, train.py's default")
        if not self._visit(default, TURNS):
            return
        step_s, pair_s = default.fastest_s(), self._pair_s(default)
        need_s = 2 * default.start_s + 2 * TURNS * self.timer.block_of(default) + LEAST_PAIRS * pair_s
        if need_s > self.budget_s:
            raise UserError(
                f"budget_minutes={self.budget_s / 60:g} is too short for one pair: the default and one candidate need "
                f"{need_s:.1f} s here (a start {default.start_s:.1f} s, a step {step_s:.2f} s, {1 + LEAST_PAIRS} "
                f"processes each); set budget_minutes={max(0.1, math.ceil(10 * 3 * need_s / 60) / 10):g}"
            )

    def _pair_s(self, entry: Entry) -> float:
        """Return what a pair of fresh processes is expected to take, if both are like this one."""
        return FRESH_S + 2 * (entry.start_s + FINAL_TURNS * self.timer.block_of(entry))

    def _measure(self, kind: str, candidates: Sequence[Candidate], turns: int = TURNS) -> None:
        """Give candidates so many turns; those for which there is no time are late."""
        entries = [self.entry(each) for each in candidates]
        entries = [each for each in entries if each.status == MEASURED and len(each.turns) < turns]
        if entries:
            self.show(f"{kind}: {', '.join(each.label for each in entries)}")
        for entry in entries:
            working = any(each.timed for each in self.entries.values())
            reserved_s = min(LEAST_PAIRS * self._pair_s(self.reference), 0.3 * self.budget_s) if working else 0.0
            left_s = self._began + self.budget_s - reserved_s - self.timer.clock()
            more = turns - len(entry.turns)
            if left_s < self._start_s(entry) + 2 * more * self.timer.block_of(entry):
                self.late.add(entry.label)
            else:
                # A compilation may take much longer than others did.
                self._visit(entry, more, left_s / 2 if entry.candidate.compiles else left_s)

    def _start_s(self, entry: Entry) -> float:
        """Return how long a start is expected to take, by those that were."""
        known = [each for each in self.entries.values() if each.start_s]
        alike = [each.start_s for each in known if each.candidate.compiles == entry.candidate.compiles]
        return entry.start_s or statistics.median(alike or [each.start_s for each in known] or [0.0])

    def _visit(self, entry: Entry, turns: int, left_s: float = math.inf, fresh: bool = False) -> bool:
        """Time a candidate beside the reference; the first that works is the reference.

        Returns:
            Whether it worked; a failure is in its entry.

        Raises:
            RunError: the reference failed.
        """
        reference = self.reference if any(each.timed for each in self.entries.values()) else entry
        self.entries[entry.label] = entry
        try:
            found = self.timer.turns(entry, reference, turns, left_s, fresh)
        except Failed as error:
            if entry is not reference and reference.status != MEASURED:
                self.entries = {label: each for label, each in self.entries.items() if each.status != MEASURED}
                self._save()
                raise RunError(
                    f"{reference.label}, which the others were compared with, failed: {reference.reason}; run the same "
                    "command again to compare them with the next one that works"
                ) from error
        else:
            if fresh:
                entry.final.append(found)
            else:
                entry.turns += found
                entry.processes += 1
                reference.turns += [(turn[1], turn[1]) for turn in found if entry is not reference]
        self._save()
        return entry.timed

    def _save(self) -> None:
        self.advice.entries = list(self.entries.values())
        self.advice.spent_s = self.timer.clock() - self._began
        self.save()

    # --- the conclusion ---

    def _confirmed(self) -> Entry:
        """Return what is advised: the choice if fresh processes confirm it and the doctor finds no fault in it.

        Otherwise the reference; after a fault the next best setting, with a final round of its own.
        """
        excluded, faulty = self.advice.excluded, 0
        default = self.space.candidate().label
        while True:
            if not self.ranked():
                why = next(iter(excluded.values()), "") or self._first_error()
                raise RunError(f"no candidate can be advised; the first error: {why}")
            reference, chosen = self.reference, self.choose()
            if chosen is not reference:
                self._final(chosen, reference)
                if not chosen.timed:
                    continue
                if (why := self._unconfirmed(chosen)) and reference.label not in excluded:
                    self.advice.notes.append(
                        f"{chosen.label} was the best until the final round, which did not confirm it: {why}"
                    )
                    chosen = reference
            if chosen.label == default:
                return chosen
            chosen.health = chosen.health or self.check_up(chosen)
            self._save()
            if not (faults := chosen.health["faults"]):
                return chosen
            excluded[chosen.label] = (
                f"{chosen.label} is not advised, because the doctor found a fault in it: {'; '.join(faults)}"
            )
            faulty += 1
            if faulty >= MOST_FAULTS:
                enough = f"{faulty} settings have a fault, so no further one is examined or advised"
                excluded |= {label: enough for label in self.entries if label not in {default, *excluded}}

    def _final(self, chosen: Entry, reference: Entry) -> None:
        """Time a setting beside the reference in pairs of fresh processes, which played no part in the choice."""
        self.show(f"final round, in fresh processes: {reference.label}, {chosen.label}")
        pair_s = 0.0
        while len(chosen.final) < PAIRS:
            began = self.timer.clock()
            if len(chosen.final) >= LEAST_PAIRS and began + pair_s > self._began + self.budget_s:
                return
            if not self._visit(chosen, FINAL_TURNS, fresh=True):
                return
            pair_s = self.timer.clock() - began

    def _final_interval(self, entry: Entry, whole: bool) -> Interval | None:
        """Return the speed by pairs of processes, the spread between them included; None: no final round."""
        medians = [statistics.median(self.ratio(entry, turn, whole) for turn in pair) for pair in entry.final]
        return ratio_interval(medians) if len(medians) > 1 else None

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
        left_out = dict.fromkeys(self.late - self.entries.keys(), "the budget had no time for it") | self.space.left_out
        others = [Entry(Candidate(label), LEFT_OUT, why) for label, why in left_out.items()]

        def place(entry: Entry) -> tuple[bool, bool, float]:
            rank = -(entry.run_speed or 0.0) if advice.goal == SPEED else float(entry.memory_bytes or 0)
            return entry is not winner, not entry.timed, rank

        advice.entries = [*sorted(self.entries.values(), key=place), *others]
        missed = [f"check-up of {winner.label}: {'; '.join(notes)}" for notes in [winner.health.get("missed")] if notes]
        advice.notes = list(dict.fromkeys([*self.space.notes, *advice.excluded.values(), *advice.notes, *missed]))
        advice.spent_s = self.timer.clock() - self._began

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
            eager = self.entry(self.space.changed(entry.candidate, COMPILE, off))
            if eager.timed and (gain := math.exp(self.speed(entry, whole=False) - self.speed(eager, whole=False))) > 1:
                saved_s = statistics.median(entry.step_s) * (gain - 1)
                entry.pays_after_steps = math.ceil(self.compile_s / saved_s)
