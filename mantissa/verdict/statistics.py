"""Confidence intervals and equivalence tests of paired measurements."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EQUIVALENT, WORSE, BETTER, INCONCLUSIVE = "EQUIVALENT", "WORSE", "BETTER", "INCONCLUSIVE"
NOT_JUDGED = "NOT JUDGED"
PAIRS = 3
"""Fewest pairs for a verdict."""
ALPHA = 0.05
"""Chance that any verdict is wrong, of all arms and looks: EQUIVALENT for a difference of the margin or more, WORSE or
BETTER for one within it."""
POWER = 0.8
"""Share of repetitions in which the number of pairs that is named would decide."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval of ``level``."""

    mean: float
    low: float
    high: float
    level: float
    count: int
    """Number of values."""

    def excludes(self, value: float) -> bool:
        """Return whether the value lies outside."""
        return not self.low <= value <= self.high


@dataclass(frozen=True)
class Equivalence:
    """The outcome of an equivalence test on paired relative differences (0.01 is one per cent)."""

    verdict: str
    margin: float
    difference: Interval
    """Interval that decided: where tests are of 4 %, 92 % where EQUIVALENT, else 96 %."""
    p_equivalent: float
    """Larger p of the two one-sided tests: small where the difference lies within the margin."""
    pairs_needed: int | None
    """Number of pairs that would decide what is INCONCLUSIVE, with this mean and spread, at the level of the next look,
    in a share ``POWER`` of repetitions; None: more than 1000."""


def mean_interval(values: Sequence[float], level: float = 0.95, rounding: float = 0.0) -> Interval:
    """Return the mean and Student's interval around it, for values that are rounded with this standard deviation.

    Raises:
        ValueError: fewer than two values, or one that is not finite.
    """
    array = _checked(values)
    mean, count = float(array.mean()), len(array)
    half = student_quantile((1 + level) / 2, count - 1) * _standard_error(array, rounding)
    return Interval(mean, mean - half, mean + half, level, count)


def ratio_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the geometric mean of positive ratios, and Student's interval of their logarithms, as ratios.

    Raises:
        ValueError: see ``mean_interval``; or a ratio that is not positive.
    """
    logs = mean_interval([math.log(value) for value in values], level)
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.level, logs.count)


def ratio_intervals(arms: Sequence[Sequence[float]], untested: int, look: int) -> list[Interval]:
    """Return the geometric mean of each arm's ratios to one baseline, with an interval that excludes 1 if it differs.

    Where no arm differs, the chance that any interval excludes 1, at any look, is at most 5 %: their levels are Holm's,
    above 95 %. For ``untested`` and ``look`` see ``equivalence``.
    """
    tests = [_Tested(np.log(_checked(ratios)), 0.0, 0.0).p_beyond for ratios in arms]
    levels = holm([*tests, *[1.0] * untested], look_level(look))
    return [ratio_interval(ratios, 1 - level) for ratios, level in zip(arms, levels, strict=False)]


def steps_to(goal: float, steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float | None:
    """Return the step at which the lowest value so far comes down to ``goal``; None: it never does.

    It falls linearly between two values that are finite. It does not rise, so that noise takes nothing back.
    """
    finite = np.isfinite(values)
    places, lowest = np.asarray(steps)[finite], np.minimum.accumulate(np.asarray(values)[finite])
    reached = np.flatnonzero(lowest <= goal)
    if not len(reached):
        return None
    around = slice(max(reached[0] - 1, 0), reached[0] + 1)
    return float(np.interp(-goal, -lowest[around], places[around]))  # it takes what rises


def equivalence(
    arms: Sequence[Sequence[float]],
    margin: float,
    untested: int = 0,
    look: int = 1,
    roundings: Sequence[float] = (),
) -> list[Equivalence]:
    """Judge paired relative differences of a loss (lower is better) against a margin that was set beforehand.

    EQUIVALENT by two one-sided tests (Schuirmann 1987), each of the look's level, 4 % at the first: the 92 % interval
    of the mean lies inside of ±``margin``. WORSE or BETTER by a two-sided test of that level against the margin: the
    96 % interval lies wholly above or below it. INCONCLUSIVE otherwise. (The four cases as in Lakens, *Equivalence
    Tests*, 2017.)

    The chance that any verdict is wrong, of all arms and looks, is at most 5 %, of differences that are about normal.
    Holm (1979) shows it for either kind; that it holds for both together is simulated: an arm can be wrong in one kind
    only, since its true difference is within the margin or not, and arms of the other kind share the level. With 3 to 8
    pairs it is up to 4 times as much where differences are exponential, and up to 6 times where they are log-normal.

    Args:
        arms: for each arm (other − baseline) / baseline, one per pair; all against the same baseline.
        margin: above 0; 0.003 is 0.3 %.
        untested: the number of further arms, of which too few runs finished.
        look: how often the arms have been judged, this time included, with fewer pairs before: see ``look_level``.
        roundings: for each arm the standard deviation that rounding gives its differences; none: nothing is rounded.
            Pairs may be rounded to the same difference, so that it is the least that is taken for their spread.

    Raises:
        ValueError: fewer than two pairs, a value that is not finite, a margin that is not above 0.
    """
    if not 0 < margin < math.inf:
        raise ValueError(f"the margin must be above 0, not {margin}")
    pairs = zip(arms, roundings or [0.0] * len(arms), strict=True)
    tested = [_Tested(_checked(differences), margin, rounding) for differences, rounding in pairs]
    missing = [1.0] * untested
    alpha, later = look_level(look), look_level(look + 1)
    within = holm([arm.p_equivalent for arm in tested] + missing, alpha)
    beyond = holm([arm.p_beyond for arm in tested] + missing, alpha)
    levels = zip(tested, within, beyond, strict=False)
    return [arm.judged(inside, outside, later / alpha) for arm, inside, outside in levels]


def look_level(look: int) -> float:
    """Return the level of a look's tests, from look 1 on: 4 %, 0.5 %, 0.25 %, and so on, which add up to 5 %.

    So the chance of a wrong verdict at any of the looks is at most 5 %, though their number is not planned: the error
    is spent look by look (Slud and Wei 1982, Lan and DeMets 1983), here by the union bound.
    """
    return ALPHA * (0.8 if look == 1 else 0.2 / 2 ** (look - 1))


def holm(p_values: Sequence[float], alpha: float) -> list[float]:
    """Return the level that each p-value must be below, so that the chance of any false rejection is at most alpha.

    The smallest of n is compared with alpha / n, the next with alpha / (n − 1), and so on up to the first that is not
    below; the rest are compared with the level of that one. S. Holm, *A simple sequentially rejective multiple
    test procedure*, 1979.
    """
    levels = [0.0] * len(p_values)
    left = len(p_values)
    rejected = True
    for index in sorted(range(len(p_values)), key=p_values.__getitem__):
        levels[index] = alpha / left
        rejected = rejected and p_values[index] < levels[index]
        left -= rejected
    return levels


class _Tested:
    """The p-values of one arm."""

    def __init__(self, differences: np.ndarray, margin: float, rounding: float) -> None:
        self.differences, self.margin, self.rounding = differences, margin, rounding
        self.mean, self.error = float(differences.mean()), _standard_error(differences, rounding)
        self.p_equivalent = max(self._above(-margin), self._below(margin))
        self.p_worse, self.p_better = self._above(margin), self._below(-margin)
        self.p_beyond = min(1.0, 2 * min(self.p_worse, self.p_better))

    def _below(self, threshold: float) -> float:
        """The p of the hypothesis that the true mean is at least the threshold."""
        if self.error == 0:
            return float(self.mean >= threshold)
        return student_cdf((self.mean - threshold) / self.error, len(self.differences) - 1)

    def _above(self, threshold: float) -> float:
        return 1 - self._below(threshold) if self.error else float(self.mean <= threshold)

    def judged(self, within: float, beyond: float, later: float) -> Equivalence:
        """Return the verdict by tests of these levels; those of the next look are ``later`` times as high."""
        # The verdict, and the level of the interval that decided.
        verdict, needed, level = INCONCLUSIVE, None, 1 - beyond
        if self.p_equivalent < within:
            verdict, level = EQUIVALENT, 1 - 2 * within
        elif self.p_beyond < beyond:
            verdict = WORSE if self.p_worse < self.p_better else BETTER
        else:
            needed = self._pairs_needed(1 - later * (within if abs(self.mean) < self.margin else beyond / 2))
        interval = mean_interval(self.differences.tolist(), level, self.rounding)
        return Equivalence(verdict, self.margin, interval, self.p_equivalent, needed)

    def _pairs_needed(self, level: float) -> int | None:
        """Return how many pairs of this mean and spread would decide, by a test whose one-sided error is 1 - ``level``.

        Their mean varies: they would do so in a share ``POWER`` of repetitions, about.
        """
        spread, room = self.error * math.sqrt(len(self.differences)), abs(self.margin - abs(self.mean))

        def enough(pairs: int) -> bool:
            quantiles = student_quantile(level, pairs - 1) + student_quantile(POWER, pairs - 1)
            return quantiles * spread / math.sqrt(pairs) < room

        possible = range(2, 1001)
        place = bisect.bisect_left(possible, True, key=enough)
        return possible[place] if place < len(possible) else None


def student_cdf(t: float, freedom: float) -> float:
    """Return the probability that Student's t with these degrees of freedom is at most ``t``.

    With t = sqrt(freedom) tan(angle) the density is a power of the cosine, which a Gauss rule integrates to 1e-11.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    points, weights = _gauss_rule()
    half = (math.pi / 2 - angle) / 2
    integral = half * float(weights @ np.cos(angle + half * (1 + points)) ** (freedom - 1))
    above = integral * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return above if t < 0 else 1 - above


@functools.cache
def _gauss_rule() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(200)


@functools.lru_cache(maxsize=1024)
def student_quantile(probability: float, freedom: float) -> float:
    """Return the value that Student's t with these degrees of freedom is below with a probability in (0, 1)."""
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return high


def _standard_error(array: np.ndarray, rounding: float) -> float:
    return max(float(array.std(ddof=1)), rounding) / math.sqrt(len(array))


def _checked(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        raise ValueError("an interval needs at least two values")
    if not np.isfinite(array).all():
        raise ValueError(f"not all values are finite: {list(values)}")
    return array
