from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import roofline as module
from benchmarks.jobs import Job
from benchmarks.roofline import ATTENTION, ELEMENTWISE, GROUPS, MATMULS, OUTSIDE, by_group, group, roofline
from benchmarks.rows import Bench
from trainer.hardware import detect

SMALL = Job(
    "small",
    ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64", "batch_size=4"),
)


def test_times_are_added_up_by_group() -> None:
    operators = {
        MATMULS: "addmm bmm mkldnn_convolution convolution_backward _scaled_mm",
        ATTENTION: "_scaled_dot_product_flash_attention_for_cpu_backward",
        "normalisation": "native_layer_norm_backward native_batch_norm",
        "optimizer and clipping": "_fused_adamw_ _foreach_mul_",
        "copies, casts and views": "_to_copy transpose",
        "reductions, softmax and losses": "_log_softmax_backward_data max_pool2d_with_indices",
        ELEMENTWISE: "gelu_backward add threshold_backward",
    }
    named = {title: [f"aten::{name}" for name in names.split()] for title, names in operators.items()}
    assert {title: {*map(group, names)} for title, names in named.items()} == {title: {title} for title in named}
    totals = by_group({"aten::mm": 3.0, "aten::addmm": 4.0, "aten::relu": 0.5})
    assert totals == dict.fromkeys(totals, 0.0) | {MATMULS: 7.0, ELEMENTWISE: 0.5}


def test_the_shares_of_a_step_and_the_rate_of_its_matmuls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "product_rates", lambda hardware, formats: dict.fromkeys(formats, 1e3))
    hardware = replace(detect("cpu"), cpu_flags=frozenset())
    rows = {row.name.removeprefix("small "): row for row in roofline(Bench(hardware, 2, tmp_path), [SMALL])}
    assert rows["bf16, rate of its matmuls / measured"].values == []
    rate = rows["fp32, rate of its matmuls / measured"]
    assert all(0 < value < 1e-2 for value in rate.values)  # of 1000 TFLOP/s
    # 4 blocks of 12 · 128² weights and a head of 64 · 128, 64 tokens, forward and two matmuls backward
    assert f"matmuls of {6 * 64 * (4 * 12 * 128**2 + 64 * 128) / 1e9:.2f} GFLOP" in rate.measured
    shares = [rows[f"fp32, share of {name}"] for name in (*GROUPS, ELEMENTWISE, OUTSIDE)]
    assert [len(row.values) for row in shares] == [2] * len(shares)
    assert sum(row.values[0] for row in shares) == pytest.approx(100)
