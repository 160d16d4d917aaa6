"""Does inference in another precision cost anything: batches of the same samples, compared pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mantissa.display import columns, loss
from mantissa.statistics import holm, student_cdf, student_quantile

if TYPE_CHECKING:
    from inference.evaluate import Measured

BATCHES = 20
"""Pairs that an interval is made of, at least."""
LEVEL = 0.95


class Cost(NamedTuple):
    """The difference of a mean to that of the first precision, and the half width of its interval.

    Of one other precision that is the 95 % interval; of several a wider one, see ``compared``.
    """

    mean: float
    half_width: float

    @property
    def is_measurable(self) -> bool:
        """Whether the interval leaves out 0. A mean that is not finite is a cost that every measurement shows."""
        return not abs(self.mean) <= self.half_width


def paired(first: np.ndarray, others: Sequence[np.ndarray], targets: np.ndarray) -> list[Cost]:
    """Return the mean difference per target of each of several precisions to the first, and its interval.

    The mean is that over all targets: each batch's difference counts as much as it has targets. Its variance is
    n / (n - 1) · Σ w² (d - mean)² with w the batch's share of the targets (the ratio estimator's, Cochran 1977,
    section 6.3), which for batches of one size is that of the paired t test; Student's t has n - 1 degrees of freedom.

    Args:
        first: float64, sums of each batch in the first precision.
        others: the same in each of the others.
        targets: int64, the targets of each batch.
    """
    count = len(targets)
    weights = targets / targets.sum()
    found: list[tuple[float, float]] = []
    for other in others:
        differences = (other - first) / np.maximum(targets, 1)
        mean = float((weights * differences).sum())
        variance = count / (count - 1) * float((weights**2 * (differences - mean) ** 2).sum())
        found.append((mean, math.sqrt(variance)))
    levels = holm([_p_of(mean, error, count - 1) for mean, error in found], 1 - LEVEL)
    return [
        Cost(mean, student_quantile(1 - level / 2, count - 1) * error)
        for (mean, error), level in zip(found, levels, strict=True)
    ]


def _p_of(mean: float, error: float, degrees: int) -> float:
    """Return the two-sided p of no difference; 1 where nothing was tested: the difference is not finite."""
    if not math.isfinite(mean) or mean == 0:
        return 1.0
    return 2 * student_cdf(-abs(mean) / error, degrees) if error else 0.0


def compared(results: dict[str, Measured]) -> dict[str, dict[str, Cost]]:
    """Return the costs of every precision but the first, by label and by sum (``loss``, ``top1``).

    The chance that any of them is said to have a cost that it has not is 5 % for each sum (Holm 1979).
    """
    first, *others = results.values()
    costs = {
        name: paired(first.sums[name], [other.sums[name] for other in others], first.targets) for name in first.sums
    }
    return {label: {name: costs[name][index] for name in costs} for index, label in enumerate(list(results)[1:])}


def table(results: dict[str, Measured], costs: dict[str, dict[str, Cost]], unit: str) -> str:
    """Return metrics, differences and speed of each precision as lines of text."""
    first, *_ = results
    names = list(results[first].metrics)
    sums = list(results[first].sums)
    rows = [["precision", *names, *(f"{name} − {first}'s" for name in sums), f"{unit}/s"]]
    for label, result in results.items():
        own = costs.get(label)
        shown = [_shown(own[name]) if own else "" for name in sums]
        speed = f"{result.units_per_s:,.0f}{' (fp32 arithmetic)' if result.not_timed else ''}"
        rows.append([label, *(loss(result.metrics[name]) for name in names), *shown, speed])
    return columns(rows)


def _shown(cost: Cost) -> str:
    return "0" if cost == (0, 0) else f"{cost.mean:+.2g} ± {cost.half_width:.1g}"


def verdict(label: str, first: str, cost: Cost, of: float) -> str:
    """Return the sentence about a precision's loss.

    Args:
        label: of the precision.
        first: the label of the one that it is compared with.
        cost: of its loss.
        of: the loss in the first precision.
    """
    if not math.isfinite(cost.mean):
        return f"{label}: its loss is not finite; use {first}"
    if cost == (0, 0):
        return f"{label}: the same loss as {first} in every batch"
    if not cost.is_measurable:
        part = f" ({100 * cost.half_width / of:.2g} %)" if of else ""
        return f"{label}: no measurable cost against {first}; one of more than {cost.half_width:.1g}{part} would show"
    relative = f" ({100 * cost.mean / of:+.2g} %)" if of else ""
    change = "costs" if cost.mean > 0 else "gains"
    return f"{label}: {change} {abs(cost.mean):.2g} ± {cost.half_width:.1g} in loss against {first}{relative}"
