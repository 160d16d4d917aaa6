"""What inference in 16 bits costs: intervals as scipy has them, and verdicts about models that do differ."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from inference.precisions import Cost, paired, verdict
from tests.inference.conftest import script

evaluate = script("inference.evaluate:evaluate")


def test_batches_of_one_size_give_the_paired_t_interval() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(80, 5, 25)
    other = first + rng.normal(0.4, 1, 25)
    expected = stats.ttest_rel(other / 8, first / 8).confidence_interval(0.95)
    (found,) = paired(first, [other], np.full(25, 8))
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        (expected.low, expected.high)
    )


def test_batches_count_by_their_targets() -> None:
    targets = np.array([90, 10, 100])
    first, other = np.zeros(3), np.array([90.0, 30.0, 100.0])
    found = paired(first, [other, first + targets, first], targets)
    assert found[0].mean == pytest.approx(220 / 200)
    assert found[1:] == [pytest.approx((1, 0)), (0, 0)]


def test_of_several_precisions_each_has_holms_level() -> None:
    """With the p of scipy: the smallest of four is compared with 5 % / 4, …, each with its interval."""
    rng = np.random.default_rng(1)
    first, targets = np.zeros(20), np.full(20, 4)
    others = [rng.normal(mean, 1, 20) for mean in (0.62, 0.55, 0.0)] + [np.full(20, math.inf)]
    p_values = [stats.ttest_1samp(other, 0).pvalue for other in others[:3]]
    with np.errstate(invalid="ignore"):
        found = paired(first, others, targets)
    assert not math.isfinite(found[3].mean)  # it counts as one of the four, which none is judged by
    for rank, index in enumerate(np.argsort(p_values)):
        assert found[index].is_measurable == all(
            p_values[i] < 0.05 / (4 - k) for k, i in enumerate(np.argsort(p_values)[: rank + 1])
        )


def test_the_verdict_follows_the_interval() -> None:
    assert "bf16: no measurable cost against fp32" in verdict("bf16", "fp32", Cost(0.001, 0.002), 2.0)
    assert verdict("bf16", "fp32", Cost(0.02, 0.01), 2.0) == "bf16: costs 0.02 ± 0.01 in loss against fp32 (+1 %)"
    assert "gains 0.02 ± 0.01" in verdict("bf16", "fp32", Cost(-0.02, 0.01), 2.0)
    assert verdict("bf16", "fp32", Cost(0, 0), 2.0) == "bf16: the same loss as fp32 in every batch"
    assert "not finite; use fp32" in verdict("fp16", "fp32", Cost(math.nan, math.nan), 2.0)


def test_precisions_are_compared_on_twenty_batches_of_the_same_samples(here: Path, tmp_path: Path) -> None:
    done = evaluate("-m", "run=outputs/gpt2", "precision=fp32,bf16,bf16_pure", f"output={tmp_path}")
    assert done.code == 0, done.err
    assert "24 samples of split=valid in batches of 1; " in done.out
    assert "no measurable cost against fp32" in done.out or "costs" in done.out or "gains" in done.out
    found = json.loads((tmp_path / "precisions.json").read_text())["precisions"]
    assert list(found) == ["fp32", "bf16", "bf16_pure"]
    assert found["fp32"]["costs"] == {}
    for name in ("bf16", "bf16_pure"):
        difference = found[name]["metrics"]["loss"] - found["fp32"]["metrics"]["loss"]
        assert difference != 0  # it did compute in 16 bits
        assert found[name]["costs"]["loss"]["mean"] == pytest.approx(difference, rel=1e-3)
    assert found["bf16"]["metrics"]["loss"] != found["bf16_pure"]["metrics"]["loss"]
