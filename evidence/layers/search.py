"""The search for the layers that need more bits: is it needed, which layers, how few of them, and is it so.

``Search.run`` reads from top to bottom. What it decides by are the functions below, of numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from evidence.comparison.compare import ComparisonPlan, Result, compare
from evidence.layers.groups import Group, Layers, override
from evidence.layers.training import InProcess
from evidence.runs import Arm, Runner, merge_overrides
from mantissa.formats import BF16
from mantissa.verdict.judge import Row, judge
from mantissa.verdict.runs import SEED_SHIFT, Run, Store
from mantissa.verdict.statistics import BETTER, EQUIVALENT, NOT_JUDGED, WORSE
from trainer.config.schema import Config
from trainer.errors import RunError

SHARE = 0.25
"""Share of the steps that ranks the groups."""
RANKING_SEEDS, TRYING_SEEDS = 2, 2
"""Seeds with which groups are ranked, and sets are tried: the first ones. They only choose; fresh seeds decide."""
ENOUGH = 0.5
"""Part of the margin that a set may be above bf16 when it is tried, so that fresh seeds can show that it is within."""
NEEDED, CONFIRMED = "needed", "confirmed"
"""Names of the two comparisons."""
LIFTED = "lifted"
"""Label of the winner in the comparison that confirms it."""


@dataclass(frozen=True)
class Question:
    """What is asked."""

    common: list[str]
    """Overrides of all runs, without the precision and its ``modules``."""
    of_low: list[str]
    """Those of the mode, whose scaled layers may need more bits."""
    own: Mapping[str, str]
    """The user's own ``precision.modules``."""
    base: Config
    """Config of the mode, resolved."""
    seeds: list[int]
    margin: float
    folder: Path
    command: str
    runner: type[Runner] = Runner
    """Trains what is compared."""

    @property
    def low(self) -> str:
        """The mode."""
        return self.base.precision.mode

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole run."""
        return int(self.base.steps)

    @property
    def short_steps(self) -> int:
        """Optimizer steps of a run that ranks."""
        return round(SHARE * self.steps)

    def arm(self, label: str, lifted: Group | None = None) -> Arm:
        """Return the arm in the mode's format, but for what is lifted."""
        return Arm(label, (*self.of_low, *override(lifted, self.own)))

    def short(self, arm: Arm) -> Arm:
        """Return an arm that trains as long as ranks."""
        steps = self.short_steps
        few = [f"steps={steps}", "epochs=null", f"eval_every={steps}"]
        return Arm(f"{arm.label}, {steps} steps", tuple(merge_overrides(arm.overrides, few)))

    @property
    def high(self) -> Arm:
        """The arm in bf16."""
        return Arm(BF16.name, (f"precision={BF16.name}", *override(None, self.own)))

    @property
    def fresh_seeds(self) -> list[int]:
        """Seeds that nothing was chosen by."""
        return [SEED_SHIFT + seed for seed in self.seeds]


@dataclass(frozen=True)
class Ranked:
    """A group, and what lifting it did in short trainings."""

    group: Group
    gains: list[float]
    """By how much lower the loss is than with nothing lifted, relative to that, by seed."""

    @property
    def gain(self) -> float:
        """Mean gain, which ranks."""
        return fmean(self.gains)


@dataclass
class Tried:
    """A set of layers that was lifted in whole runs."""

    group: Group
    above_high: float
    """Mean relative difference of the loss to bf16, over the same seeds; above 0: higher."""
    above_low: float
    """To nothing lifted."""


@dataclass
class Search:
    """Asks, and keeps what it finds out."""

    question: Question
    layers: Layers
    store: Store
    """What is kept of the runs in this process."""
    needed: Result | None = None
    ranked: list[Ranked] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    """All of the search at full length against bf16, on the seeds that sets were tried with, by label."""
    winner: Tried | None = None
    """What was to be confirmed."""
    confirmed: Result | None = None
    gain: Row | None = None
    """The winner against nothing lifted, on the fresh seeds."""
    lifted: Group | None = None
    """The answer; None: nothing is lifted."""

    def run(self) -> None:
        """Find what is to be lifted, if anything.

        Raises:
            RunError: bf16 itself does not train.
        """
        question = self.question

        # 1. Is anything needed? All layers in the format, against bf16.
        low = question.arm(question.low)
        self.needed = self._compare(NEEDED, [question.high, low], question.seeds)
        verdict = self.needed.rows[question.low].quality
        if verdict.verdict == NOT_JUDGED:
            raise RunError(f"{question.low} cannot be compared with bf16: {verdict.why}")
        if verdict.verdict in (EQUIVALENT, BETTER):
            return

        # 2. Which layers? Each group lifted in short trainings.
        self.ranked = self._rank()

        # 3. How few? The promising sets in whole trainings, the smallest first, until one is as good as bf16.
        seeds = question.seeds[:TRYING_SEEDS]
        whole: dict[str, Mapping[int, Run]] = {
            label: {seed: self.needed.runs[label][seed] for seed in seeds} for label in (BF16.name, question.low)
        }
        for group in sorted(promising(self.ranked, self.layers), key=self.layers.cost):
            whole |= self._runner().run_all([question.arm(group.label, group)], seeds)
            above = (mean_difference(whole[group.label], whole[label]) for label in (BF16.name, question.low))
            self.tried.append(Tried(group, *above))
            if self.tried[-1].above_high <= ENOUGH * question.margin:
                break
        self.rows = judge(whole, question.margin, Store())
        self.winner = best(self.tried, question.margin, self.layers)
        if self.winner is None:
            return

        # 4. Is it so? The winner on fresh seeds, against bf16 and against nothing lifted.
        arms = [question.high, low, question.arm(LIFTED, self.winner.group)]
        self.confirmed = self._compare(CONFIRMED, arms, question.fresh_seeds)
        runs, looked = self.confirmed.runs, Store()
        for look in self.confirmed.looks[:-1]:  # where runs failed before, the tests are stricter here, too
            looked.add("look", look)
        self.gain = judge({label: runs[label] for label in (low.label, LIFTED)}, question.margin, looked)[LIFTED]
        if holds(self.confirmed.rows, self.gain, low.label):
            self.lifted = self.winner.group

    def _compare(self, name: str, arms: list[Arm], seeds: list[int]) -> Result:
        question = self.question
        plan = ComparisonPlan(arms, seeds, question.margin, question.common, question.folder, name)
        return compare(plan, question.base, question.command, question.runner)

    def _runner(self) -> InProcess:
        runner = InProcess(self.question.folder, self.question.common)
        runner.store = self.store
        return runner

    def _rank(self) -> list[Ranked]:
        """Return the groups, those first whose lifting lowers the loss most."""
        question, groups = self.question, self.layers.groups()
        seeds, steps = question.seeds[:RANKING_SEEDS], question.short_steps

        # Short trainings with the same seeds, and so with the same first weights and data.
        arms = {group: question.short(question.arm(group.label, group)) for group in groups}
        low = question.short(question.arm(question.low))
        print(f"{len(groups)} groups, each lifted for {steps} of {question.steps} steps", flush=True)
        runs = self._runner().run_all([low, *arms.values()], seeds)
        base = runs[low.label]
        ranked = [
            Ranked(group, [-difference(runs[arms[group].label][seed], base[seed]) for seed in seeds])
            for group in groups
        ]
        return sorted(ranked, key=lambda each: each.gain, reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        assert self.needed is not None
        question, layers = self.question, self.layers
        qualities = {NEEDED: self.needed.rows[question.low].quality}
        if self.confirmed and self.gain:
            qualities |= {"winner beside bf16": self.confirmed.rows[LIFTED].quality}
            qualities |= {f"winner beside {question.low}": self.gain.quality}
        return self.needed.facts | {
            "mode": question.low,
            "margin": question.margin,
            "seeds": question.seeds,
            "fresh_seeds": question.fresh_seeds,
            "share_in_low_format": layers.share(),
            "ranked": [self._described(each.group) | {"gains": each.gains} for each in self.ranked],
            "tried": [
                self._described(each.group) | {"above_bf16": each.above_high, f"above_{question.low}": each.above_low}
                for each in self.tried
            ],
            "qualities": {name: asdict(quality) for name, quality in qualities.items()},
            "winner": self.winner and self._described(self.winner.group),
            "confirmed": self.lifted is not None,
            "override": override(self.lifted, question.own)[0] if self.lifted else None,
        }

    def _described(self, group: Group) -> dict[str, Any]:
        share = self.layers.share(group)
        return {"patterns": group.patterns, "layers": sorted(group.layers), "share_in_low_format": share}


def difference(run: Run, base: Run) -> float:
    """Return by how much a run's loss is above another's, relative to that; at most ±1, as where only one diverged."""
    loss, other = run.values.get("loss"), base.values.get("loss")
    if loss is None or other is None:
        return float((loss is None) - (other is None))
    return max(-1.0, min(1.0, (loss - other) / abs(other))) if other else 0.0


def mean_difference(runs: Mapping[int, Run], base: Mapping[int, Run]) -> float:
    """Return the mean ``difference`` over the seeds."""
    return fmean(difference(run, base[seed]) for seed, run in runs.items())


def promising(ranked: Sequence[Ranked], layers: Layers) -> list[Group]:
    """Return the sets to try, at most four, none twice, and none with all layers.

    The best group; what it shares with the best one that crosses it, as a block and a kind of layer do; the second
    best; both together.
    """
    first, *others = (each.group for each in ranked)
    crossing = next((each for each in others if _cross(first, each)), None)
    sets = [first, layers.group(first.layers & crossing.layers) if crossing else None]
    sets += [others[0], first | others[0]] if others else []
    return layers.distinct(sets)


def _cross(one: Group, other: Group) -> bool:
    shared = one.layers & other.layers
    return bool(shared) and shared not in (one.layers, other.layers)


def best(tried: Sequence[Tried], margin: float, layers: Layers) -> Tried | None:
    """Return the set of fewest FLOP that is about as good as bf16, see ``ENOUGH``; else the one that gains most.

    None: no set gains anything.
    """
    gaining = [each for each in tried if each.above_low < 0]
    if enough := [each for each in gaining if each.above_high <= ENOUGH * margin]:
        return min(enough, key=lambda each: layers.cost(each.group))
    return min(gaining, key=lambda each: each.above_low, default=None)


def holds(rows: Mapping[str, Row], gain: Row, low: str) -> bool:
    """Return whether the verdicts of fresh seeds confirm the winner.

    It is better than nothing lifted by more than the margin; or it is as good as bf16, and nothing lifted is not.

    Args:
        rows: of the mode and the winner, against bf16.
        gain: of the winner, against the mode.
        low: label of the mode.
    """
    as_good = rows[LIFTED].quality.verdict in (EQUIVALENT, BETTER)
    return gain.quality.verdict == BETTER or (as_good and rows[low].quality.verdict == WORSE)
