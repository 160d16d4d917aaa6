from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import probe as probes
from evidence.measures import PROBE_MEASURES
from trainer.errors import UserError

GPT2 = "recipe=gpt2 recipe.size=nano recipe.context=8 data=synthetic data.vocab_size=64 batch_size=4 device=cpu"


def measures(folder: Path, text: str) -> dict[str, float]:
    path = probes.measure([*text.split(), f"output_dir={folder}"])
    summary = json.loads(path.read_text())
    assert summary["status"] == "FINISHED"
    found: dict[str, float] = summary["measures"]
    assert tuple(found) == PROBE_MEASURES[text.split()[0]]
    return found


def test_gemm_is_as_exact_as_its_format(tmp_path: Path) -> None:
    errors = [
        measures(tmp_path, f"gemm size=256 repeats=2 precision={p} device=cpu")["error"] for p in ("fp32", "bf16")
    ]
    assert 0 < errors[0] < 1e-5
    assert 1e-3 < errors[1] < 3e-2
    assert torch.get_default_dtype() == torch.float32


def test_gemm_counts_two_operations_for_each_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []

    def block(steps: int) -> float:
        blocks.append(steps)
        return 1e-3 * steps

    monkeypatch.setattr(probes, "stopwatch", lambda loop, device: block)
    assert measures(tmp_path, "gemm size=100 device=cpu")["tflops"] == pytest.approx(2e6 / 1e-3 / 1e12)
    assert blocks == [1, 2, 4, *[8] * 11]  # of at least five milliseconds
    monkeypatch.setattr(probes, "stopwatch", lambda loop, device: lambda steps: math.nan)
    with pytest.raises(UserError, match="gemm measured no number for tflops"):
        measures(tmp_path / "nothing", "gemm size=8 device=cpu")
    assert not (tmp_path / "nothing").exists()


def test_before_unscaling_the_norm_is_that_of_the_scaled_gradients(tmp_path: Path) -> None:
    before = measures(tmp_path, f"clip_order order=before scale=1024 precision=fp16 {GPT2}")
    after = measures(tmp_path, f"clip_order order=after scale=1024 precision=fp16 {GPT2}")
    fp32 = measures(tmp_path, f"clip_order precision=fp32 {GPT2}")
    assert before["grad_norm"] / after["grad_norm"] == pytest.approx(1024, rel=1e-3)
    assert after["grad_norm"] == pytest.approx(fp32["grad_norm"], rel=1e-2)
    assert after["update_norm"] == pytest.approx(min(1.0, after["grad_norm"]), rel=1e-3)
    assert before["update_norm"] == pytest.approx(1 / 1024, rel=1e-3)


def test_the_forecast_of_the_largest_batch_is_where_its_line_meets_the_budget(tmp_path: Path) -> None:
    small = measures(tmp_path, f"max_batch by=forecast budget=64MiB {GPT2}")
    large = measures(tmp_path, f"max_batch by=forecast budget=128MiB {GPT2}")
    assert small["mib_per_sample"] == large["mib_per_sample"] > 0
    assert small["fixed_mib"] > 4 * 4 * 12 * 128**2 * 4 / 2**20  # weights, gradients and two moments of four blocks
    more = large["largest_batch"] - small["largest_batch"]
    assert more == pytest.approx(0.95 * 64 / small["mib_per_sample"], abs=1)
