"""What is said of looking at a comparison again."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.power import MARGIN, shares
from mantissa.statistics import ALPHA, BETTER, EQUIVALENT, INCONCLUSIVE, WORSE, equivalence_family, look_level


def test_whoever_adds_the_seeds_that_the_report_names_is_seldom_misled() -> None:
    """By tests of 5 % at each look, 15 to 17 % of differences of the margin would be called EQUIVALENT in the end."""
    of = shares(MARGIN, 0.001, 3, 1000)
    assert of[EQUIVALENT][1] <= 0.07  # 5 %, and three standard deviations of 1000 draws
    assert of[WORSE][1] + of[BETTER][1] <= 0.07


def test_the_levels_of_any_number_of_looks_add_up() -> None:
    assert sum(map(look_level, range(1, 60))) == pytest.approx(ALPHA)


def test_the_number_of_pairs_that_is_named_is_of_the_next_looks_level() -> None:
    values = [0.0, 0.004, -0.004, 0.002]
    (first,), (only,) = equivalence_family([values], MARGIN, look=1), equivalence_family([values], MARGIN)
    assert first.verdict == only.verdict == INCONCLUSIVE
    assert first.pairs_needed
    assert only.pairs_needed
    assert first.pairs_needed > only.pairs_needed
    same = np.random.default_rng(1).normal(size=first.pairs_needed)
    same = (same - same.mean()) / same.std(ddof=1) * np.std(values, ddof=1) + 0.0005
    assert equivalence_family([same], MARGIN, look=2)[0].verdict == EQUIVALENT
    assert equivalence_family([same[:-1]], MARGIN, look=3)[0].verdict == INCONCLUSIVE
