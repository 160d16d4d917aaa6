"""Judges the runs of a comparison: speed, memory and quality of each arm against the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from evidence.measures import TIMED, in_use, measured
from evidence.runs import LOSS, Arm, Outcome, redacted_arguments
from mantissa.verdict.compare import Quality, Reach, reach, too_few
from mantissa.verdict.statistics import Interval, mean_interval, ratio_interval
from trainer.precision.kernels import is_emulated


@dataclass
class Ratio:
    """A quantity of an arm, and its ratios to the baseline over pairs of runs of the same seed."""

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
class ArmResult:
    """One arm, judged."""

    label: str
    overrides: list[str]
    seeds: list[int]
    """Seeds of the runs that finished."""
    failures: dict[int, str]
    """Reasons why the others failed, by seed."""
    speed: Ratio
    """Units per second."""
    memory: Ratio
    """Peak bytes of one optimizer step: allocated on CUDA, by the ledger elsewhere."""
    quality: Quality
    reach: Reach = field(default_factory=Reach)
    """Steps and time to the baseline's final loss."""
    skipped_steps: int = 0
    arithmetic: str = ""
    """Reason why the speed of its own runs is not that of their format; empty: it is."""
    not_timed: str = ""
    """What used fp32 arithmetic in it or in the baseline only, or was emulated, so that speeds compare no formats."""


def judge(
    arms: list[Arm], outcomes: list[Outcome], qualities: dict[str, Quality], margin: float, look: int
) -> list[ArmResult]:
    """Judge speed, memory and what it takes to equal loss of every arm beside its quality, in the order of ``arms``.

    Args:
        arms: of the comparison, the baseline first.
        outcomes: of all runs, failed ones too.
        qualities: from ``mantissa.verdict.compare.judge``.
        margin: that of the qualities.
        look: number of the look, from 1 on.
    """
    by_arm = {arm.label: {run.seed: run for run in outcomes if run.arm == arm.label} for arm in arms}
    finished = {label: {seed: run for seed, run in runs.items() if run.finished} for label, runs in by_arm.items()}
    results = []
    for arm in arms:
        runs, done = by_arm[arm.label], finished[arm.label]
        base = {} if arm is arms[0] else by_arm[arms[0].label]
        result = ArmResult(
            label=arm.label,
            overrides=redacted_arguments(arm.overrides),
            seeds=list(done),
            failures={seed: run.reason for seed, run in runs.items() if not run.finished},
            speed=ratio("speed", runs, base),
            memory=ratio("memory", runs, base),
            quality=qualities[arm.label],
            skipped_steps=sum(run.summary["skipped_steps"] for run in done.values()),
            arithmetic=next((wide for run in done.values() if (wide := run.summary.get("not_timed"))), ""),
            not_timed=_not_timed(runs, base),
        )
        results.append(result)
    curves = {
        label: {seed: run.series[LOSS] if run.finished else ((), ()) for seed, run in runs.items() if run.ended}
        for label, runs in by_arm.items()
    }
    step_s = {
        result.label: {seed: run.summary["step_time_s"] for seed, run in finished[result.label].items()}
        for result in results
        if result.speed.values and not result.speed.why
    }
    reached = reach(curves, qualities, margin, look, step_s)
    for result in results:
        result.reach = reached[result.label]
    return results


def ratio(name: str, runs: dict[int, Outcome], base: dict[int, Outcome]) -> Ratio:
    """Return an arm's values of a quantity and their ratios to the baseline's, seed by seed.

    A pair has no ratio if a number is 0 or less, or the baseline's is infinite.

    Args:
        name: of ``MEASURES``.
        runs: of the arm by seed, failed ones too.
        base: of the baseline; empty: it is not compared.
    """
    values, others = (
        {seed: value for seed, run in side.items() if (value := measured(run, name)) is not None}
        for side in (runs, base)
    )
    not_timed = _not_timed(runs, base)
    why = not_timed if name in TIMED or is_emulated(not_timed) else ""
    pairs = [(value, others[seed]) for seed, value in values.items() if seed in others and not why]
    ratios = [value / other for value, other in pairs if min(value, other) > 0 and other < math.inf]
    if base and not why:
        few = "" if name == "memory" else too_few(len(ratios), len(runs))
        used = in_use([*runs.values(), *base.values()]) if name in TIMED else ""
        why = "; ".join(filter(None, (few, used)))
    numbers = list(values.values())
    return Ratio(_interval(numbers, mean_interval), numbers, _interval(ratios, ratio_interval), ratios, why)


def losses(arms: list[Arm], outcomes: list[Outcome]) -> dict[str, dict[int, float | None]]:
    """Return the final losses as ``mantissa.verdict.compare.judge`` takes them."""
    return {arm.label: {run.seed: measured(run, "loss") for run in outcomes if run.arm == arm.label} for arm in arms}


def _not_timed(runs: dict[int, Outcome], base: dict[int, Outcome]) -> str:
    """Return why the speeds of two arms compare no formats: fp32 arithmetic in one of them, or emulation in any."""
    ways = [{run.summary.get("not_timed") for run in side.values() if run.finished} for side in (runs, base)]
    emulated = set(filter(is_emulated, ways[0] | ways[1]))
    return "; ".join(sorted(filter(None, emulated | (ways[0] ^ ways[1])))) if all(ways) else ""


def _interval(values: list[float], interval: Callable[[list[float]], Interval]) -> Interval | None:
    if len(values) < 2:
        return None
    if math.inf in values:  # the loss of a run that diverged
        return Interval(math.inf, min(values), math.inf, 1.0, len(values))
    return interval(values)
