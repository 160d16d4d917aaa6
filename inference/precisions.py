"""Does inference in another precision cost anything: batches of the same samples, compared pair by pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mantissa.display import columns, loss
from mantissa.verdict.statistics import ALPHA, Interval, mean_interval
from trainer.precision.kernels import in_short

BATCHES = 20
"""Pairs that an interval is made of, at least."""
Costs = dict[str, Interval | None]
"""Differences per target to the first precision, by sum (``loss``, ``top1``); None: not finite."""


@dataclass
class Measured:
    """The results of a pass over the samples in one precision."""

    metrics: dict[str, float]
    """The recipe's own; of a causal language model of text also ``bits_per_byte``."""
    targets: np.ndarray
    """Number of valid targets of each batch, int64."""
    sums: dict[str, np.ndarray]
    """Summed loss and the recipe's summed metrics of each batch, float64."""
    about: dict[str, Any]
    """What evaluation.json has of the samples: description of the data, split, numbers of samples (also of those that
    are left out) and targets, and samples of a batch; the last may have fewer."""
    units_per_s: float
    """Units of the recipe (images, tokens) per second from the second batch on, loading included; of a single batch,
    of that one."""
    not_timed: str | None
    """Why ``units_per_s`` is not the speed of the format; None: it is."""
    classes: list[str]
    """Names of the classes; empty where the data has none."""
    given: list[tuple[Tensor, Tensor]]
    """Class of each sample, and the one that the model gives it, of each batch; of several labels to a sample 0 and 1,
    and the probabilities, samples × classes."""


def compared(results: dict[str, Measured]) -> dict[str, Costs]:
    """Return the costs of every precision but the first, by its label, with Student's intervals over the batches.

    Each batch counts as much as it has targets, so that the difference is that of the reported means. Of several
    precisions the intervals are wider, by Bonferroni's correction: the chance that any of them is said to have a cost
    that it has not is 5 % for each sum.
    """
    first, *others = results
    base = results[first]
    level, share = 1 - ALPHA / len(others), len(base.targets) / base.targets.sum()

    def cost(sums: np.ndarray, of: np.ndarray) -> Interval | None:
        with np.errstate(invalid="ignore"):
            differences = share * (sums - of)
        return mean_interval(differences.tolist(), level) if np.isfinite(differences).all() else None

    return {label: {name: cost(results[label].sums[name], of) for name, of in base.sums.items()} for label in others}


def table(results: dict[str, Measured], costs: dict[str, Costs], unit: str) -> str:
    """Return metrics, differences and speed of each precision as lines of text."""
    first, *_ = results
    names, sums = list(results[first].metrics), list(results[first].sums)
    rows = [["precision", *names, *(f"{name} − {first}'s" for name in sums), f"{unit}/s"]]
    for label, result in results.items():
        differences = [_shown(costs[label][name]) if label in costs else "" for name in sums]
        how = in_short(result.not_timed)
        speed = f"{result.units_per_s:,.0f}{how}"
        rows.append([label, *(loss(result.metrics[name]) for name in names), *differences, speed])
    return columns(rows)


def _shown(cost: Interval | None) -> str:
    if cost is None:
        return "not finite"
    return "0" if cost.low == cost.high == 0 else f"{cost.mean:+.2g} ± {cost.high - cost.mean:.1g}"


def verdict(label: str, first: str, cost: Interval | None, of: float) -> str:
    """Return the sentence about a precision's loss.

    Args:
        label: of the precision.
        first: the label of the one that it is compared with.
        cost: of its loss.
        of: the loss in the first precision.
    """
    if cost is None:
        return f"{label}: its loss is not finite; use {first}"
    if cost.low == cost.high == 0:
        return f"{label}: the same loss as {first} in every batch"
    half = cost.high - cost.mean
    if not cost.excludes(0):
        part = f" ({100 * half / of:.2g} %)" if of else ""
        return f"{label}: no measurable cost against {first}; one of more than {half:.1g}{part} would show"
    relative = f" ({100 * cost.mean / of:+.2g} %)" if of else ""
    change = "costs" if cost.mean > 0 else "gains"
    return f"{label}: {change} {abs(cost.mean):.2g} ± {half:.1g} in loss against {first}{relative}"
