"""Intervals and verdicts of paired measurements: what a difference is, and whether it is too small to matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EQUIVALENT, WORSE, BETTER, INCONCLUSIVE = "EQUIVALENT", "WORSE", "BETTER", "INCONCLUSIVE"
ALPHA = 0.05
"""The chance of a wrong EQUIVALENT where the truth lies on the margin, and of a wrong WORSE or BETTER of equal arms."""


@dataclass(frozen=True)
class Interval:
    """A mean and where the true one lies, with a confidence of ``level``."""

    mean: float
    low: float
    high: float
    level: float
    count: int
    """How many values it comes from."""

    def map_exp(self) -> Interval:
        """Return the interval of the geometric mean, from that of the logarithms."""
        return Interval(math.exp(self.mean), math.exp(self.low), math.exp(self.high), self.level, self.count)


@dataclass(frozen=True)
class Equivalence:
    """The outcome of an equivalence test on paired relative differences (0.01 is one per cent)."""

    verdict: str
    margin: float
    difference: Interval
    """With a confidence of 95 %."""
    p_equivalent: float
    """The larger p of the two one-sided tests: small where the difference lies within the margin."""
    p_different: float
    """Two-sided, against no difference at all: what is small here may still be too small to matter."""
    pairs_needed: int | None
    """Where INCONCLUSIVE: how many pairs of this mean and spread would settle it (None: more than 1000)."""


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the mean and Student's interval around it.

    Raises:
        ValueError: fewer than two values, or one that is not finite.

    """
    from scipy.special import stdtrit

    array = _checked(values)
    mean, count = float(array.mean()), len(array)
    half = float(stdtrit(count - 1, (1 + level) / 2)) * _standard_error(array)
    return Interval(mean, mean - half, mean + half, level, count)


def ratio_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the geometric mean of positive ratios, and Student's interval of their logarithms turned back.

    Raises:
        ValueError: see ``mean_interval``; or a ratio that is not positive.

    """
    if any(not value > 0 for value in values):
        raise ValueError(f"ratios must be positive, not {list(values)}")
    return mean_interval([math.log(value) for value in values], level).map_exp()


def equivalence(differences: Sequence[float], margin: float) -> Equivalence:
    """Judge paired relative differences of a loss (lower is better) against a margin that was fixed beforehand.

    EQUIVALENT by two one-sided tests (Schuirmann 1987), each of 5 %: the 90 % interval of the mean lies inside of
    ±``margin``. WORSE or BETTER by a two-sided test of 5 % against the margin: the 95 % interval lies wholly above
    or below it. INCONCLUSIVE otherwise. (The four cases as in Lakens, *Equivalence Tests*, 2017.)

    Args:
        differences: (other − baseline) / baseline, one per pair.
        margin: above 0; 0.003 is 0.3 %.

    Raises:
        ValueError: fewer than two pairs, a value that is not finite, a margin that is not above 0.

    """
    from scipy.special import stdtr

    if not 0 < margin < math.inf:
        raise ValueError(f"the margin must be above 0, not {margin}")
    array = _checked(differences)
    mean, error = float(array.mean()), _standard_error(array)

    def p_below(threshold: float) -> float:
        """The p of the hypothesis that the true mean is at least the threshold."""
        if error == 0:
            return float(mean >= threshold)
        return float(stdtr(len(array) - 1, (mean - threshold) / error))

    def p_above(threshold: float) -> float:
        return 1 - p_below(threshold) if error else float(mean <= threshold)

    verdict, needed = INCONCLUSIVE, None
    p_equivalent = max(p_above(-margin), p_below(margin))
    if p_equivalent < ALPHA:
        verdict = EQUIVALENT
    elif p_above(margin) < ALPHA / 2:
        verdict = WORSE
    elif p_below(-margin) < ALPHA / 2:
        verdict = BETTER
    else:
        needed = _pairs_needed(mean, float(array.std(ddof=1)), margin)
    p_different = min(1.0, 2 * min(p_below(0.0), p_above(0.0)))
    return Equivalence(verdict, margin, mean_interval(differences), p_equivalent, p_different, needed)


def _pairs_needed(mean: float, spread: float, margin: float) -> int | None:
    from scipy.special import stdtrit

    level = 1 - (ALPHA if abs(mean) < margin else ALPHA / 2)
    room = abs(margin - abs(mean))
    counts = np.arange(2, 1001)
    enough = stdtrit(counts - 1, level) * spread / np.sqrt(counts) < room
    return int(counts[enough.argmax()]) if enough.any() else None


def _standard_error(array: np.ndarray) -> float:
    return float(array.std(ddof=1)) / math.sqrt(len(array))


def _checked(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        raise ValueError("an interval needs at least two values")
    if not np.isfinite(array).all():
        raise ValueError(f"not all values are finite: {list(values)}")
    return array
