"""Steps and time that an arm takes until its loss is the baseline's final one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mantissa.verdict.runs import Curve
from mantissa.verdict.statistics import BETTER, EQUIVALENT, NOT_JUDGED, PAIRS, Interval, ratio_intervals, steps_to


@dataclass
class Reach:
    """How far an arm trains until its loss is the baseline's final one."""

    steps: dict[int, float | None] = field(default_factory=dict)
    """Step that reaches it, by seed; None: none does."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of training up to that step, by seed; empty: the arm is not timed."""
    steps_ratio: Interval | None = None
    """Ratio to the baseline's own steps; None: of the baseline, not reached with each seed, or not judged."""
    seconds_ratio: Interval | None = None
    instead: str = ""
    """Words in the place of ratios, such as ``reached in 3 of 5``; empty: there are some, or none is judged."""


def reach(
    curves: Mapping[str, Mapping[int, Curve]],
    verdicts: Mapping[str, str],
    margin: float,
    look: int,
    step_s: Mapping[str, Mapping[int, float]],
) -> dict[str, Reach]:
    """Return how far every arm trains until its loss is the baseline's final one of the same seed, within the margin.

    Without the margin, every second run of an equal arm would end just short of it. The baseline's own steps, too, are
    those to the first time that its loss is as low, so that noise favours neither. A ratio is of all seeds or of none:
    those that reach it are the lucky ones. Only an arm that is EQUIVALENT or BETTER has one: where the verdict is
    open, only lucky sets of seeds all get there, and equal arms would come out as faster. For the chance of a wrong one
    see ``ratio_intervals``; time has its own 5 %.

    Args:
        curves: by label and seed, without the runs that failed; empty where a run diverged. The first is the baseline.
        verdicts: of the arms on the final losses, by label; empty or NOT JUDGED: the steps are not judged, either.
        margin: relative difference that is too small to matter.
        look: how often the arms have been judged, this time included.
        step_s: seconds of a training step by label and seed; arms that are not timed are left out.
    """
    baseline, *others = curves
    ends = {seed: losses[-1] for seed, (_, losses) in curves[baseline].items() if len(losses)}
    goals = {seed: loss + margin * abs(loss) for seed, loss in ends.items() if math.isfinite(loss)}

    # Steps, and where the arm is timed seconds, of each run by itself.
    reached: dict[str, Reach] = {}
    for label, of_arm in curves.items():
        steps = {seed: steps_to(goal, *of_arm[seed]) for seed, goal in goals.items() if seed in of_arm}
        times_s = step_s.get(label, {})
        seconds = {seed: step * times_s[seed] for seed, step in steps.items() if step and times_s}
        reached[label] = Reach(steps, seconds)

    # Which arms have ratios: those as good that get there with every seed, and not at their first evaluation.
    whole: list[str] = []
    judged = [label for label in others if verdicts.get(label, "") not in ("", NOT_JUDGED)]
    for label in judged if len(goals) >= PAIRS else ():
        count = sum(step is not None for step in reached[label].steps.values())
        if count < len(goals):
            reached[label].instead = f"reached in {count} of {len(goals)}" if count else "not reached"
            continue
        firsts = [(curves[arm][seed][0][0], reached[arm].steps[seed]) for arm in (baseline, label) for seed in goals]
        if at_first := {first for first, step in firsts if step == first}:
            at_once = "reached at once: evaluate more often"
            reached[label].instead = "reached before training" if 0 in at_first else at_once
        elif verdicts[label] in (EQUIVALENT, BETTER):
            whole.append(label)

    # The ratios, corrected for the number of all arms; of time those of the arms that are timed.
    base = reached[baseline]
    steps_ratios = _intervals({label: reached[label].steps for label in whole}, base.steps, len(others), look)
    timed = {label: reached[label].seconds for label in whole if base.seconds and reached[label].seconds}
    seconds_ratios = _intervals(timed, base.seconds, len(others), look)
    for label in whole:
        reached[label].steps_ratio, reached[label].seconds_ratio = steps_ratios[label], seconds_ratios.get(label)
    return reached


def _intervals(amounts: Mapping[str, Any], base: Mapping[int, Any], arms: int, look: int) -> dict[str, Interval]:
    """Return the interval of each arm's ratios to the baseline's amounts, seed by seed, among so many arms."""
    ratios = [[amount / base[seed] for seed, amount in of_arm.items()] for of_arm in amounts.values()]
    return dict(zip(amounts, ratio_intervals(ratios, arms - len(ratios), look), strict=True))
