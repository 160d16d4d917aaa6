"""The search for the best setting within a budget of time: precisions, single changes, combinations, halving."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from evidence.advice.candidates import COMPILE, PRECISION, Candidate, Setting, Space
from evidence.advice.schema import LEFT_OUT, MEASURED, MEMORY, NOT_EXAMINED, SPEED, Advice, Entry, Turn
from evidence.advice.timing import Timer
from evidence.advice.worker import Failed, Hung
from mantissa.statistics import Interval, ratio_interval
from trainer.errors import RunError, UserError

AHEAD, SEVERAL, BUDGET = "one is ahead", "several are equal", "budget"
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
PROMISING = 1.05
"""Times as fast a step that compiles must be for a note on longer runs."""


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
        self._settings = {self.space.candidate(setting).label: setting for setting in self.space.every()}
        self._began = self.timer.clock() - self.advice.spent_s
        # What was left out may be tried now: there may be more time.
        kept = [each for each in self.advice.entries if each.label in self._settings and each.status != LEFT_OUT]
        self.entries = {entry.label: entry for entry in kept}
        for entry in kept:  # a new conclusion has a final round of its own
            entry.rounds, entry.final, entry.interval, entry.run_interval = (
                entry.rounds - len(entry.final),
                [],
                None,
                None,
            )
        self.advice.excluded, self.advice.notes = {}, []
        self._mixed = COMPILE in self.space.varied and self.advice.goal == SPEED

    # --- what is known ---

    def entry(self, setting: Setting) -> Entry:
        """Return what is known of a setting; a new entry is kept as soon as it holds a measurement."""
        candidate = self.space.candidate(setting)
        return self.entries.get(candidate.label) or Entry(candidate)

    @property
    def reference(self) -> Entry:
        """What ratios are over: the default; where it fails, the first setting that works.

        Raises:
            RunError: none works.
        """
        working = [entry for entry in self.entries.values() if entry.timed]
        if not working:
            raise RunError(f"no candidate works; the first error: {self._first_error()}")
        default = self.entry(self.space.baseline)
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
        turns = zip(entry.step_s, entry.reference_s, strict=False)
        return [math.log(self.ratio(entry, turn, whole)) for turn in turns] or [0.0]

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
        return math.sqrt(blocks + PROCESS**2 / max(1, entry.rounds))

    def choose(self) -> Entry:
        """Return the simplest of the settings that are as good as the best."""
        contenders = self.contenders()
        near = math.log(EQUAL if self.advice.goal == SPEED else LEAST_MEMORY)
        alike = [each for each in contenders if self.merit(contenders[0]) - self.merit(each) < near]
        return min(alike, key=lambda each: (self.space.changes(self._settings[each.label]), -self.merit(each)))

    def effect(self, factor: int, value: int) -> float:
        """Return the most that a change added to the merit of a measured setting; 0 where that is not known.

        A pair of settings that differ in nothing else measures it.
        """
        merits = {self._settings[entry.label]: self.merit(entry) for entry in self.ranked()}
        pairs = ((setting, self.space.changed(setting, factor, 0)) for setting in merits if setting[factor] == value)
        return max((merits[setting] - merits[without] for setting, without in pairs if without in merits), default=0.0)

    # --- what comes next ---

    def untried(self, settings: Iterable[Setting]) -> list[Setting]:
        """Return those that were not started and are forecast to fit; none compiles where that took too long."""
        compiled = [entry for entry in self.entries.values() if entry.candidate.compiles]
        endless = any(each.status == LEFT_OUT for each in compiled) and not any(each.timed for each in compiled)
        found = []
        for setting in dict.fromkeys(settings):
            candidate = self.space.candidate(setting)
            known = candidate.label in self.entries.keys() | self.late
            if not (known or (endless and candidate.compiles) or self.space.refused(candidate)):
                found.append(setting)
        return found

    def precisions(self) -> list[Setting]:
        """Return the baseline and the other precisions."""
        position = self.space.position(PRECISION)
        values = range(len(self.space.factors[position].values))
        return [self.space.changed(self.space.baseline, position, value) for value in values]

    def single_changes(self) -> list[Setting]:
        """Return the settings with one change of the best precision."""
        known = [entry for setting in self.precisions() if (entry := self.entry(setting)).timed]
        anchor = self._settings[max(known, key=self.merit, default=self.reference).label]
        position = self.space.position(PRECISION)
        found = [setting for setting in self.space.one_change(anchor) if setting[position] == anchor[position]]
        return [setting for setting in found if max(setting[:position] + setting[position + 1 :], default=0) <= REACH]

    def promising(self) -> list[Setting]:
        """Return untried settings: combinations of changes that helped, and neighbours of the best."""
        top = self.ranked()[0]
        best, merit = self._settings[top.label], self.merit(top)
        effects = [
            [self.effect(index, value) if value else 0.0 for value in range(len(factor.values))]
            for index, factor in enumerate(self.space.factors)
        ]

        def expected(setting: Setting) -> float:
            return sum(known[value] for known, value in zip(effects, setting, strict=True))

        helpful = [
            [value for value, effect in enumerate(known) if value in (0, own) or effect > HELPS]
            for known, own in zip(effects, best, strict=True)
        ]
        combined = [each for each in itertools.product(*helpful) if expected(each) > merit - HELPS]
        combined.sort(key=lambda setting: (-round(expected(setting), 2), self.space.changes(setting)))
        near = [each for each in self.space.one_change(best) if expected(best) - expected(each) < WORTH]
        near.sort(key=expected, reverse=True)
        return (self.untried(combined) or self.untried(near))[:AT_ONCE]

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
            self._measure("halving", [self._settings[each.label] for each in contenders[:most]], TURNS * 2**number)
        dropped = any(entry.status == LEFT_OUT for entry in self.entries.values())
        winner = self._confirmed()
        several = SEVERAL if len(self.contenders()) > 1 else AHEAD
        self.advice.stopped = BUDGET if out_of_time or dropped or self.late else several
        self._conclude(winner)

    def _first(self) -> None:
        """Time the default, and refuse a budget in which it and one more candidate cannot be compared."""
        default = self.entry(self.space.baseline)
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

    def _measure(self, kind: str, settings: Sequence[Setting], turns: int = TURNS) -> None:
        """Give settings so many turns; those for which there is no time are late."""
        entries = [self.entry(setting) for setting in settings]
        entries = [each for each in entries if each.status == MEASURED and len(each.step_s) < turns]
        if entries:
            self.show(f"{kind}: {', '.join(each.label for each in entries)}")
        for entry in entries:
            working = [each for each in self.entries.values() if each.timed]
            reserved_s = min(LEAST_PAIRS * self._pair_s(self.reference), 0.3 * self.budget_s) if working else 0.0
            left_s = self._began + self.budget_s - reserved_s - self.timer.clock()
            more = turns - len(entry.step_s)
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

    def _visit(self, entry: Entry, turns: int, left_s: float = math.inf) -> bool:
        """Time a candidate beside the reference; the first that works is the reference. Return whether it worked."""
        reference = self.reference if any(each.timed for each in self.entries.values()) else entry
        self.entries[entry.label] = entry
        with self._failing(entry, reference):
            self.timer.visit(entry, reference, turns, left_s)
        self._save()
        return entry.timed

    @contextmanager
    def _failing(self, entry: Entry, reference: Entry) -> Iterator[None]:
        """Go on where a candidate fails, which its entry records; not where the reference does."""
        try:
            yield
        except (Failed, Hung) as error:
            if entry is reference or reference.status == MEASURED:
                return
            self.entries = {label: each for label, each in self.entries.items() if each.status != MEASURED}
            self._save()
            raise RunError(
                f"{reference.label}, which the others were compared with, failed: {reference.reason}; run the same "
                "command again to compare them with the next one that works"
            ) from error

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
        default = self.space.candidate(self.space.baseline).label
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
            if not chosen.health:
                chosen.health = self.check_up(chosen)
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
            with self._failing(chosen, reference):
                chosen.final.append(self.timer.confirm(chosen, reference, FINAL_TURNS))
            if not chosen.timed:
                return
            chosen.rounds += 1
            pair_s = self.timer.clock() - began
            self._save()

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
        advice, reference = self.advice, self.reference
        for entry in self.entries.values():
            self._describe(entry)
        contenders = [entry.label for entry in self.contenders()]
        advice.baseline, advice.winner = reference.label, winner.label
        advice.equal = [each for each in contenders if each != winner.label] if winner.label in contenders else []
        left_out = dict.fromkeys(self.late - self.entries.keys(), "the budget had no time for it") | self.space.left_out
        others = [Entry(Candidate(label), LEFT_OUT, why) for label, why in left_out.items()]
        advice.entries = [*sorted(self.entries.values(), key=lambda entry: self._order(entry, winner)), *others]
        missed = [note for note in winner.health.get("notes", []) if note.startswith(NOT_EXAMINED)]
        health = [f"check-up of {winner.label}: {'; '.join(missed)}"] * bool(missed)
        notes = [*self.space.notes, *advice.excluded.values(), *advice.notes, *health, self._longer_run(winner)]
        advice.notes = list(dict.fromkeys(filter(None, notes)))
        advice.spent_s = self.timer.clock() - self._began

    def _order(self, entry: Entry, winner: Entry) -> tuple[float, ...]:
        if entry is winner or not entry.timed:
            return (0,) if entry is winner else (2,)
        return (1, float(entry.memory_bytes or 0) if self.advice.goal == MEMORY else -(entry.run_speed or 0.0))

    def _describe(self, entry: Entry) -> None:
        """Add to an entry what follows from its times."""
        if not entry.timed:
            return
        entry.interval = self._final_interval(entry, whole=False)
        entry.speed = entry.interval.mean if entry.interval else math.exp(self.speed(entry, whole=False))
        if self.advice.goal == SPEED:
            entry.run_interval = self._final_interval(entry, whole=True)
            entry.run_speed = entry.run_interval.mean if entry.run_interval else math.exp(self.speed(entry))
        entry.compile_s = entry.compiling_s()
        if (gain := self._gain(entry)) is not None:
            saved_s = statistics.median(entry.step_s) * (gain - 1)
            entry.never_pays = saved_s <= 0
            entry.pays_after_steps = None if entry.never_pays else math.ceil(self.compile_s / saved_s)

    def _gain(self, entry: Entry) -> float | None:
        """Return how many times as fast compiling makes a step; None: it does not compile, or that is unknown."""
        if not (entry.candidate.compiles and entry.timed and COMPILE in self.space.varied):
            return None
        position, setting = self.space.position(COMPILE), self._settings[entry.label]
        eager = self.entry(self.space.changed(setting, position, 1 - setting[position]))
        return math.exp(self.speed(entry, whole=False) - self.speed(eager, whole=False)) if eager.timed else None

    def _longer_run(self, winner: Entry) -> str:
        """Return from how many steps on compiling the winner would pay, as a sentence; empty: it does, or is unknown.

        It is estimated by the setting whose steps gain the most from compiling.
        """
        allowed = [entry for entry in self.entries.values() if entry.label not in self.advice.excluded]
        gains = {entry.label: gain for entry in allowed if (gain := self._gain(entry)) is not None}
        label = max(gains, key=gains.__getitem__, default="")
        if self.advice.goal == MEMORY or winner.candidate.compiles or gains.get(label, 1.0) < PROMISING:
            return ""
        compile_s, steps = self.compile_s, self.advice.steps
        needed = math.ceil(compile_s / (statistics.median(winner.step_s) * (1 - 1 / gains[label])))
        if needed <= steps:
            return ""
        return (
            f"compiling takes {compile_s:.0f} s and makes a step {gains[label]:.2f}x as fast ({label}); if it does the "
            f"same for {winner.label}, it saves time in a run of about {needed} steps or more; this advice is for "
            f"{steps} steps, so for a longer run call advise.py with steps="
        )
