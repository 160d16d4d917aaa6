"""Judges the final losses of arms of an experiment against those of a baseline, look by look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mantissa.statistics import (
    EQUIVALENT,
    INCONCLUSIVE,
    WORSE,
    Equivalence,
    Interval,
    equivalence_family,
    look_level,
    mean_interval,
)

NOT_JUDGED = "NOT JUDGED"
PAIRS = 3
"""The least for a verdict."""
NULL = "null"
"""The label of the null arm: the baseline with other seeds."""
NULL_SHIFT = 1000
"""What the null arm adds to every seed."""

Losses = Mapping[int, float | None]
"""Of an arm by seed, lower is better. Not finite: the run diverged. None: it failed."""
Look = dict[str, Any]
"""``seeds``, and ``ended``, arm and seed of every run that had ended, of each report that judged an arm."""


@dataclass
class Quality:
    """The final loss of an arm, and its verdict."""

    values: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """(arm − baseline) / |baseline|, one per pair."""
    verdict: str = ""
    """Empty for the baseline."""
    why: str = ""
    test: Equivalence | None = None
    look: int = 1
    """At which the test was made."""

    def shown(self, is_null: bool = False) -> Interval | None:
        """Return the interval to show: the one that decided, 95 % where nothing was; None: fewer than two pairs."""
        if len(self.differences) < 2:
            return None
        test = None if is_null or self.verdict == NOT_JUDGED else self.test
        return test.difference if test else mean_interval(self.differences)


def judge(arms: Mapping[str, Losses], margin: float, looks: Sequence[Look] = ()) -> dict[str, Quality]:
    """Judge every arm at each look; what one has decided stands where the stricter tests of a later one do not.

    Args:
        arms: by label, with the failed runs. The first is the baseline. What ``null`` shows to be noise is not judged.
        margin: of the equivalence test, a relative difference.
        looks: from ``with_look``, of which the last one is this; without looks this one is the first.
    """
    found: dict[str, Quality] = {}
    for number, look in enumerate([*looks[:-1], None], 1):
        before, found = found, _judged(arms if look is None else _then(arms, look), margin, number)
        for label, known in before.items():
            if known.test and known.verdict != INCONCLUSIVE == found[label].verdict:
                why = f"decided at look {known.look}, of {known.test.difference.count} seeds"
                found[label] = replace(found[label], verdict=known.verdict, test=known.test, look=known.look, why=why)
    _withhold(found)
    return found


def with_look(looks: list[Look], arms: Mapping[str, Losses], margin: float) -> list[Look]:
    """Return the looks so far and this one.

    To see the same runs again is no other look, and neither is one that judges nothing.
    """
    ended = sorted([label, seed] for label, losses in arms.items() for seed, loss in losses.items() if loss is not None)
    look = {"seeds": sorted(set().union(*arms.values())), "ended": ended}
    if look in looks[-1:]:
        return looks
    found = judge(arms, margin, [*looks, look])
    judged = any(each.test or each.verdict == WORSE for label, each in found.items() if label != NULL)
    return [*looks, look] if judged else looks


def few(pairs: int, planned: int) -> str:
    """Return why so many pairs are too few for a verdict; empty: they suffice."""
    if pairs >= PAIRS:
        return ""
    if pairs < planned:
        return f"{pairs} of {planned} pairs finished, and a verdict needs {PAIRS}"
    return f"{pairs} seeds are too few; use 5"


def noise_unknown(seeds: int) -> str:
    """Return why nothing is judged whose null arm of so many seeds differs from the baseline, though both are one."""
    remedy = f"use more seeds, such as {2 * max(PAIRS, seeds)}"
    return f"the baseline with other seeds differs from itself, so the noise is not known; {remedy}"


def percent(interval: Interval) -> str:
    """Return an interval of relative differences as ``+0.01 % [-0.05, +0.07]``."""
    mean, low, high = (f"{100 * value:+.2f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} % [{low}, {high}]"


def times(interval: Interval) -> str:
    """Return an interval of ratios as ``1.02x [0.97, 1.06]``."""
    if interval.high - interval.low < 0.005:
        return f"{interval.mean:.3f}x"
    return f"{interval.mean:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def verdict_at(quality: Quality) -> str:
    """Return the verdict with the margin that it was judged by."""
    if not quality.test or quality.verdict == NOT_JUDGED:
        return quality.verdict
    p = f" (p = {quality.test.p_equivalent:.2g})" * (quality.verdict == EQUIVALENT)
    return f"{quality.verdict} at a margin of {100 * quality.test.margin:g} %{p}"


def failed(label: str, failures: Mapping[int, str]) -> list[str]:
    """Return a sentence for each reason why runs of an arm failed, which ``failures`` has by seed."""
    seeds_of: dict[str, list[str]] = {}
    for seed, why in failures.items():
        seeds_of.setdefault(why, []).append(str(seed))
    return [
        f"{label}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}, failed: {why}" for why, seeds in seeds_of.items()
    ]


def told(looks: Sequence[Look]) -> list[str]:
    """Return the sentence on the last look and its level; none where nothing was judged."""
    levels = [f"{100 * look_level(number):.3g} %" for number in (len(looks), len(looks) + 1)] if looks else []
    return [
        f"Look {len(looks)} at these arms, {len(look['seeds'])} seeds: tests of {levels[0]}; with more seeds of "
        f"{levels[1]}; of all looks together 5 %."
        for look in looks[-1:]
    ]


METHOD = (
    "EQUIVALENT: two one-sided t-tests on the paired relative differences (Schuirmann 1987), of 4 % at "
    "the first look, so that their 92 % interval lies within the margin. WORSE and BETTER: their whole 96 % "
    "interval is beyond it. Looks with more seeds have stricter tests (alpha spending, Lan and DeMets 1983), and "
    "with several arms the intervals are wider, by Holm's correction, so that the chance of any wrong verdict is "
    "5 %; the null arm is not counted. The interval beside a verdict is the one that decided."
)


def _then(arms: Mapping[str, Losses], look: Look) -> dict[str, Losses]:
    """Return the runs that had ended at a look."""
    return {
        label: {seed: loss for seed, loss in losses.items() if [label, seed] in look["ended"]}
        for label, losses in arms.items()
    }


def _judged(arms: Mapping[str, Losses], margin: float, look: int) -> dict[str, Quality]:
    baseline = next(iter(arms))
    found = {label: _compared(losses, None if label == baseline else arms[baseline]) for label, losses in arms.items()}
    _set_verdicts([each for label, each in found.items() if label not in (baseline, NULL)], margin, look)
    _set_verdicts([each for label, each in found.items() if label == NULL], margin, look)
    return found


def _compared(losses: Losses, base: Losses | None) -> Quality:
    """Return the losses and the differences, with a verdict only where too few runs finished for a test."""
    finite = _finite(losses)
    quality = Quality(list(finite.values()))
    if base is None:
        return quality
    others = _finite(base)
    quality.differences = [(loss - others[s]) / abs(others[s]) for s, loss in finite.items() if others.get(s)]
    diverged = [seed for seed in _diverged(losses) if seed in others]
    why = [f"{len(diverged)} of {len(losses)} runs diverged where the baseline's did not"] if diverged else []
    if zero := [seed for seed in finite if others.get(seed) == 0]:
        quality.verdict = NOT_JUDGED
        why.append(
            f"the baseline is 0 with {len(zero)} of {len(losses)} seeds, so that no difference is relative to it"
        )
    elif too_few := few(len(quality.differences) + len(diverged), len(losses)):
        quality.verdict = NOT_JUDGED
        why.append(too_few)
    elif diverged:
        quality.verdict = WORSE
    else:
        if len(quality.differences) < len(losses):
            why.append(f"only {len(quality.differences)} of {len(losses)} pairs finished")
        if worse := [seed for seed in _diverged(base) if seed in finite]:
            why.append(f"the baseline diverged in {len(worse)} where this arm did not")
    quality.why = "; ".join(why)
    return quality


def _finite(losses: Losses) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if loss is not None and math.isfinite(loss)}


def _diverged(losses: Losses) -> list[int]:
    return [seed for seed, loss in losses.items() if loss is not None and not math.isfinite(loss)]


def _set_verdicts(qualities: list[Quality], margin: float, look: int) -> None:
    """Set the verdicts of the arms that can be tested, corrected for the number of all arms and looks."""
    tested = [quality for quality in qualities if not quality.verdict]
    differences = [quality.differences for quality in tested]
    tests = equivalence_family(differences, margin, untested=len(qualities) - len(tested), look=look)
    for quality, test in zip(tested, tests, strict=True):
        quality.test, quality.verdict, quality.look = test, test.verdict, look
        if test.pairs_needed:
            settled = f"about {test.pairs_needed} seeds with this spread would decide it"
            quality.why = "; ".join(filter(None, [quality.why, settled]))


def _withhold(found: dict[str, Quality]) -> None:
    """Take back what cannot be judged, since the null arm differs from the baseline though both are the same."""
    null = found.get(NULL, Quality())
    if null.verdict != WORSE and not (len(null.differences) > 1 and mean_interval(null.differences).excludes(0)):
        return
    null_diverged = null.verdict == WORSE and not null.test
    for label, arm in found.items():
        noisy = arm.test or null_diverged  # that only the arm diverged is no noise
        if label != NULL and arm.verdict and noisy and arm.verdict != NOT_JUDGED:
            found[label] = replace(arm, verdict=NOT_JUDGED, why=noise_unknown(len(null.values)))
