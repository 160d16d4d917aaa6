"""Steps and time to the baseline's final loss: on curves by hand, and on simulated ones whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mantissa.verdict.equal_loss import Reach, reach
from mantissa.verdict.report import reach_cells, reach_sentence
from mantissa.verdict.runs import Curve
from mantissa.verdict.statistics import BETTER, EQUIVALENT, INCONCLUSIVE, NOT_JUDGED, WORSE, ratio_interval, steps_to

STEPS = (10, 20, 30, 40)
MARGIN = 0.003


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((4.0, 3.0, 1.0, 0.5), 25.0),  # halfway between two evaluations
        ((4.0, 2.0, 3.0, 0.5), 20.0),
        ((4.0, 1.0, 5.0, 5.0), 10 + 20 / 3),  # what was reached stays reached
        ((4.0, 9.0, 1.0, 1.0), 20 + 20 / 3),  # from the lowest so far, not from the noise above it
        ((math.nan, 4.0, math.nan, 1.0), 20 + 20 * 2 / 3),
        ((2.0, 1.0, 1.0, 1.0), 10.0),
        ((4.0, 3.0, 2.1, 2.2), None),
        ((math.nan,) * 4, None),
    ],
)
def test_the_step_that_reaches_a_loss(values: Sequence[float], expected: float | None) -> None:
    assert steps_to(2.0, STEPS, values) == (expected if expected is None else pytest.approx(expected))
    assert steps_to(-2.0, STEPS, [value - 4 for value in values]) == steps_to(2.0, STEPS, values)


def test_of_no_evaluation_nothing_is_reached() -> None:
    assert steps_to(2.0, (), ()) is None


def found(*arms: Sequence[Curve], verdict: str = EQUIVALENT, **step_s: float) -> list[Reach]:
    """Return what arms, the first of which is the baseline, take: curves by seed; seconds of a step by ``a0``, …"""
    curves = {f"a{number}": dict(enumerate(curves)) for number, curves in enumerate(arms)}
    seconds = {label: dict.fromkeys(range(len(arms[0])), value) for label, value in step_s.items()}
    return list(reach(curves, dict.fromkeys(list(curves)[1:], verdict), MARGIN, 1, seconds).values())


BASE = [(STEPS, (4.0, 3.0, 2.0 + seed / 10, 1.0 + seed / 10)) for seed in range(3)]
LATER = [(STEPS, (4.0, 4.0, 3.0, 1.0 - seed / 100)) for seed in range(3)]
NEVER = [(STEPS, (4.0, 3.0, 2.0, 1.9))] * 3


def test_steps_and_time_are_ratios_to_the_baselines_own() -> None:
    """The goal is the final loss within the margin, so that the baseline is there before its end."""
    base, later = found(BASE, LATER, a0=0.5, a1=0.25)
    assert base.steps == pytest.approx({seed: 40 - 10 * MARGIN * (1 + seed / 10) for seed in range(3)})
    assert (base.steps_ratio, base.instead, later.instead) == (None, "", "")
    ratios = [later.steps[seed] / base.steps[seed] for seed in range(3)]  # type: ignore[operator]
    assert later.steps_ratio
    assert later.seconds_ratio
    assert later.steps_ratio.mean == pytest.approx(ratio_interval(ratios).mean)
    assert later.steps_ratio.level == pytest.approx(0.96)
    assert later.seconds_ratio.mean == pytest.approx(later.steps_ratio.mean / 2)
    assert reach_cells(base, True) == ("40", "20.0 s")
    assert later.seconds == pytest.approx({seed: later.steps[seed] * 0.25 for seed in range(3)})  # type: ignore[operator]


GOAL = "final loss of fp32"
FASTER = [(STEPS, (4.0, 2.0 + seed / 10, 1.0, 1.0)) for seed in range(3)]
SINGLE: list[Curve] = [((40,), (1.0,))] * 3
TUNED: list[Curve] = [((0, 10, 20), (0.5, 0.4, 1.0))] * 3
NOTHING: Curve = ((), ())


@pytest.mark.parametrize(
    ("arms", "verdict", "timed", "cells", "sentence"),
    [
        ((BASE, FASTER), BETTER, "a0 a1", ("0.73x [0.67, 0.79]",) * 2, "To the {}: 27 % fewer steps, 27 % less time."),
        # What is not timed has steps alone.
        ((BASE, FASTER), EQUIVALENT, "a0", ("0.73x [0.67, 0.79]", NOT_JUDGED), "To the {}: 27 % fewer steps."),
        ((BASE, FASTER), EQUIVALENT, "a1", ("0.73x [0.67, 0.79]", NOT_JUDGED), "To the {}: 27 % fewer steps."),
        # The lucky seeds give no ratio; a run that diverged reaches nothing.
        ((BASE, [*LATER[:2], NEVER[0]]), WORSE, "a0 a1", ("reached in 2 of 3", ""), "The {} is reached in 2 of 3."),
        ((BASE, [*LATER[:2], NOTHING]), EQUIVALENT, "a0 a1", ("reached in 2 of 3", ""), "The {} is reached in 2 of 3."),
        ((BASE, NEVER), WORSE, "a0 a1", ("not reached", ""), "The {} is not reached."),
        # Without a verdict on the loss nothing is judged, and of two curves neither.
        ((BASE, LATER), NOT_JUDGED, "a0 a1", (NOT_JUDGED, ""), ""),
        (([*BASE[:2], NOTHING], LATER), EQUIVALENT, "a0 a1", (NOT_JUDGED, ""), ""),
        # Of an arm whose verdict is open, or that is worse, sets of seeds that all get there are the lucky ones.
        ((BASE, FASTER), INCONCLUSIVE, "a0 a1", (NOT_JUDGED, ""), ""),
        ((BASE, FASTER), WORSE, "a0 a1", (NOT_JUDGED, ""), ""),
        # What the first evaluation reaches says nothing of steps: all arms would be equal, in every digit.
        ((TUNED, TUNED), EQUIVALENT, "a0 a1", ("reached before training", ""), "The {} is reached before training."),
        ((SINGLE, SINGLE), EQUIVALENT, "a0 a1", ("reached at once: evaluate more often", ""), None),
    ],
)
def test_what_an_arm_takes_in_words(
    arms: Sequence[Sequence[Curve]], verdict: str, timed: str, cells: tuple[str, str], sentence: str | None
) -> None:
    arm = found(*arms, verdict=verdict, **dict.fromkeys(timed.split(), 1.0))[1]
    assert reach_cells(arm, False) == cells
    assert sentence is None or reach_sentence(arm, GOAL) == sentence.format(GOAL)


def test_a_difference_that_is_not_clear_is_called_so() -> None:
    scattered = [BASE[0], FASTER[0], BASE[2]]
    assert reach_sentence(found(BASE, scattered)[1], GOAL) == f"To the {GOAL}: no clear difference in steps."


# --- simulated ---

SHAPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "power": lambda t: 2 + (1 + 50 * t) ** -0.4,
    "exponential": lambda t: 2 + 2 * np.exp(-4 * t),
    "flat at the end": lambda t: 2 + 2 * np.exp(-8 * t),
    "plateau": lambda t: 2.4 + np.exp(-12 * t) - 0.4 / (1 + np.exp(-20 * (t - 0.7))),
}
SEEDS, EVALUATIONS, REPETITIONS = 5, 25, 400


def simulated(shape: str, slower: Sequence[float], seeds: int, generator: np.random.Generator) -> list[list[Curve]]:
    """Return arms that need so many times the steps of the baseline, which comes first, to every loss.

    Losses differ by 1 % between seeds, by 0.05 % between the runs of a seed, and each evaluation by 0.05 % of its own.
    """
    share = np.arange(1, EVALUATIONS + 1) / EVALUATIONS
    of_seed = generator.normal(1, 0.01, seeds)
    return [
        [
            (1000 * share, SHAPES[shape](share / factor) * level * generator.normal(1, 0.0005, EVALUATIONS))
            for level in of_seed * generator.normal(1, 0.0005, seeds)
        ]
        for factor in (1.0, *slower)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slower", [0.85, 1.0])
def test_the_95_percent_interval_covers_the_truth(shape: str, slower: float) -> None:
    generator = np.random.default_rng(0)
    covered = intervals = 0
    for _ in range(REPETITIONS):
        base, arm = found(*simulated(shape, [slower], SEEDS, generator))
        if arm.steps_ratio:
            ratio = ratio_interval([arm.steps[seed] / base.steps[seed] for seed in range(SEEDS)])  # type: ignore[operator]
            intervals += 1
            covered += not ratio.excludes(slower)
    assert intervals > 0.97 * REPETITIONS
    assert covered >= 0.93 * intervals


def test_among_equal_arms_there_seldom_is_a_winner() -> None:
    generator = np.random.default_rng(1)
    winners = 0
    for _ in range(REPETITIONS):
        _, *arms = found(*simulated("exponential", [1.0] * 3, SEEDS, generator))
        winners += any(arm.steps_ratio.excludes(1) for arm in arms if arm.steps_ratio)
    assert winners <= 0.05 * REPETITIONS
