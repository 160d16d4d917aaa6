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
from trainer.precision.modes import Precision
from trainer.profiling import casts
from trainer.profiling.casts import casts_ms, slower_than_fp32
from trainer.run import record
from trainer.run.report import show_start
from trainer.terminal import Terminal

SMALL = ("recipe=bignet", "recipe.layers=2", "recipe.width=16", "data.samples=64", "batch_size=8")
FLOP = (4 + 6) * 16 * 16 * 8
"""Of a microbatch of 8 samples, in two layers; the first one's input needs no gradient."""
FAST = {"fp32": 2e-6, "bf16": 8e-6}
"""Of a machine so slow that a microbatch takes milliseconds."""


@pytest.mark.parametrize(
    ("rates", "added_ms", "why"),
    [
        (FAST, 1000, "in a microbatch bf16 matmuls save 7.68 ms, and casts add 1000 ms"),
        (FAST, 7.7, "in a microbatch bf16 matmuls save 7.68 ms, and casts add 7.7 ms"),
        (FAST, 7.6, None),
        ({"fp32": 1e-6, "bf16": 4e-6}, 1000, None),  # it saves 15.4 ms: nothing is timed
        ({"fp32": 4e-6, "bf16": 1e-6}, 0.0, "its bf16 matmuls are not faster"),
    ],
    ids=["far more", "more", "less", "a large model", "slow matmuls"],
)
def test_casts_are_weighed_against_what_matmuls_save(
    monkeypatch: pytest.MonkeyPatch, rates: dict[str, float], added_ms: float, why: str | None
) -> None:
    monkeypatch.setattr(casts, "casts_ms", lambda model, dtype: added_ms)
    assert slower_than_fp32(nn.Linear(4, 4), Precision("bf16"), FLOP, rates) == why


@pytest.mark.parametrize("mode", ["fp32", "bf16_pure"])
def test_without_autocast_there_is_nothing_to_say(mode: str) -> None:
    assert slower_than_fp32(nn.Linear(4, 4), Precision(mode), FLOP, {"fp32": 4e-6, "bf16": 1e-6}) is None


@pytest.mark.parametrize("added_ms", [1000.0, 0.0])
def test_the_start_has_a_note_where_casts_cost_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, added_ms: float
) -> None:
    seen: list[float] = []

    def slower(model: nn.Module, precision: Precision, flop: float, rates: dict[str, float]) -> str | None:
        seen.append(flop)
        return slower_than_fp32(model, precision, flop, FAST)

    monkeypatch.setattr(casts, "casts_ms", lambda model, dtype: added_ms)
    monkeypatch.setattr(record, "slower_than_fp32", slower)
    trainer = trainer_of(*SMALL, "precision=bf16")
    manifest, _ = record.observed(trainer)
    assert seen == [FLOP]
    printed = io.StringIO()
    show_start(Terminal(Console(file=printed)), trainer, manifest, tmp_path, [])
    note = "note: bf16 is about as slow as fp32 here, or slower: in a microbatch bf16 matmuls save 7.68 ms, and "
    note += "casts add 1000 ms; python scripts/advise.py recipe=bignet … measures it"
    assert (note in printed.getvalue().splitlines()) == (added_ms == 1000)
    assert ("note: " in printed.getvalue()) == (added_ms == 1000)


def test_each_shape_is_timed_once_and_counts_as_often_as_the_model_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 9, 9, 19, 0, 1, 1, 4, 0, 9, 9, 19, 0, 2, 2, 3])
    monkeypatch.setattr(casts.time, "thread_time", lambda: 1e-3 * next(clock))
    seen: list[tuple[torch.Size, torch.dtype]] = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = nn.functional.linear(x, weight)
        seen.append((weight.shape, result.dtype))
        return result

    monkeypatch.setattr(casts, "F", SimpleNamespace(linear=linear))
    model = nn.Sequential(*(nn.Linear(4, 6) for _ in range(3)), nn.LayerNorm(6), nn.Conv2d(3, 5, 2))
    assert casts_ms(model, torch.bfloat16) == pytest.approx(3 * (3 - 1))  # and nothing where it is not slower
    assert [shape for shape, _ in seen] == [(6, 4)] * 4 + [(5, 12)] * 4
    assert [dtype for _, dtype in seen] == [torch.float32, torch.bfloat16] * 4
