"""The search for the best setting within a budget of time, round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evidence.advice.candidates import Setting
from evidence.advice.plan import FIRST, HALVING, REPEATS, Plan
from evidence.advice.rounds import LEAST_REPEATS, Bench, interval
from evidence.advice.schema import FINAL, LEFT_OUT, TWIN, Candidate, Round, compiles
from trainer.errors import RunError, UserError

AHEAD, SEVERAL, BUDGET = "one is ahead", "several are equal", "budget"
NO_TIME = "the setting that was the best is not advised, because there was no time for its final round"
FINAL_REPEATS, FINAL_LEAST = 12, 8
"""Repeats of the final round, at most; and at least, before an exact interval ends it. Ending it sooner, whenever the
interval happens to be narrow, would make the intervals too narrow."""
EXPLORE = 0.6
"""The part of the budget after which no new settings are tried."""
_EXACT = 0.015
"""Half the width of the final interval, relative, with which the final round ends early."""


Objections = Callable[[Setting], dict[str, str]]
"""Is given the setting that the final round has timed; returns labels that are not to be advised, with reasons."""


@dataclass
class Search:
    """Runs the rounds; what the plan's log already holds is not measured again."""

    plan: Plan
    bench: Bench
    budget_s: float
    save: Callable[[], None]
    """Called after each round."""
    show: Callable[[str], None]

    def __post_init__(self) -> None:
        self.log = self.plan.log
        for label in [label for label, record in self.log.records.items() if record.status == LEFT_OUT]:
            del self.log.records[label]  # now there may be more time
        self.space = self.plan.space
        self._began = self.bench.clock() - self.log.spent_s

    @property
    def deadline(self) -> float:
        """When the time is over, by the bench's clock."""
        return self._began + self.budget_s

    def run(self, objections: Objections = lambda chosen: {}) -> tuple[Setting, str]:
        """Measure until one setting is ahead, several are equal, or the budget is spent.

        Args:
            objections: to the chosen setting; while there are some, the next best has a final round of its own.

        Returns:
            What was chosen, and why it ended.

        Raises:
            UserError: the budget does not allow one pair.
            RunError: no candidate works.
        """
        if not self.log.rounds:
            self._affordable(self.space.candidate(self.space.baseline))
        self.log.rounds = [done for done in self.log.rounds if done.kind != FINAL]
        over = False
        while True:
            explore = self.bench.clock() - self._began < EXPLORE * self.budget_s
            following = self.plan.next(explore)
            over = following is not None and self._over() and bool(self.log.rounds)
            if following is None or over:
                break
            self._round(*following)
        dropped = any(record.status == LEFT_OUT for record in self.log.records.values())
        over = over or dropped or bool(self.plan.late) or self.plan.next(explore=True) is not None
        if self.plan.reference is None:
            raise RunError(f"no candidate works; the first error: {self._first_error()}")
        while True:
            if self.plan.reference is None:
                raise RunError(f"no candidate can be advised; the first error: {self._first_error()}")
            chosen = self.plan.choose(self.plan.contenders())
            if not self._final(chosen):
                continue
            if not (found := objections(chosen)):
                break
            self.plan.excluded |= found
        over = over or any(why == NO_TIME for why in self.plan.excluded.values())
        return chosen, BUDGET if over else SEVERAL if len(self.plan.contenders()) > 1 else AHEAD

    def _over(self) -> bool:
        return self.bench.clock() + 2 * self._reserve() > self.deadline

    def _reserve(self) -> float:
        """Return the seconds that the final round needs at least, or a part of the budget."""
        block = max((self.bench.expected_block_s(label) for label in self.log.records), default=0.0)
        start = max((record.start_s for label, record in self.log.records.items() if not compiles(label)), default=0.0)
        one_at_a_time = len(self.bench.held) > 1 and len(self.bench.alive) < 2  # the memory holds one process
        starts = 2 * LEAST_REPEATS if one_at_a_time else 1
        return min(FINAL_LEAST * 4 * block + starts * start, 0.3 * self.budget_s)

    def _affordable(self, base: Candidate) -> None:
        """Start the baseline, and refuse a budget in which not even it and one more candidate can be timed."""
        began = self.bench.clock()
        self.show(f"starting {base.label}, train.py's default")
        if not self.bench.begin(base, math.inf):
            return
        record = self.log.records[base.label]
        start, step = self.bench.clock() - began, record.step_s()
        block = max(self.bench.block_s, step)
        need = start + record.start_s + LEAST_REPEATS * 2 * block
        if need > self.budget_s:
            raise UserError(
                f"budget_minutes={self.budget_s / 60:g} is too short for one pair: the default and one candidate need "
                f"{need:.1f} s here (a start {start:.1f} s, a step {step:.2f} s, {LEAST_REPEATS} blocks each); "
                f"set budget_minutes={max(0.1, math.ceil(10 * 5 * need / 60) / 10):g}"
            )

    def _round(self, kind: str, settings: Sequence[Setting], repeats: int) -> None:
        """Measure a round."""
        reference = self.plan.reference
        base = self.space.baseline if reference is None else reference
        candidates = [self.space.candidate(setting) for setting in dict.fromkeys([base, *settings])]
        kept = [candidates[0].label]
        if kind == FIRST:
            candidates.insert(1, self._twin(candidates[0]))
            kept.append(candidates[1].label)
        labels = [each.label for each in candidates]
        if kind == HALVING and any(map(compiles, labels)):
            kept += [label for label in labels if not compiles(label)]  # slower steps, in perhaps the shorter run
        self.show(f"{kind}: {', '.join(each.label for each in candidates)}")
        late = self.bench.round(kind, candidates, repeats, self.deadline - self._reserve(), kept)
        self.plan.late |= {each.label for each in late}
        self._save()

    def _twin(self, candidate: Candidate) -> Candidate:
        return replace(candidate, label=candidate.label + TWIN)

    def _save(self) -> None:
        self.log.spent_s = self.bench.clock() - self._began
        self.save()

    def _final(self, chosen: Setting) -> bool:
        """Time the chosen setting against the reference with new blocks, which played no part in the choice.

        Where the reference itself is chosen there is nothing to confirm: a few blocks add null pairs.

        Returns:
            Whether both were timed; if not, one of them has failed, or the chosen one is excluded now.
        """
        reference = self.plan.reference
        assert reference is not None
        base, winner = self.space.candidate(reference), self.space.candidate(chosen)
        candidates = [base, *([winner] if chosen != reference else []), self._twin(base)]
        eager = self.plan.eager(chosen)
        if eager is not None and eager != reference and self.space.refused(self.space.candidate(eager)) is None:
            candidates.append(self.space.candidate(eager))
        self.show(f"final round: {', '.join(each.label for each in candidates)}")

        def enough(done: Round) -> bool:
            found = interval(self.log.ratios(winner.label, base.label, self.log.final))
            exact = found is not None and found.high / found.mean - 1 < _EXACT
            return len(done.times.get(base.label, [])) >= FINAL_LEAST and exact

        labels = [each.label for each in candidates]
        # Room for the least number of blocks, whatever the other rounds took.
        need = max(1.5 * self.bench.need_s(candidates[:2], LEAST_REPEATS), self.bench.need_s(candidates, REPEATS + 1))
        deadline = max(self.deadline, self.bench.clock() + need)
        repeats = REPEATS if chosen == reference else FINAL_REPEATS
        self.bench.round(FINAL, candidates, repeats, deadline, labels, enough)
        self._save()
        if chosen == reference:
            return self.log.ok(base.label)
        if interval(self.log.ratios(winner.label, base.label, self.log.final)) is not None:
            return True
        if self.log.ok(winner.label) and self.log.ok(base.label):
            self.plan.excluded[winner.label] = NO_TIME
        return False

    def _first_error(self) -> str:
        failed = (f"{label}: {record.reason}" for label, record in self.log.records.items() if record.reason)
        return next(failed, next(iter(self.plan.excluded.values()), "none was started"))
