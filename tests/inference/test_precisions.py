"""What inference in 16 bits costs: intervals over batches, and verdicts about models that do differ."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from inference.evaluate import Measured
from inference.precisions import compared, verdict
from mantissa.verdict.statistics import Interval
from tests.inference.conftest import script

evaluate = script("inference.evaluate:evaluate")


def measured(sums: np.ndarray, targets: np.ndarray) -> Measured:
    return Measured({}, targets, {"loss": sums}, {}, 1.0, None, [], [])


def test_batches_of_one_size_give_the_paired_t_interval_and_several_precisions_wider_ones() -> None:
    rng, targets = np.random.default_rng(0), np.full(25, 8)
    first = rng.normal(80, 5, 25)
    others = [first + rng.normal(0.4, 1, 25), np.full(25, math.inf)]
    for count, level in ((1, 0.95), (2, 0.975)):
        sums = dict(zip(("fp32", "bf16", "fp16"), [first, *others[:count]], strict=False))
        found = compared({label: measured(each, targets) for label, each in sums.items()})
        cost = found["bf16"]["loss"]
        expected = stats.ttest_rel(others[0] / 8, first / 8).confidence_interval(level)
        assert cost is not None
        assert (cost.low, cost.high) == pytest.approx((expected.low, expected.high))
    assert found["fp16"]["loss"] is None  # not finite


def test_batches_count_by_their_targets() -> None:
    targets = np.array([90, 10, 100])
    found = compared({"a": measured(np.zeros(3), targets), "b": measured(np.array([90.0, 30.0, 100.0]), targets)})
    assert found["b"]["loss"] is not None
    assert found["b"]["loss"].mean == pytest.approx(220 / 200)


def cost(mean: float, half: float) -> Interval:
    return Interval(mean, mean - half, mean + half, 0.95, 20)


def test_the_verdict_follows_the_interval() -> None:
    assert "bf16: no measurable cost against fp32" in verdict("bf16", "fp32", cost(0.001, 0.002), 2.0)
    assert verdict("bf16", "fp32", cost(0.02, 0.01), 2.0) == "bf16: costs 0.02 ± 0.01 in loss against fp32 (+1 %)"
    assert "gains 0.02 ± 0.01" in verdict("bf16", "fp32", cost(-0.02, 0.01), 2.0)
    assert verdict("bf16", "fp32", cost(0, 0), 2.0) == "bf16: the same loss as fp32 in every batch"
    assert "not finite; use fp32" in verdict("fp16", "fp32", None, 2.0)


def test_precisions_are_compared_on_twenty_batches_of_the_same_samples(here: Path, tmp_path: Path) -> None:
    done = evaluate("run=outputs/gpt2", "precision=fp32,bf16,bf16_pure", f"output={tmp_path}")
    assert done.code == 0, done.err
    assert "24 samples of split=valid in batches of 1; " in done.out
    assert "no measurable cost against fp32" in done.out or "costs" in done.out or "gains" in done.out
    found = json.loads((tmp_path / "precisions.json").read_text())["precisions"]
    assert list(found) == ["fp32", "bf16", "bf16_pure"]
    for name in ("bf16", "bf16_pure"):
        difference = found[name]["metrics"]["loss"] - found["fp32"]["metrics"]["loss"]
        assert difference != 0  # it did compute in 16 bits
        assert found[name]["costs"]["loss"]["mean"] == pytest.approx(difference, rel=1e-3)
    assert found["bf16"]["metrics"]["loss"] != found["bf16_pure"]["metrics"]["loss"]
