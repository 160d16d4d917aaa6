"""Intervals, tests and levels, against scipy and by hand."""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest

from mantissa.verdict.statistics import (
    ALPHA,
    BETTER,
    EQUIVALENT,
    INCONCLUSIVE,
    WORSE,
    Equivalence,
    equivalence,
    holm,
    look_level,
    mean_interval,
    ratio_interval,
    student_cdf,
    student_quantile,
)

MARGIN = 0.003
SPREAD = 0.002
"""Of a paired relative difference of validation losses; small models differ by about as much."""


@pytest.fixture
def stats() -> Any:
    """What these are compared with; the library itself does without."""
    return pytest.importorskip("scipy.stats")


def judged(differences: Any) -> Equivalence:
    """The outcome for one arm."""
    return equivalence([differences], MARGIN)[0]


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 999])
def test_students_distribution_is_scipys(freedom: int, stats: Any) -> None:
    for t in (-1e3, -40, -2.1, -1.0, -1e-3, 0.0, 0.5, 1.7, 12, 400):
        assert student_cdf(t, freedom) == pytest.approx(float(stats.t.cdf(t, freedom)), rel=1e-9, abs=1e-15)
    for probability in (1e-4, 0.025, 0.5, 0.6, 0.95, 0.975, 0.9999):
        expected = float(stats.t.ppf(probability, freedom))
        assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_interval_is_scipys(stats: Any) -> None:
    values = [1.0, 1.2, 0.7, 1.1, 0.95]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = mean_interval(values)
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert (found.mean, found.count, found.level) == (pytest.approx(0.99), 5, 0.95)


def test_a_ratio_and_its_inverse_have_inverse_intervals() -> None:
    ratios = [1.9, 2.1, 2.4, 1.7]
    one, other = ratio_interval(ratios), ratio_interval([1 / ratio for ratio in ratios])
    assert (one.mean, one.low, one.high) == pytest.approx((1 / other.mean, 1 / other.high, 1 / other.low))
    assert one.mean == pytest.approx(geometric_mean(ratios))


@pytest.mark.parametrize("mean", [-0.004, -0.001, 0.0, 0.0005, 0.0028, 0.01])
def test_the_p_values_are_scipys(mean: float, stats: Any) -> None:
    differences = np.random.default_rng(3).normal(mean, SPREAD, 7)
    lower = stats.ttest_1samp(differences, -MARGIN, alternative="greater").pvalue
    upper = stats.ttest_1samp(differences, MARGIN, alternative="less").pvalue
    found = judged(differences)
    assert found.p_equivalent == pytest.approx(max(lower, upper))
    assert (found.verdict == EQUIVALENT) == (found.p_equivalent < 0.04)  # the tests decide


@pytest.mark.parametrize(("tail", "verdict"), [(0.03, INCONCLUSIVE), (0.015, WORSE)])
def test_worse_and_better_share_the_four_percent(tail: float, verdict: str) -> None:
    """Beyond the margin in one of two directions: each direction has half of the error rate."""
    differences = np.array([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]) * SPREAD
    error = differences.std(ddof=1) / math.sqrt(7)
    beyond = MARGIN + error * student_quantile(1 - tail, 6)
    assert judged(differences + beyond).verdict == verdict
    assert judged(differences - beyond).verdict == {WORSE: BETTER}.get(verdict, verdict)


def test_the_interval_that_is_returned_is_the_one_that_decided() -> None:
    """92 % within the margin where two arms are compared, 96 % beyond it; of several arms wider ones."""
    generator = np.random.default_rng(4)
    inside, outside, unclear = ([mean + 0.001 * z for z in generator.normal(size=6)] for mean in (0.0, 0.02, 0.0028))
    levels = [judged(arm).difference.level for arm in (inside, outside, unclear)]
    assert levels == pytest.approx([0.92, 0.96, 0.96])
    for found in equivalence([inside, outside, unclear], MARGIN):
        low, high = found.difference.low, found.difference.high
        assert (found.verdict == EQUIVALENT) == (low > -MARGIN and high < MARGIN)
        assert (found.verdict == WORSE) == (low > MARGIN)
    assert equivalence([inside, outside, unclear], MARGIN)[0].difference.level == pytest.approx(1 - 2 * 0.04 / 3)
    assert equivalence([inside], MARGIN, untested=2)[0].difference.level == pytest.approx(1 - 2 * 0.04 / 3)


def test_holms_levels() -> None:
    p_values = [0.04, 0.001, 0.012, 0.03, 0.016]
    levels = holm(p_values, ALPHA)
    assert levels == pytest.approx([0.025, 0.01, 0.0125, 0.025, 0.05 / 3])
    assert [p < level for p, level in zip(p_values, levels, strict=True)] == [False, True, True, False, True]
    assert holm([0.5], ALPHA) == [0.05]
    assert holm([], ALPHA) == []
    assert holm([0.02, 0.02], ALPHA) == pytest.approx([0.025, 0.05])


def test_the_levels_of_any_number_of_looks_add_up_to_5_percent() -> None:
    assert [look_level(look) for look in (1, 2, 3)] == pytest.approx([0.04, 0.005, 0.0025])
    assert 0.0499 < sum(look_level(look) for look in range(1, 60)) < 0.05 + 1e-12  # the sum is rounded


def test_the_number_of_pairs_that_is_named_decides_4_times_in_5() -> None:
    """Of pairs of which the ones that were seen have the true mean and spread."""
    seen, generator = np.array([-1.0, -0.4, 0.0, 0.4, 1.0]), np.random.default_rng(0)
    seen = 0.001 + SPREAD * seen / seen.std(ddof=1)
    (first,) = equivalence([seen], MARGIN)
    assert (first.verdict, first.pairs_needed is None) == (INCONCLUSIVE, False)
    assert first.pairs_needed
    repetitions = [generator.normal(0.001, SPREAD, first.pairs_needed) for _ in range(200)]
    decided = [equivalence([pairs], MARGIN, look=2)[0].verdict != INCONCLUSIVE for pairs in repetitions]
    assert 0.7 < np.mean(decided) < 0.95


def test_equal_to_the_last_bit_is_equivalent() -> None:
    found = judged([0.0, 0.0, 0.0])
    assert (found.verdict, found.p_equivalent) == (EQUIVALENT, 0.0)
    assert judged([0.01, 0.01]).verdict == WORSE


def test_what_allows_no_interval_is_refused() -> None:
    for values in ([0.1], [0.1, float("nan")]):
        with pytest.raises(ValueError, match=r"two values|finite"):
            mean_interval(values)
    with pytest.raises(ValueError, match="margin"):
        equivalence([[0.1, 0.2]], 0.0)
    with pytest.raises(ValueError, match="math domain"):
        ratio_interval([1.0, 0.0])
