"""The criteria of claims: a measured quantity, what it is compared with, and its bounds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from evidence.measures import MEASURES, TIMED, in_use, measured
from evidence.runs import Outcome
from mantissa.statistics import EQUIVALENT, INCONCLUSIVE, equivalence, mean_interval, ratio_interval
from trainer.errors import UserError

CONFIRMED, REFUTED, NOT_HERE = "CONFIRMED", "REFUTED", "NOT TESTABLE HERE"
RELATED = "related measurement"
"""No verdict: what was measured is not the claim's own statement, or not on what it speaks of."""


@dataclass
class Criterion:
    """One quantity; with bounds it decides, without bounds it is only reported.

    With ``over``: ratios of runs of the same seed (their geometric mean where there are several arms). With ``minus``:
    differences of such runs. With neither: the quantity itself, and every single run must keep the bounds.
    """

    measure: str
    arm: Any
    """The name of an arm, or several."""
    over: Any = None
    """As many arms as in ``arm``."""
    minus: Any = None
    at_least: float | None = None
    at_most: float | None = None
    within: float | None = None
    """With ``over``: the margin of an equivalence test, a relative difference."""
    published: str = ""
    note: str = ""
    """What the numbers show, where it is not obvious."""

    def __post_init__(self) -> None:
        self.arm, self.over, self.minus = _listed(self.arm), _listed(self.over), _listed(self.minus)
        other = self.over or self.minus
        if not self.arm or (self.over and self.minus) or (other and len(other) != len(self.arm)):
            raise UserError(
                f"a criterion on {self.measure} needs an arm, and over or minus with as many arms, or neither"
            )
        if self.minus and len(self.arm) > 1:
            raise UserError(f"a criterion on {self.measure} with minus takes one arm")
        if self.within is not None and not (
            self.over and 0 < self.within < 1 and self.at_least is self.at_most is None
        ):
            raise UserError("within needs over and a value between 0 and 1, such as within: 0.003, and no other bound")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise UserError(f"at_least: {self.at_least:g} is above at_most: {self.at_most:g}; swap them")

    @property
    def arms(self) -> list[str]:
        """All arms that it names."""
        return [*self.arm, *self.over, *self.minus]

    @property
    def decides(self) -> bool:
        """Whether it has bounds."""
        return any(bound is not None for bound in (self.at_least, self.at_most, self.within))

    def quantity(self) -> str:
        """Return the quantity in words."""
        name = MEASURES[self.measure][1] if self.measure in MEASURES else self.measure.replace("_", " ")
        compared = self.over or self.minus
        arm, other = ((" × " if compared else " and ").join(names) for names in (self.arm, compared))
        return f"{name}, {arm}" + (f" {'over' if self.over else 'minus'} {other}" if other else "")

    def bounds(self) -> str:
        """Return the bounds in words."""
        if self.within is not None:
            return f"within ±{self.within:.2%}"
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least:g} to {self.at_most:g}"
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}" if self.decides else ""


@dataclass
class Finding:
    """The result of a criterion."""

    criterion: Criterion
    verdict: str
    """Empty where it does not decide."""
    median: float | None = None
    low: float | None = None
    """Of the 95 % interval; of quantities that are not compared, the lowest."""
    high: float | None = None
    values: list[float] = field(default_factory=list)
    why: str = ""
    """Why there is no verdict."""


def evaluate(criterion: Criterion, outcomes: list[Outcome]) -> Finding:
    """Measure one criterion on the runs of a claim, and judge it if it decides."""
    runs: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        runs.setdefault(outcome.arm, {})[outcome.seed] = outcome
    undecided = NOT_HERE if criterion.decides else ""
    if missing := [name for name in criterion.arms if name not in runs]:
        return Finding(criterion, undecided, why=f"the arm {missing[0]} does not run here")
    every = (run for name in criterion.arms for run in runs[name].values())
    wide = next(filter(None, (run.summary.get("fp32_arithmetic") for run in every)), None)
    if wide and criterion.measure in TIMED:
        return Finding(criterion, undecided, why=f"not testable: {wide}")
    values = _values(criterion, runs)
    finding = Finding(criterion, "", values=values)
    if values:
        finding.median = statistics.median(values)
        finding.low, finding.high = min(values), max(values)
    compared = bool(criterion.over or criterion.minus)
    finding.why = _gap(criterion, runs, len(values) if compared else None)
    if criterion.measure in TIMED:
        finding.why = finding.why or in_use(run for name in criterion.arms for run in runs[name].values())
    usable = all(map(math.isfinite, values)) and (bool(criterion.minus) or all(value > 0 for value in values))
    if compared and len(values) > 1 and usable:
        interval = (ratio_interval if criterion.over else mean_interval)(values)
        finding.low, finding.high = interval.low, interval.high
    if criterion.decides:
        finding.verdict = _verdict(criterion, finding, compared)
    return finding


def _gap(criterion: Criterion, runs: dict[str, dict[int, Outcome]], pairs: int | None) -> str:
    """Return what is missing of the measurements; ``pairs``: how many could be compared, if any had to be."""
    unmeasured = [
        run for name in criterion.arms for run in runs[name].values() if measured(run, criterion.measure) is None
    ]
    if failed := [run for run in unmeasured if not run.finished]:
        return f"{failed[0].arm}, seed {failed[0].seed}, failed: {failed[0].reason}"
    if unmeasured:
        return f"not measured of {unmeasured[0].arm}, seed {unmeasured[0].seed}"
    wanted = len(set.intersection(*(set(runs[name]) for name in criterion.arms)))
    if pairs is not None and pairs < wanted:
        return f"{wanted - pairs} of {wanted} pairs cannot be compared: neither run finite, or a ratio with 0"
    return ""


def combine(verdicts: list[str]) -> str:
    """Return the verdict of a claim from those of its criteria, without those that cannot be tested here."""
    counted = [verdict for verdict in verdicts if verdict and verdict != NOT_HERE]
    for first in (REFUTED, RELATED):
        if first in counted:
            return first
    if not counted:
        return NOT_HERE
    return CONFIRMED if set(counted) == {CONFIRMED} else INCONCLUSIVE


def number(value: float) -> str:
    """Return a number with about four significant digits; from 1000 on a whole number."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if 0.1 <= abs(value) < 10 else f"{value:.4g}"


def shown(finding: dict[str, Any]) -> str:
    """Return what was measured, in words.

    Args:
        finding: as recorded: ``median``, ``low``, ``high`` (None: not finite, or not known), ``values``, ``criterion``.
    """
    values = [math.inf if value is None else value for value in finding["values"]]
    if finding["median"] is None:
        return "not finite" if values else "not measured"
    three = [math.inf if finding[key] is None else finding[key] for key in ("median", "low", "high")]
    compared, measure = finding["criterion"].get("over"), finding["criterion"]["measure"]
    if compared and measure in ("loss", "best_loss") and all(abs(ratio - 1) < 0.1 for ratio in [*values, *three]):
        median, low, high = (f"{100 * (ratio - 1):+.2g} %" for ratio in three)
    else:
        median, low, high = map(number, three)
        median += "x" if compared else ""
    if len(values) > 1 and len(set(values)) == 1:  # no spread to make an interval of
        return f"{median} ({len(values)} equal runs)"
    return median if low == high else f"{median} [{low}, {high}]"


def _values(criterion: Criterion, runs: dict[str, dict[int, Outcome]]) -> list[float]:
    """Return one value for each seed that all arms have measured; of single quantities, one for each run."""

    def of(name: str, seed: int) -> float | None:
        return measured(runs[name][seed], criterion.measure)

    if not (criterion.over or criterion.minus):
        found = (of(name, seed) for name in criterion.arm for seed in runs[name])
        return [value for value in found if value is not None]
    seeds = set.intersection(*(set(runs[name]) for name in criterion.arms))
    values = []
    for seed in sorted(seeds):
        top = [of(name, seed) for name in criterion.arm]
        bottom = [of(name, seed) for name in criterion.over or criterion.minus]
        pairs = [(a, b) for a, b in zip(top, bottom, strict=True) if a is not None and b is not None]
        if len(pairs) < len(top):
            continue
        if criterion.minus:
            values.append(pairs[0][0] - pairs[0][1])
        elif all(a > 0 and b > 0 for a, b in pairs):
            ratios = [a / b for a, b in pairs]
            values.append(statistics.geometric_mean(ratios) if all(ratios) else 0.0)  # finite over infinite is 0
    return [value for value in values if not math.isnan(value)]


def _verdict(criterion: Criterion, finding: Finding, compared: bool) -> str:
    values = finding.values
    if finding.why or not values or (compared and len(values) < 2):
        finding.why = finding.why or "too few runs for an interval"
        return INCONCLUSIVE
    if criterion.within is not None:
        if not all(map(math.isfinite, values)):
            return REFUTED
        verdict = equivalence([value - 1 for value in values], criterion.within).verdict
        return {EQUIVALENT: CONFIRMED, INCONCLUSIVE: INCONCLUSIVE}.get(verdict, REFUTED)
    low = -math.inf if criterion.at_least is None else criterion.at_least
    high = math.inf if criterion.at_most is None else criterion.at_most
    if not compared:  # every run has to keep the bounds
        return CONFIRMED if all(low <= value <= high for value in values) else REFUTED
    assert finding.low is not None and finding.high is not None  # noqa: PT018
    if finding.low >= low and finding.high <= high:
        return CONFIRMED
    return REFUTED if finding.high < low or finding.low > high else INCONCLUSIVE


def _listed(names: Any) -> list[str]:
    if names is None:
        return []
    return [str(name) for name in names] if isinstance(names, list | tuple) else [str(names)]
