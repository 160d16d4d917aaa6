"""Judges the runs of a comparison: speed, memory, energy and quality of each arm against the baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from evidence.measures import LOSS, energy, in_use, memory, speed
from evidence.runs import DIVERGED, Arm, Outcome, recorded
from mantissa.statistics import (
    INCONCLUSIVE,
    WORSE,
    Equivalence,
    Interval,
    equivalence_family,
    mean_interval,
    ratio_interval,
)

NOT_JUDGED = "NOT JUDGED"
PAIRS = 3
"""The least for a verdict."""


@dataclass
class Ratio:
    """A quantity of an arm, and its ratios to the baseline over pairs of runs of the same seed."""

    value: Interval | None
    """Arithmetic mean over the seeds; None: not measured, or fewer than two runs."""
    values: list[float] = field(default_factory=list)
    """One per seed."""
    ratio: Interval | None = None
    """Geometric mean over the pairs; None for the baseline itself."""
    ratios: list[float] = field(default_factory=list)
    why: str = ""
    """Why it is not judged, and what to do; empty: it is."""


@dataclass
class Quality:
    """The final validation loss of an arm, and its verdict."""

    values: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """(arm − baseline) / |baseline|, one per pair."""
    verdict: str = ""
    """Empty for the baseline."""
    why: str = ""
    test: Equivalence | None = None
    look: int = 1
    """At which the test was made."""


@dataclass
class ArmResult:
    """One arm, judged."""

    label: str
    overrides: list[str]
    is_null: bool
    seeds: list[int]
    """Of the runs that finished."""
    failures: dict[int, str]
    """Why the others failed, by seed."""
    speed: Ratio
    """Units per second."""
    memory: Ratio
    """Peak bytes of one optimizer step: allocated on CUDA, by the ledger elsewhere."""
    energy: Ratio
    """Joules per unit, evaluation included."""
    quality: Quality
    ledger: dict[str, int] | None = None
    """Bytes at the peak by category, of the first run that recorded them."""
    skipped_steps: int = 0
    arithmetic: str = ""
    """Why the speed of its own runs is not that of their format; empty: it is."""
    not_timed: str = ""
    """What used fp32 arithmetic in it or in the baseline only, so that their speeds compare no formats."""


def judge(arms: list[Arm], baseline: str, outcomes: list[Outcome], margin: float, look: int = 1) -> list[ArmResult]:
    """Judge every arm, in the order of ``arms``.

    Args:
        arms: including the null arm, if there is one.
        baseline: label of the arm that the others are compared with.
        outcomes: of all runs, failed ones too.
        margin: of the equivalence test, a relative difference.
        look: how often these arms have been judged, this time included, with fewer runs before.
    """
    by_arm = {arm.label: {o.seed: o for o in outcomes if o.arm == arm.label} for arm in arms}
    base = _finished(by_arm[baseline])
    results = []
    for arm in arms:
        runs = by_arm[arm.label]
        done = _finished(runs)
        against = None if arm.label == baseline else base
        not_timed = _not_timed(done, against or {})
        result = ArmResult(
            label=arm.label,
            overrides=recorded(arm.overrides),
            is_null=bool(arm.seed_shift),
            seeds=list(done),
            failures={seed: o.reason for seed, o in runs.items() if not o.finished},
            speed=_ratio(speed, done, None if not_timed else against),
            memory=_ratio(memory, done, against),
            energy=_ratio(energy, done, None if not_timed else against),
            quality=_quality(runs, None if against is None else by_arm[baseline]),
            ledger=next((o.ledger["at_peak"] for o in done.values() if o.ledger), None),
            skipped_steps=sum(o.summary["skipped_steps"] for o in done.values()),
            arithmetic=next((wide for o in done.values() if (wide := o.summary.get("fp32_arithmetic"))), ""),
            not_timed=not_timed,
        )
        if against is not None and not result.is_null:
            for ratio in (result.speed, result.energy):
                against_it = (_few(len(ratio.ratios), len(runs)), in_use([*done.values(), *against.values()]))
                ratio.why = not_timed or "; ".join(filter(None, against_it))
        results.append(result)
    others = [result.quality for result in results if result.label != baseline and not result.is_null]
    _set_verdicts(others, margin, look)
    _set_verdicts([result.quality for result in results if result.is_null], margin, look)
    return results


def judge_looks(
    arms: list[Arm], baseline: str, outcomes: list[Outcome], margin: float, looks: list[dict[str, Any]]
) -> list[ArmResult]:
    """Judge at each look; what one has decided stands where the stricter tests of a later one do not.

    Args:
        arms: see ``judge``, as the other arguments.
        baseline: as there.
        outcomes: of the last look.
        margin: as there.
        looks: of each look ``ended``, arm and seed of every run that had ended; without looks this one is the first.
    """
    found: list[ArmResult] = []
    for number, look in enumerate([*looks[:-1], {}], 1):
        then = [o for o in outcomes if [o.arm, o.seed] in look["ended"]] if look else outcomes
        before, found = found, judge(arms, baseline, then, margin, number)
        for arm, known in zip(found, (each.quality for each in before), strict=False):
            if known.test and known.verdict != INCONCLUSIVE == arm.quality.verdict:
                why = f"decided at look {known.look}, of {known.test.difference.count} seeds"
                arm.quality = replace(arm.quality, verdict=known.verdict, test=known.test, look=known.look, why=why)
    _withhold(found)
    return found


def _withhold(arms: list[ArmResult]) -> None:
    """Take back what cannot be judged, since the null arm differs from the baseline though both are the same."""
    judged = [arm for arm in arms if arm.quality.verdict and not arm.is_null]
    for null in (arm for arm in arms if arm.is_null):
        remedy = f"use more seeds, such as seeds={2 * max(PAIRS, len(null.seeds))}"
        why = f"the baseline with other seeds differs from itself, so the noise is not known; {remedy}"
        for quantity in ("speed", "energy"):
            if (ratio := getattr(null, quantity).ratio) and ratio.excludes(1):
                for arm in judged:
                    getattr(arm, quantity).why = getattr(arm, quantity).why or why
        differences = null.quality.differences
        if null.quality.verdict == WORSE or (len(differences) > 1 and mean_interval(differences).excludes(0)):
            null_diverged = null.quality.verdict == WORSE and not null.quality.test
            for arm in judged:
                noisy = arm.quality.test or null_diverged  # that only the arm diverged is no noise
                if noisy and arm.quality.verdict != NOT_JUDGED:
                    arm.quality = replace(arm.quality, verdict=NOT_JUDGED, why=why)


def _few(pairs: int, planned: int) -> str:
    """Return why so many pairs are too few for a verdict; empty: they suffice."""
    if pairs >= PAIRS:
        return ""
    if pairs < planned:
        return f"{pairs} of {planned} pairs finished, and a verdict needs {PAIRS}"
    return f"{pairs} seeds are too few; use seeds=5"


def _not_timed(runs: dict[int, Outcome], base: dict[int, Outcome]) -> str:
    """Return what used fp32 arithmetic in one of two arms only, whose speeds then compare no formats."""
    ways = [{o.summary.get("fp32_arithmetic") for o in each.values()} for each in (runs, base)]
    return "; ".join(sorted(filter(None, ways[0] ^ ways[1]))) if all(ways) else ""


def _set_verdicts(qualities: list[Quality], margin: float, look: int) -> None:
    """Set the verdicts of the arms that can be tested, corrected for the number of all arms and looks."""
    tested = [quality for quality in qualities if not quality.verdict]
    differences = [quality.differences for quality in tested]
    tests = equivalence_family(differences, margin, untested=len(qualities) - len(tested), look=look)
    for quality, test in zip(tested, tests, strict=True):
        quality.test, quality.verdict, quality.look = test, test.verdict, look
        if test.pairs_needed:
            settled = f"about {test.pairs_needed} seeds with this spread would decide it"
            quality.why = "; ".join(filter(None, [quality.why, settled]))


def _finished(runs: dict[int, Outcome]) -> dict[int, Outcome]:
    return {seed: outcome for seed, outcome in runs.items() if outcome.finished}


def _ratio(
    quantity: Callable[[Outcome], float | None], runs: dict[int, Outcome], base: dict[int, Outcome] | None
) -> Ratio:
    values = {seed: value for seed, outcome in runs.items() if (value := quantity(outcome)) is not None}
    result = Ratio(_interval(list(values.values()), mean_interval), list(values.values()))
    if base is not None:
        others = {seed: other for seed, outcome in base.items() if (other := quantity(outcome)) is not None}
        result.ratios = [value / others[seed] for seed, value in values.items() if others.get(seed)]
        result.ratio = _interval(result.ratios, ratio_interval)
    return result


def _interval(values: list[float], of: Callable[[list[float]], Interval]) -> Interval | None:
    return of(values) if len(values) > 1 else None


def _quality(runs: dict[int, Outcome], base_runs: dict[int, Outcome] | None) -> Quality:
    """Return the losses and the differences, with a verdict only where too few runs finished for a test."""
    losses = {seed: loss for seed, o in _finished(runs).items() if (loss := _loss(o)) is not None}
    quality = Quality(list(losses.values()))
    if base_runs is None:
        return quality
    others = {seed: other for seed, o in _finished(base_runs).items() if (other := _loss(o)) is not None}
    quality.differences = [(loss - others[s]) / abs(others[s]) for s, loss in losses.items() if others.get(s)]
    diverged = [s for s, o in runs.items() if s in others and _diverged(o)]
    why = [f"{len(diverged)} of {len(runs)} runs diverged where the baseline's did not"] if diverged else []
    if few := _few(len(quality.differences) + len(diverged), len(runs)):
        quality.verdict = NOT_JUDGED
        why.append(few)
    elif diverged:
        quality.verdict = WORSE
    else:
        if len(quality.differences) < len(runs):
            why.append(f"only {len(quality.differences)} of {len(runs)} pairs finished")
        if worse := [s for s, o in base_runs.items() if _diverged(o) and s in losses]:
            why.append(f"the baseline diverged in {len(worse)} where this arm did not")
    quality.why = "; ".join(why)
    return quality


def _diverged(outcome: Outcome) -> bool:
    return outcome.exit_code == DIVERGED or (outcome.finished and _loss(outcome) is None)


def _loss(outcome: Outcome) -> float | None:
    loss: float | None = outcome.summary["final"].get(LOSS)
    return loss
