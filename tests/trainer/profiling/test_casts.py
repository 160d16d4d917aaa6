"""Where the start says that 16 bits do not pay on a CPU: by what matmuls save and what casts cost, both given."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.helpers import trainer_of
from trainer.profiling import rates
from trainer.profiling.rates import _casts_ms, slower_than_fp32
from trainer.run import record
from trainer.run.report import show_start
from trainer.terminal import Terminal

SMALL = ("recipe=bignet", "recipe.layers=2", "recipe.width=16", "data.samples=64", "batch_size=8")
FLOP = (4 + 6) * 16 * 16 * 8
"""Of a microbatch of 8 samples, in two layers; the first one's input needs no gradient."""
FAST = {"fp32": 2e-6, "bf16": 8e-6}
"""Of a machine so slow that a microbatch takes milliseconds."""
WHY = "matmuls of a microbatch take 2.56 ms and casts 1000 ms, in fp32 10.2 ms"


@pytest.mark.parametrize(
    ("found", "casts_ms", "why"),
    [
        (FAST, 1000, WHY),
        (FAST, 7.7, WHY.replace("1000", "7.7")),
        (FAST, 7.6, ""),
        ({"fp32": 1e-6, "bf16": 4e-6}, 1000, ""),  # it saves 15.4 ms: nothing is timed
        ({"fp32": 8e-6, "bf16": 2e-6}, 0, "matmuls of a microbatch take 10.2 ms without casts, in fp32 2.56 ms"),
        ({"fp32": 8e-7, "bf16": 2e-7}, 0, "matmuls of a microbatch take 102 ms without casts, in fp32 25.6 ms"),
    ],
    ids=["far more", "more", "less", "a large model", "slow matmuls", "slow matmuls of a large model"],
)
def test_casts_are_weighed_against_what_matmuls_save(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, float], casts_ms: float, why: str
) -> None:
    monkeypatch.setattr(rates, "_casts_ms", lambda model, dtype: casts_ms)
    assert slower_than_fp32(nn.Linear(4, 4), torch.bfloat16, "bf16", FLOP, found) == why


@pytest.mark.parametrize(
    ("options", "casts_ms", "noted"),
    [
        (("precision=bf16",), 1000, True),
        (("precision=bf16", "micro_batch_size=4"), 1000, True),
        (("precision=bf16",), 0, False),
        (("precision=fp32",), 1000, False),
        (("precision=bf16_pure",), 1000, False),
    ],
    ids=["small", "microbatches", "large", "fp32", "no autocast"],
)
def test_the_start_has_a_note_where_casts_cost_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], casts_ms: float, noted: bool
) -> None:
    monkeypatch.setattr(rates, "_casts_ms", lambda model, dtype: casts_ms)
    monkeypatch.setattr(record, "matmul_rates", lambda hardware, names: FAST)
    trainer = trainer_of(*SMALL, *options)
    manifest, _ = record.observed(trainer)
    why = WHY.replace("2.56", "1.28").replace("10.2", "5.12") if "micro_batch_size=4" in options else WHY
    assert manifest["effective"]["slower_than_fp32"] == (why if noted else "")
    printed = io.StringIO()
    show_start(Terminal(Console(file=printed)), trainer, manifest, tmp_path, [])
    note = f"note: bf16 is about as slow as fp32 here, or slower: {why}; "
    note += "python scripts/advise.py recipe=bignet … measures it"
    assert (note in printed.getvalue().splitlines()) == noted
    assert ("note: " in printed.getvalue()) == noted


def test_each_shape_is_timed_once_and_counts_as_often_as_the_model_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = iter([9, 10, 1, 4, 2, 3, 1, 3, 9, 9, *(9, 10, 2, 1, 9, 9, 9, 9, 9, 9)])  # fp32, bf16, fp32, …
    clock = iter([time for each in milliseconds for time in (0, each)])
    monkeypatch.setattr(rates.time, "thread_time", lambda: 1e-3 * next(clock))
    seen: list[tuple[torch.Size, torch.dtype]] = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = nn.functional.linear(x, weight)
        seen.append((weight.shape, result.dtype))
        return result

    monkeypatch.setattr(rates, "F", SimpleNamespace(linear=linear))
    model = nn.Sequential(*(nn.Linear(4, 6) for _ in range(3)), nn.LayerNorm(6), nn.Conv2d(3, 5, 2))
    assert _casts_ms(model, torch.bfloat16) == pytest.approx(3 * (3 - 1))  # and nothing where it is not slower
    assert [shape for shape, _ in seen] == [(6, 4)] * 10 + [(5, 12)] * 10
    assert [dtype for _, dtype in seen] == [torch.float32, torch.bfloat16] * 10
