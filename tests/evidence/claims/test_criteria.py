"""Judging a claim: made-up outcomes with known answers."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from evidence.claims.criteria import CONFIRMED, NOT_HERE, REFUTED, RELATED, Criterion, combine, evaluate, shown
from evidence.runs import Outcome
from mantissa.statistics import INCONCLUSIVE
from trainer.errors import UserError


def outcome(arm: str, seed: int, speed: float | None = 100.0, loss: float | None = 2.0, code: int = 0) -> Outcome:
    summary: dict[str, Any] = {
        "status": "FINISHED" if code == 0 else "FAILED",
        "units_per_s": speed,
        "final": {"valid/loss": loss},
        "best": {"value": loss, "step": 1},
    }
    return Outcome(arm, seed, Path("nowhere"), code, "it broke" if code else "", 60.0, summary)


def runs(arm: str, *speeds: float) -> list[Outcome]:
    return [outcome(arm, seed, speed) for seed, speed in enumerate(speeds)]


def speed(**bounds: Any) -> Criterion:
    return Criterion("speed", "fast", "slow", **bounds)


SLOW = runs("slow", 100, 110, 90)
FAST = runs("fast", 201, 219, 182)  # 2.01, 1.99, 2.02 times as fast


def test_a_time_while_others_used_the_cpus_decides_nothing() -> None:
    busy = [*SLOW, *(replace(run, others_cpu=0.4) for run in FAST)]
    finding = evaluate(speed(at_least=1.9), busy)
    assert finding.verdict == INCONCLUSIVE
    assert finding.why.startswith("other processes used 40% of the CPUs; measure again on a quiet machine")
    assert evaluate(Criterion("loss", "fast", "slow", at_most=1.1), busy).verdict == CONFIRMED


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"at_least": 1.9}, CONFIRMED),
        ({"at_least": 2.1}, REFUTED),
        ({"at_least": 2.0}, INCONCLUSIVE),
        ({"at_least": 2.03}, INCONCLUSIVE),  # the median alone does not refute
        ({"at_most": 1.98}, INCONCLUSIVE),
        ({"at_most": 2.1}, CONFIRMED),
        ({"at_most": 1.9}, REFUTED),
        ({"at_least": 1.9, "at_most": 2.1}, CONFIRMED),
        ({"at_least": 2.1, "at_most": 3.0}, REFUTED),
        ({"at_least": 1.0, "at_most": 2.01}, INCONCLUSIVE),
        ({}, ""),
    ],
)
def test_the_whole_interval_decides(bounds: dict[str, float], verdict: str) -> None:
    finding = evaluate(speed(**bounds), [*SLOW, *FAST])
    assert finding.verdict == verdict
    assert finding.median == pytest.approx(2.01)
    assert finding.low is not None
    assert finding.high is not None
    assert 1.95 < finding.low < 2.0 < finding.high < 2.06


def test_runs_are_paired_by_seed() -> None:
    """A drift that hits both arms alike leaves the ratio exact."""
    slow, fast = runs("slow", 100, 50, 10), runs("fast", 200, 100, 20)
    finding = evaluate(speed(at_least=2.0), [*reversed(fast), *slow])
    assert (finding.values, finding.verdict) == ([2.0, 2.0, 2.0], CONFIRMED)


def test_several_arms_give_a_geometric_mean() -> None:
    outcomes = [*runs("a", 200, 200), *runs("b", 800, 800), *runs("c", 100, 100)]
    finding = evaluate(Criterion("speed", ["a", "b"], ["c", "c"], at_least=3.9), outcomes)
    assert finding.values == pytest.approx([4.0, 4.0])


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ((2.001, 2.0015, 2.0005), CONFIRMED),
        ((2.02, 2.0205, 2.0195), REFUTED),
        ((1.98, 1.9805, 1.9795), REFUTED),
        ((1.97, 2.0, 2.03), INCONCLUSIVE),  # seeds differ more than the margin
        ((2.008, 2.0085, 2.0075), REFUTED),  # by 0.4 %
        ((2.004, 2.0045, 2.0035), CONFIRMED),  # by 0.2 %
    ],
)
def test_within_is_an_equivalence_test(losses: tuple[float, ...], verdict: str) -> None:
    outcomes = [outcome("base", seed) for seed in range(3)]
    outcomes += [outcome("other", seed, loss=loss) for seed, loss in enumerate(losses)]
    assert evaluate(Criterion("loss", "other", "base", within=0.003), outcomes).verdict == verdict


def test_a_run_that_diverged_has_an_infinite_loss() -> None:
    base = [outcome("base", seed) for seed in range(3)]
    worse = Criterion("loss", "pure", "base", at_least=1.1)
    finding = evaluate(worse, [*base, *(outcome("pure", seed, loss=None, code=3) for seed in range(3))])
    assert finding.verdict == CONFIRMED
    mixed = [outcome("pure", 0, loss=2.0), *(outcome("pure", seed, code=3) for seed in (1, 2))]
    assert evaluate(worse, [*base, *mixed]).verdict == INCONCLUSIVE
    parity = Criterion("loss", "pure", "base", within=0.01)
    assert evaluate(parity, [*base, *mixed]).verdict == REFUTED
    assert evaluate(Criterion("loss", "base", "pure", at_most=0.9), [*base, *mixed]).verdict == INCONCLUSIVE


def test_a_single_quantity_has_to_keep_its_bounds_in_every_run() -> None:
    outcomes = [outcome("a", 0, loss=1.90), outcome("a", 1, loss=1.94), outcome("b", 0, loss=1.96)]
    assert evaluate(Criterion("best_loss", "a", at_most=1.95), outcomes).verdict == CONFIRMED
    finding = evaluate(Criterion("best_loss", ["a", "b"], at_most=1.95), outcomes)
    assert (finding.verdict, finding.low, finding.high) == (REFUTED, 1.90, 1.96)
    assert finding.criterion.quantity() == "best validation loss, a and b"


def test_differences_are_taken_run_by_run() -> None:
    losses = {"a": (1.91, 1.81), "b": (1.9, 1.8)}
    outcomes = [outcome(arm, seed, loss=loss) for arm, each in losses.items() for seed, loss in enumerate(each)]
    finding = evaluate(Criterion("loss", "a", minus="b", at_least=-0.02, at_most=0.02), outcomes)
    assert finding.verdict == CONFIRMED
    assert finding.values == pytest.approx([0.01, 0.01])


def test_a_pair_that_cannot_be_compared_is_reported() -> None:
    base = [outcome("base", 0), outcome("base", 1), outcome("base", 2, code=3)]
    other = [outcome("other", 0), outcome("other", 1), outcome("other", 2, code=3)]
    finding = evaluate(Criterion("loss", "other", "base", within=0.01), [*base, *other])
    assert (finding.verdict, len(finding.values)) == (INCONCLUSIVE, 2)
    assert finding.why.startswith("1 of 3 pairs cannot be compared: neither run finite")


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ([*SLOW, *FAST[:2], outcome("fast", 2, code=1)], "fast, seed 2, failed: it broke"),
        ([*SLOW, *FAST[:2], Outcome("fast", 2, Path("nowhere"), -9)], "fast, seed 2, failed: exit code -9"),
        ([SLOW[0], outcome("slow", 1, speed=None), *FAST[:2]], "not measured of slow, seed 1"),
        ([SLOW[0], FAST[0]], "too few runs for an interval"),
    ],
)
def test_what_is_missing_leaves_the_verdict_open_and_is_reported(outcomes: list[Outcome], why: str) -> None:
    finding = evaluate(speed(at_least=1.5), outcomes)
    assert (finding.verdict, finding.why) == (INCONCLUSIVE, why)


def test_an_arm_that_is_not_run_here_cannot_be_judged() -> None:
    assert evaluate(speed(at_least=1.5), SLOW).verdict == NOT_HERE
    assert evaluate(speed(), SLOW).verdict == ""


@pytest.mark.parametrize(
    ("verdicts", "combined"),
    [
        ([CONFIRMED, CONFIRMED, ""], CONFIRMED),
        ([CONFIRMED, REFUTED, INCONCLUSIVE], REFUTED),
        ([CONFIRMED, INCONCLUSIVE], INCONCLUSIVE),
        ([CONFIRMED, NOT_HERE], CONFIRMED),
        ([NOT_HERE, ""], NOT_HERE),
        ([CONFIRMED, RELATED, NOT_HERE], RELATED),
        ([REFUTED, RELATED], REFUTED),
    ],
)
def test_a_claim_stands_where_all_its_criteria_do(verdicts: list[str], combined: str) -> None:
    assert combine(verdicts) == combined


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arm": ["a", "b"], "over": "c"}, "with as many arms, or neither"),
        ({"arm": "a", "over": "b", "minus": "c"}, "over or minus"),
        ({"arm": "a", "within": 0.003}, "within needs over"),
        ({"arm": "a", "over": "b", "within": 0.0}, "between 0 and 1"),
        ({"arm": "a", "over": "b", "within": 0.1, "at_most": 2.0}, "no other bound"),
        ({"arm": []}, "needs an arm"),
    ],
)
def test_criteria_that_cannot_be_judged_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Criterion("loss", **fields)


@pytest.mark.parametrize(
    ("criterion", "median", "low", "high", "values", "words"),
    [
        (speed(), 2.0, 1.9, 2.1, [1.9, 2.1], "2.000x [1.900, 2.100]"),
        (speed(), 1.25, 1.25, 1.25, 3 * [1.25], "1.250x (3 equal runs)"),  # no spread, no interval
        (speed(), 2.0, 1.9, None, [1.9, None], "2.000x [1.900, not finite]"),
        (speed(), None, None, None, [None, None], "not finite"),
        (speed(), None, None, None, [], "not measured"),
        (Criterion("speed", "fast"), 12345.6, 1.0, 12345.6, [12345.6, 1.0], "12,346 [1.000, 12,346]"),
        (Criterion("loss", "a", "b"), 1.0001, 0.9998, 1.0003, [1.0, 1.0002], "+0.01 % [-0.02 %, +0.03 %]"),
        (Criterion("loss", "a", "b"), 28.83, 24.97, 33.28, [25.0, 33.0], "28.83x [24.97, 33.28]"),
    ],
)
def test_numbers_are_shown_with_their_interval(
    criterion: Criterion, median: float | None, low: float | None, high: float | None, values: list[Any], words: str
) -> None:
    found = {"median": median, "low": low, "high": high, "values": values, "criterion": asdict(criterion)}
    assert shown(found) == words
