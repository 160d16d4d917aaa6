"""The judge of a comparison: the verdict on each arm's loss, its cost, and what it takes to an equal loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from mantissa.display import counted
from mantissa.verdict.equal_loss import Reach, reach
from mantissa.verdict.runs import Look, Run, Runs, Store
from mantissa.verdict.statistics import (
    INCONCLUSIVE,
    NOT_JUDGED,
    PAIRS,
    WORSE,
    Equivalence,
    Interval,
    equivalence,
    mean_interval,
    ratio_interval,
)

TIMED = ("speed", "minutes")
"""Numbers of a run that depend on what else the machine does, and on the arithmetic of its format."""
EXACT = ("memory",)
"""Numbers that every run of a command has in common, so that few pairs suffice."""
BUSY = 0.1
"""Share of the CPUs, or of a GPU's time, that others use, from which on times say little about the machine."""
Losses = Mapping[int, float | None]
"""Final losses of an arm by seed, lower is better. Not finite: the run diverged. None: it failed."""


@dataclass
class Quality:
    """The final loss of an arm, and its verdict."""

    values: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """Relative differences (arm − baseline) / |baseline|, one per pair."""
    rounding: float = 0.0
    """Standard deviation that the rounding of the losses gives the differences."""
    verdict: str = ""
    """Verdict; empty for the baseline."""
    why: str = ""
    """Reason for the verdict, or what would settle it."""
    test: Equivalence | None = None
    look: int = 1
    """Number of the look at which the test was made."""

    @property
    def interval(self) -> Interval | None:
        """Interval to show: the one that decided, 95 % where nothing was; None: fewer than two pairs."""
        if len(self.differences) < 2:
            return None
        return self.test.difference if self.test else mean_interval(self.differences, rounding=self.rounding)


@dataclass
class Ratio:
    """A number of an arm's runs, and its ratios to the baseline over pairs of runs of the same seed."""

    value: Interval | None
    """Arithmetic mean over the seeds; None: not measured, or fewer than two runs."""
    values: list[float] = field(default_factory=list)
    """Values, one per seed."""
    ratio: Interval | None = None
    """Geometric mean over the pairs; None for the baseline itself."""
    ratios: list[float] = field(default_factory=list)
    why: str = ""
    """Reason why it is not judged, and what to do; empty: it is."""


@dataclass
class Row:
    """One arm, judged against the baseline."""

    quality: Quality
    ratios: dict[str, Ratio]
    """Ratios by the name of the number."""
    reach: Reach


def judge(
    runs: Runs,
    margin: float,
    store: Store,
    measures: Sequence[str] = (),
    higher_is_better: bool = False,
) -> dict[str, Row]:
    """Judge each arm against the first, by one row each.

    Args:
        runs: all runs, failed ones too.
        margin: relative difference of the losses that is too small to matter.
        store: looks of before, which make the tests stricter; this one is kept there.
        measures: names of the numbers whose ratios are taken.
        higher_is_better: whether ``loss`` is something like an accuracy.
    """
    base, *_ = runs.values()

    # Quality: the verdict on the final losses, or on what is higher where it is better, negated.
    sign = -1 if higher_is_better else 1
    losses = {
        arm: {seed: None if (loss := run.number("loss")) is None else sign * loss for seed, run in of_arm.items()}
        for arm, of_arm in runs.items()
    }
    qualities = _at_all_looks(losses, margin, store)

    # Cost: speed, memory, and whatever else was asked for.
    ratios = {
        arm: {name: ratio(name, of_arm, {} if of_arm is base else base) for name in measures}
        for arm, of_arm in runs.items()
    }

    # Both in one: what it takes to the baseline's final loss. Where speeds are not comparable, steps alone are.
    curves = {
        arm: {seed: (run.curve[0], [sign * loss for loss in run.curve[1]]) for seed, run in of_arm.items() if run.ended}
        for arm, of_arm in runs.items()
    }
    step_s = {
        arm: {seed: step_s for seed, run in of_arm.items() if (step_s := run.number("step_s")) is not None}
        for arm, of_arm in runs.items()
        if (speed := ratios[arm].get("speed")) and speed.values and not speed.why
    }
    verdicts = {arm: quality.verdict for arm, quality in qualities.items()}
    reached = reach(curves, verdicts, margin, len(store.looks), step_s)
    return {arm: Row(qualities[arm], ratios[arm], reached[arm]) for arm in runs}


# --- quality ---


def _at_all_looks(arms: Mapping[str, Losses], margin: float, store: Store) -> dict[str, Quality]:
    """Judge every arm at each look, and keep that of now before any report shows it.

    To see the same runs again is no other look, and neither is one that judges nothing.
    """
    # What is seen now, and whether it is more than at the last look.
    ended = sorted([label, seed] for label, losses in arms.items() for seed, loss in losses.items() if loss is not None)
    look: Look = {"seeds": sorted(set().union(*arms.values())), "ended": ended}
    is_new = look not in store.looks[-1:]
    earlier = store.looks if is_new else store.looks[:-1]

    # What one look has decided stands where the stricter tests of a later one leave it open.
    qualities: dict[str, Quality] = {}
    for number, then in enumerate([*(_then(arms, past) for past in earlier), arms], 1):
        before, qualities = qualities, _at_look(then, margin, number)
        for label, known in before.items():
            if known.test and known.verdict != INCONCLUSIVE == qualities[label].verdict:
                why = f"decided at look {known.look}, of {known.test.difference.count} seeds"
                stands = replace(qualities[label], verdict=known.verdict, test=known.test, look=known.look, why=why)
                qualities[label] = stands

    # A new look counts from now on, if it judges anything.
    if is_new and any(quality.test or quality.verdict == WORSE for quality in qualities.values()):
        store.add("look", look)
    return qualities


def _then(arms: Mapping[str, Losses], look: Look) -> dict[str, Losses]:
    """Return the runs that had ended at a look."""
    return {
        label: {seed: loss for seed, loss in losses.items() if [label, seed] in look["ended"]}
        for label, losses in arms.items()
    }


def _at_look(arms: Mapping[str, Losses], margin: float, look: int) -> dict[str, Quality]:
    """Return the verdicts of one look, corrected for the number of all arms and looks."""
    # Differences, and the arms that cannot be tested.
    baseline, *others = arms
    qualities = {baseline: Quality(list(_finite(arms[baseline]).values()))}
    qualities |= {label: _compared(arms[label], arms[baseline]) for label in others}

    # The tests of all others together.
    tested = [qualities[label] for label in others if not qualities[label].verdict]
    differences, roundings = [quality.differences for quality in tested], [quality.rounding for quality in tested]
    tests = equivalence(differences, margin, len(others) - len(tested), look, roundings)
    for quality, test in zip(tested, tests, strict=True):
        quality.test, quality.verdict, quality.look = test, test.verdict, look
        if test.pairs_needed:
            needed = f"about {test.pairs_needed} seeds with this spread and mean would decide it, 4 times in 5"
            quality.why = "; ".join(filter(None, [quality.why, needed]))
    return qualities


def _compared(losses: Losses, base: Losses) -> Quality:
    """Return the losses and the differences, with a verdict only where there is no test."""
    # Pairs of losses, and how coarsely they are rounded.
    finite, others = _finite(losses), _finite(base)
    differences = [(loss - others[seed]) / abs(others[seed]) for seed, loss in finite.items() if others.get(seed)]
    quality = Quality(list(finite.values()), differences)
    if any(others.values()) and finite:  # two numbers are rounded, each by up to half a step
        step = _step(finite.values(), others.values())
        quality.rounding = step / math.sqrt(6) / fmean(map(abs, others.values()))

    # What diverged or failed where the baseline did not.
    diverged = [seed for seed in _diverged(losses) if seed in others]
    failed = [seed for seed in others if losses.get(seed) is None]
    why = [f"{len(diverged)} of {len(losses)} runs diverged where the baseline's did not"] if diverged else []

    # Whether there is a test; where there is, it gives the verdict.
    if others and min(others.values()) <= 0 <= max(others.values()):
        quality.verdict = NOT_JUDGED
        why.append("the baseline is 0, or on both sides of it, so that no difference is relative to it")
    elif few := _too_few(len(differences) + len(diverged), len(losses)):
        quality.verdict = NOT_JUDGED
        why.append(few)
    elif diverged:
        quality.verdict = WORSE
    elif failed:
        # What a precision breaks with some seeds is no reason to judge it by the others.
        quality.verdict = NOT_JUDGED
        counts = f"{len(failed)} of {len(others)} runs"
        remedy = "the same command retries them (python -m mantissa compare: with --continue)"
        why.append(f"{counts} failed where the baseline's did not; {remedy}")
    else:
        if len(differences) < len(losses):
            why.append(f"only {len(differences)} of {len(losses)} pairs finished")
        if worse := [seed for seed in _diverged(base) if seed in finite]:
            why.append(f"the baseline diverged in {len(worse)} where this arm did not")
    quality.why = "; ".join(why)
    return quality


def _finite(losses: Losses) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if loss is not None and math.isfinite(loss)}


def _diverged(losses: Losses) -> list[int]:
    return [seed for seed, loss in losses.items() if loss is not None and not math.isfinite(loss)]


def _step(values: Iterable[float], base: Collection[float]) -> float:
    """Return the step in which values come: that of their last digit, or of the accuracy of a few samples.

    It is the greatest common divisor of their distances; of numbers with all digits, nothing beside the baseline's.
    """
    lowest, step = min(base), 0.0
    for distance in (abs(value - lowest) for value in (*base, *values)):
        while distance > 1e-4 * (max(base) - lowest):  # Euclid's algorithm
            step, distance = distance, min(step % distance, distance - step % distance)
    return step


def _too_few(pairs: int, planned: int) -> str:
    """Return why so many pairs are too few for a verdict; empty: they suffice."""
    if pairs >= PAIRS:
        return ""
    if pairs < planned:
        return f"{pairs} of {planned} pairs finished, and a verdict needs {PAIRS}"
    return f"a verdict needs more than {counted(pairs, 'seed')}; use 5"


# --- cost ---


def ratio(name: str, runs: Mapping[int, Run], base: Mapping[int, Run]) -> Ratio:
    """Return a number of an arm's runs, and its ratios to the baseline's, seed by seed.

    A pair has no ratio if a number is 0 or less, or the baseline's is infinite.

    Args:
        name: of the number.
        runs: of the arm by seed, failed ones too.
        base: of the baseline; empty: it is not compared.
    """
    # Pairs of the same seed, unless the number says nothing of formats.
    values, others = (
        {seed: value for seed, run in side.items() if (value := run.number(name)) is not None} for side in (runs, base)
    )
    why = incomparable(name, runs, base)
    pairs = [(value, others[seed]) for seed, value in values.items() if seed in others and not why]
    ratios = [value / other for value, other in pairs if min(value, other) > 0 and other < math.inf]

    # Reasons why the ratio says too little.
    if base and not why:
        few = "" if name in EXACT else _too_few(len(ratios), len(runs))
        why = "; ".join(filter(None, (few, _others_at_work([runs, base]) if name in TIMED else "")))
    numbers = list(values.values())
    return Ratio(_interval(numbers, mean_interval), numbers, _interval(ratios, ratio_interval), ratios, why)


def incomparable(name: str, runs: Mapping[int, Run], base: Mapping[int, Run]) -> str:
    """Return why a number says nothing of two arms' formats: other arithmetic in one of them, or emulation in any."""
    finished = [[run for run in side.values() if not run.failure] for side in (runs, base)]
    emulated = {run.arithmetic for side in finished for run in side if run.emulated}
    if not all(finished) or not (name in TIMED or emulated):
        return ""
    mine, others = ({run.arithmetic for run in side} for side in finished)
    return "; ".join(sorted(filter(None, emulated | (mine ^ others))))


def _others_at_work(arms: Iterable[Mapping[int, Run]]) -> str:
    """Return why times say little, and what to do: other processes used the device; empty: they do."""
    of_all = [[run for run in of_arm.values() if not run.failure] for of_arm in arms]
    for name, what in (("others_cpu", "CPUs"), ("others_gpu", "GPU")):
        shares = [[share for run in runs if (share := run.number(name)) is not None] for runs in of_all]
        share = max(map(fmean, filter(None, shares)), default=0.0)
        if share >= BUSY:  # the mean over an arm's runs
            return (
                f"other processes used {share:.0%} of the {what}; measure again on a quiet machine, in another folder"
            )
    return ""


def _interval(values: list[float], interval: Callable[[list[float]], Interval]) -> Interval | None:
    if len(values) < 2:
        return None
    if math.inf in values:  # the loss of a run that diverged
        return Interval(math.inf, min(values), math.inf, 1.0, len(values))
    return interval(values)
