"""Verdicts and ratios of known runs, and how often verdicts are wrong on simulated ones whose truth is known."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import geometric_mean

import numpy as np
import pytest

from mantissa.verdict.judge import Quality, incomparable, judge, ratio
from mantissa.verdict.runs import Run, Store, by_arm
from mantissa.verdict.statistics import BETTER, EQUIVALENT, INCONCLUSIVE, NOT_JUDGED, WORSE

MARGIN, SPREAD = 0.003, 0.002
"""Spread of paired differences; small models differ by about as much."""
NAN = math.nan
BASE = (2.0, 2.1, 1.9, 2.05)
ALIKE = (2.0002, 2.0997, 1.9001, 2.0499)
OTHERS_DIVERGED = "{} of 4 runs diverged where the baseline's did not"
FAILED = "1 of 4 runs failed where the baseline's did not"
Losses = Sequence[float | None] | Mapping[int, float | None]
"""Losses by seed; nan: it diverged; None: it failed."""


def run(arm: str, seed: int, loss: float | None) -> Run:
    if loss is None:
        return Run(arm, seed, failure="it broke")
    return Run(arm, seed, {"loss": loss if math.isfinite(loss) else None})


def verdicts(store: Store | None = None, margin: float = MARGIN, **arms: Losses) -> dict[str, Quality]:
    """Judge arms, the first of which is the baseline."""
    by_seed = {arm: losses if isinstance(losses, Mapping) else dict(enumerate(losses)) for arm, losses in arms.items()}
    runs = [run(arm, seed, loss) for arm, losses in by_seed.items() for seed, loss in losses.items()]
    return {arm: row.quality for arm, row in judge(by_arm(arms, runs), margin, store or Store()).items()}


@pytest.mark.parametrize(
    ("losses", "base", "expected", "why"),
    [
        (ALIKE, BASE, EQUIVALENT, ""),
        ((2.02, 2.12, 1.92, 2.07), BASE, WORSE, ""),
        ((1.98, 2.08, 1.88, 2.03), BASE, BETTER, ""),
        ((1e6,) * 3, BASE[:3], WORSE, ""),
        ((1e6, 2e6, 1.5e6), BASE[:3], WORSE, ""),
        ((2.01, 2.09, 1.905, 2.04), BASE, INCONCLUSIVE, "about "),
        ((ALIKE[0], None, *ALIKE[2:]), BASE, NOT_JUDGED, FAILED),
        ((ALIKE[0], None, NAN, ALIKE[3]), BASE, WORSE, OTHERS_DIVERGED.format(1)),
        ((2.02, 2.12, None, 2.07), BASE, NOT_JUDGED, FAILED),
        (ALIKE, (None, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished"),
        ((None, *ALIKE[1:]), (None, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished"),
        (ALIKE, (NAN, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished; the baseline diverged in 1 where this arm"),
        ((NAN, *ALIKE[1:]), (NAN, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished"),
        ((NAN, *ALIKE[1:]), BASE, WORSE, OTHERS_DIVERGED.format(1)),
        ((math.inf,) * 4, BASE, WORSE, OTHERS_DIVERGED.format(4)),
        ((None, None, *ALIKE[2:]), BASE, NOT_JUDGED, "2 of 4 pairs finished, and a verdict needs 3"),
        (ALIKE[:2], BASE[:2], NOT_JUDGED, "a verdict needs more than 2 seeds; use 5"),
        ((NAN, NAN), BASE[:2], NOT_JUDGED, "2 of 2 runs diverged where the baseline's did not; a verdict needs more"),
        (ALIKE, (0.0, *BASE[1:]), NOT_JUDGED, "the baseline is 0, or on both sides of it"),
        (ALIKE, (-0.1, *BASE[1:]), NOT_JUDGED, "the baseline is 0, or on both sides of it"),
        ((-1.9, -2.0, -1.8, -1.95), tuple(-loss for loss in BASE), WORSE, ""),  # a log-density: higher is worse
    ],
)
def test_a_verdict_is_of_the_pairs_that_ended(losses: Losses, base: Losses, expected: str, why: str) -> None:
    quality = verdicts(base=base, arm=losses)["arm"]
    assert (quality.verdict, quality.why.startswith(why), bool(quality.why)) == (expected, True, bool(why))


def test_differences_are_of_runs_of_the_same_seed_in_any_order() -> None:
    quality = verdicts(base={0: 2.0, 1: 3.0}, arm={1: 3.03, 0: 2.0})["arm"]
    assert sorted(quality.differences) == pytest.approx([0.0, 0.01])


def test_arms_are_corrected_for_their_number_also_for_those_that_failed() -> None:
    """One arm by itself is EQUIVALENT; beside five others that are not, the same runs no longer suffice."""
    noise = np.array([0.0000, 0.0033, 0.0006, 0.0022, 0.0011])
    base, arm = [2.0] * 5, (2 * (1 + noise)).tolist()
    others = {str(number): (2 * (1 + noise + 0.001 * number)).tolist() for number in range(1, 6)}
    alone, among = verdicts(base=base, arm=arm)["arm"], verdicts(base=base, arm=arm, **others)["arm"]
    assert alone.test
    assert among.test
    assert (alone.verdict, alone.test.difference.level) == (EQUIVALENT, pytest.approx(0.92))
    assert (among.verdict, 0.04 / 6 < among.test.p_equivalent < 0.04) == (INCONCLUSIVE, True)
    beside_failed = verdicts(base=BASE, arm=ALIKE, failed=[None] * 4)["arm"]
    assert beside_failed.test
    assert beside_failed.test.difference.level == pytest.approx(1 - 2 * 0.04 / 2)


# --- looks ---


def look_at(store: Store, differences: Mapping[int, float | None], seeds: int) -> tuple[int, Quality]:
    """Judge an arm by its relative differences; return how many looks there are, and its quality."""
    base = {seed: 2.0 + 0.01 * seed for seed in range(seeds)}
    arm = {seed: None if (change := differences[seed]) is None else base[seed] * (1 + change) for seed in base}
    quality = verdicts(store, base=base, arm=arm)["arm"]
    return len(store.looks), quality


def test_more_seeds_are_another_look_with_stricter_tests_and_what_one_has_decided_stands() -> None:
    spread: dict[int, float | None] = {seed: 0.0008 * (-1) ** seed for seed in range(6)}
    store = Store()
    assert look_at(store, dict.fromkeys(range(4)), 4)[0] == 0, "nothing is judged"
    first = look_at(store, spread, 4)
    assert (first[0], first[1].verdict, first[1].look) == (1, EQUIVALENT, 1)
    assert look_at(store, spread, 4) == first, "the same runs are no other look"
    looks, second = look_at(store, spread | {4: 0.02}, 5)
    assert (looks, second.verdict, second.test, second.look) == (2, EQUIVALENT, first[1].test, 1)
    assert second.why == "decided at look 1, of 4 seeds"
    looks, failed = look_at(store, spread | {4: 0.02, 1: None}, 5)
    assert (looks, failed.verdict) == (2, NOT_JUDGED), "while a run fails, what it decided before does not stand"
    looks, third = look_at(store, spread, 6)
    assert third.test
    assert (looks, third.look, third.test.difference.level) == (3, 3, pytest.approx(1 - 2 * 0.0025))


def test_a_look_is_judged_by_the_runs_that_had_ended_then() -> None:
    """A run that failed at the first look, at which another arm was judged, and was retried, counts at the second."""
    differences: dict[int, float | None] = {seed: 0.0025 * (-1) ** seed for seed in range(4)} | {4: 0.0}
    base = {seed: 2.0 + 0.01 * seed for seed in range(5)}
    arm: dict[int, float | None] = {seed: base[seed] * (1 + (differences[seed] or 0)) for seed in base}
    store = Store()
    first = verdicts(store, base=base, other=arm, arm=arm | {3: None})["arm"]
    second = verdicts(store, base=base, other=arm, arm=arm)["arm"]
    assert (len(first.differences), first.verdict, first.look) == (4, NOT_JUDGED, 1)
    assert (len(second.differences), second.verdict, second.look) == (5, INCONCLUSIVE, 2)
    assert look_at(Store(), differences, 5)[1].verdict == EQUIVALENT, "as it would be with all runs at the first look"


# --- simulated comparisons ---


@pytest.fixture
def no_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the number of pairs that would decide, which takes nearly all of the time."""
    monkeypatch.setattr("mantissa.verdict.statistics._Tested._pairs_needed", lambda *_: None)


FEWEST, MOST = 0, 400


@pytest.mark.usefixtures("no_number_of_pairs")
@pytest.mark.parametrize(
    ("mean", "spread", "count", "verdict", "least", "most"),
    [
        *((0.0, spread, count, {WORSE, BETTER}, FEWEST, 29) for spread in (0.0005, SPREAD, 0.02) for count in (3, 10)),
        *((mean, SPREAD, 5, {EQUIVALENT}, FEWEST, 29) for mean in (-MARGIN, MARGIN)),  # 4 %, and three deviations
        (0.01, SPREAD, 5, {WORSE}, 395, MOST),
        (-0.01, SPREAD, 5, {BETTER}, 395, MOST),
        (0.01, SPREAD, 3, {WORSE}, 280, MOST),
        (0.0, SPREAD, 5, {EQUIVALENT}, 240, MOST),
        (0.0, 0.0005, 5, {EQUIVALENT}, MOST, MOST),
    ],
)
def test_how_often_of_400_comparisons_a_verdict_is_given(
    mean: float, spread: float, count: int, verdict: set[str], least: int, most: int
) -> None:
    generator, given = np.random.default_rng(0), Counter[str]()
    for _ in range(400):
        base = generator.normal(2, 0.02, count)
        arm = base * (1 + generator.normal(mean, spread, count))
        given[verdicts(base=base.tolist(), arm=arm.tolist())["arm"].verdict] += 1
    assert least <= sum(given[one] for one in verdict) <= most, given


EDGE = 1e-6
OUT, IN = 1 + EDGE, 1 - EDGE
"""True differences on both sides of the margin, in margins: where tests are wrong most often."""


def is_wrong(verdict: str, truth: float) -> bool:
    """Whether a verdict is wrong on a true difference, in margins."""
    right = EQUIVALENT if abs(truth) < 1 else WORSE if truth > 0 else BETTER
    return verdict in (EQUIVALENT, WORSE, BETTER) and verdict != right


@pytest.mark.usefixtures("no_number_of_pairs")
@pytest.mark.parametrize(
    ("truths", "spread"),
    [
        ([OUT], 0.7),
        ([OUT] * 3, 0.7),
        ([OUT, IN], 0.7),
        ([OUT, -OUT, IN, -IN, 0.0, 4.0], 0.7),
        ([OUT, 0.5, IN], 0.35),
        ([0.0, OUT, IN], 20.0),
    ],
)
def test_that_any_verdict_is_wrong_of_all_arms_and_looks_has_a_chance_of_5_percent(
    truths: list[float], spread: float
) -> None:
    """Of both kinds together, as METHOD says: EQUIVALENT beyond the margin, WORSE or BETTER within it."""
    generator, wrong, comparisons = np.random.default_rng(0), 0, 600
    for _ in range(comparisons):
        base = generator.normal(0, spread * MARGIN / 2**0.5, 8)  # of the arms, all are taken from the same runs
        own = generator.normal(0, spread * MARGIN / 2**0.5, (len(truths), 8))
        losses = 2 * (1 + MARGIN * np.array(truths)[:, None] + own - base)
        arms = {f"arm{number}": of_arm.tolist() for number, of_arm in enumerate(losses)}
        store = Store()
        for count in (4, 6, 8):
            rows = verdicts(store, base=[2.0] * count, **{arm: of_arm[:count] for arm, of_arm in arms.items()})
        del rows["base"]
        wrong += any(is_wrong(quality.verdict, truth) for quality, truth in zip(rows.values(), truths, strict=True))
    assert wrong / comparisons <= 0.05 + 3 * (0.05 * 0.95 / comparisons) ** 0.5


def rounded_pairs(
    difference: str, spread: float, count: int, unit: float, generator: np.random.Generator
) -> list[list[float]]:
    """A baseline and an arm whose true difference is the margin, as they are printed."""
    noise = {
        "normal": lambda: generator.normal(size=count),
        "exponential": lambda: generator.choice([-1, 1]) * (generator.exponential(size=count) - 1),
    }[difference]()
    base = 3.5 * (1 + generator.normal(0, 0.003, count)) + generator.uniform(-0.05, 0.05)
    arm = base * (1 + generator.choice([-1, 1]) * MARGIN * (1 + spread * noise))
    return [(np.round(side / unit) * unit).tolist() for side in (base, arm)]


@pytest.mark.usefixtures("no_number_of_pairs")
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize(("difference", "most"), [("normal", 0.06), ("exponential", 0.17)])
def test_rounding_makes_a_difference_of_the_margin_no_more_often_equivalent(
    difference: str, most: float, count: int
) -> None:
    """Spreads far below the last digit, which make all differences the same, and above it; three deviations of 200."""
    generator = np.random.default_rng(0)
    for unit, spread in itertools.product((1e-2, 5e-3, 1e-3, 1e-4), (0.02, 0.3, 1.0)):
        pairs = [rounded_pairs(difference, spread, count, unit, generator) for _ in range(200)]
        given = [verdicts(base=base, arm=arm)["arm"].verdict for base, arm in pairs]
        assert given.count(EQUIVALENT) / 200 <= most + 3 * (most * (1 - most) / 200) ** 0.5, (unit, spread)


def test_an_accuracy_of_few_samples_shows_no_difference_below_its_steps() -> None:
    """With 64 samples most seeds count the same, whichever the arm; with many, counts are like other metrics."""
    few = [right / 64 for right in (57, 60, 58, 61)]
    many, others = (9731.0, 9760.0, 9744.0, 9726.0), (9733.0, 9755.0, 9741.0, 9729.0)
    assert verdicts(base=few, arm=few)["arm"].verdict == INCONCLUSIVE
    assert verdicts(margin=0.1, base=few, arm=few)["arm"].verdict == EQUIVALENT
    assert verdicts(base=many, arm=others)["arm"].verdict == EQUIVALENT


# --- ratios ---


def runs_of(*speeds: float | None, arithmetic: str = "", emulated: bool = False, **values: float) -> dict[int, Run]:
    """Runs by seed with these speeds; None: it failed."""
    return {
        seed: Run("", seed, failure="it broke")
        if speed is None
        else Run("", seed, {"speed": speed, "memory": 100.0, **values}, arithmetic=arithmetic, emulated=emulated)
        for seed, speed in enumerate(speeds)
    }


def test_ratios_are_of_runs_of_the_same_seed() -> None:
    """The machine slowed down fourfold between the seeds, which the ratios must not see; the order is shuffled."""
    base, arm = runs_of(100.0, 25.0, None), runs_of(190.0, 52.5, 1e6)
    speed = ratio("speed", dict(reversed(arm.items())), base)
    assert sorted(speed.ratios) == pytest.approx([1.9, 2.1])
    assert speed.ratio
    assert speed.ratio.mean == pytest.approx(geometric_mean([1.9, 2.1]))
    assert speed.why == "2 of 3 pairs finished, and a verdict needs 3"
    assert ratio("memory", arm, base).why == "", "all runs have the same"
    assert ratio("minutes", arm, base).values == []


WIDE, ALSO = "bf16 matmuls: fp32 arithmetic", "fp16 matmuls: fp32 arithmetic"


@pytest.mark.parametrize(
    ("arm", "base", "speed", "memory"),
    [
        ({}, {}, "", ""),
        ({"arithmetic": WIDE}, {}, WIDE, ""),
        ({"arithmetic": WIDE}, {"arithmetic": WIDE}, "", ""),  # it says something about what else differs
        ({"arithmetic": WIDE}, {"arithmetic": ALSO}, f"{WIDE}; {ALSO}", ""),
        ({"arithmetic": "emulated", "emulated": True}, {}, "emulated", "emulated"),
        ({"arithmetic": "emulated", "emulated": True}, {"arithmetic": "emulated", "emulated": True}, *["emulated"] * 2),
    ],
)
def test_what_is_computed_otherwise_than_its_format_is_not_compared(
    arm: dict[str, str], base: dict[str, str], speed: str, memory: str
) -> None:
    sides = runs_of(80.0, 80.0, 80.0, **arm), runs_of(100.0, 100.0, 100.0, **base)  # type: ignore[arg-type]
    for name, why in (("speed", speed), ("memory", memory)):
        found = ratio(name, *sides)
        assert (found.why, found.ratio is None, len(found.values)) == (why, bool(why), 3)
    assert incomparable("speed", runs_of(1.0), {}) == ""


@pytest.mark.parametrize(("share", "what"), [("others_cpu", "CPUs"), ("others_gpu", "GPU")])
def test_while_others_used_the_device_a_time_is_not_judged(share: str, what: str) -> None:
    """The mean over an arm's runs counts."""
    quiet, busy = (runs_of(1.0, 1.0, 1.0, **{share: used}) for used in (0.02, 0.3))
    assert ratio("speed", busy, quiet).why.startswith(f"other processes used 30% of the {what}; measure again on a")
    assert ratio("speed", busy, quiet).ratio, "it is shown"
    assert [ratio(*given).why for given in (("memory", busy, quiet), ("speed", quiet, quiet))] == ["", ""]


def test_a_loss_that_is_not_finite_is_above_all_others_and_no_pair_where_the_baselines_is() -> None:
    finite, diverged = ({seed: run("", seed, loss) for seed in range(3)} for loss in (2.0, NAN))
    above = ratio("loss", diverged, finite)
    assert above.ratio
    assert (above.ratio.low, above.ratio.high) == (math.inf, math.inf)
    assert (ratio("loss", finite, diverged).ratios, ratio("loss", diverged, diverged).ratios) == ([], [])
