"""Judges the runs of a comparison: speed, memory and quality of each arm against the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evidence.measures import LOSS, in_use, memory, speed
from evidence.runs import DIVERGED, Arm, Outcome, recorded
from mantissa import quality
from mantissa.quality import Quality
from mantissa.statistics import Interval, mean_interval, ratio_interval


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
    quality: Quality
    ledger: dict[str, int] | None = None
    """Bytes at the peak by category, of the first run that recorded them."""
    skipped_steps: int = 0
    arithmetic: str = ""
    """Why the speed of its own runs is not that of their format; empty: it is."""
    not_timed: str = ""
    """What used fp32 arithmetic in it or in the baseline only, so that their speeds compare no formats."""


def judge(
    arms: list[Arm], baseline: str, outcomes: list[Outcome], margin: float, looks: Sequence[dict[str, Any]] = ()
) -> list[ArmResult]:
    """Judge every arm, in the order of ``arms``.

    Args:
        arms: including the null arm, if there is one.
        baseline: label of the arm that the others are compared with.
        outcomes: of all runs, failed ones too.
        margin: of the equivalence test, a relative difference.
        looks: see ``mantissa.quality.judge``.
    """
    by_arm = {arm.label: {o.seed: o for o in outcomes if o.arm == arm.label} for arm in arms}
    base = _finished(by_arm[baseline])
    qualities = quality.judge(losses(arms, outcomes), margin, looks)
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
            quality=qualities[arm.label],
            ledger=next((o.ledger["at_peak"] for o in done.values() if o.ledger), None),
            skipped_steps=sum(o.summary["skipped_steps"] for o in done.values()),
            arithmetic=next((wide for o in done.values() if (wide := o.summary.get("fp32_arithmetic"))), ""),
            not_timed=not_timed,
        )
        if against is not None and not result.is_null:
            speeds = result.speed
            against_it = (quality.few(len(speeds.ratios), len(runs)), in_use([*done.values(), *against.values()]))
            speeds.why = not_timed or "; ".join(filter(None, against_it))
        results.append(result)
    _withhold(results)
    return results


def losses(arms: list[Arm], outcomes: list[Outcome]) -> dict[str, dict[int, float | None]]:
    """Return the final losses as ``mantissa.quality.judge`` takes them."""
    return {arm.label: {o.seed: _loss(o) for o in outcomes if o.arm == arm.label} for arm in arms}


def _withhold(arms: list[ArmResult]) -> None:
    """Take back speeds that cannot be judged, since the null arm's differs from the baseline's."""
    for null in (arm for arm in arms if arm.is_null):
        if (ratio := null.speed.ratio) and ratio.excludes(1):
            for arm in arms:
                if arm.quality.verdict and not arm.is_null:
                    arm.speed.why = arm.speed.why or quality.noise_unknown(len(null.seeds))


def _not_timed(runs: dict[int, Outcome], base: dict[int, Outcome]) -> str:
    """Return what used fp32 arithmetic in one of two arms only, whose speeds then compare no formats."""
    ways = [{o.summary.get("fp32_arithmetic") for o in each.values()} for each in (runs, base)]
    return "; ".join(sorted(filter(None, ways[0] ^ ways[1]))) if all(ways) else ""


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


def _loss(outcome: Outcome) -> float | None:
    if outcome.exit_code == DIVERGED:
        return math.nan
    if not outcome.finished:
        return None
    loss: float | None = outcome.summary["final"].get(LOSS)
    return math.nan if loss is None else loss
