"""What is advised when memory ran out; a run that really does is in test_memory_commands.py."""

from __future__ import annotations

import pytest
import torch

from trainer.profiling.ledger import MIB
from trainer.run.memory import shortage
from trainer.run.memory.shortage import out_of_memory

JOB = ["recipe=bignet", "recipe.width=64", "recipe.layers=8", "data.samples=64", "device=cpu", "checkpoint=none"]
ERROR = RuntimeError("alloc_cpu.cpp: can't allocate memory: you tried to allocate 10485760 bytes. Error code 12")


def advice(monkeypatch: pytest.MonkeyPatch, free_mib: float, *overrides: str) -> tuple[str, list[str]]:
    monkeypatch.setattr(shortage, "available_bytes", lambda device: int(free_mib * MIB))
    error = out_of_memory(ERROR, [*JOB, *overrides])
    assert error.exit_code == 4
    text = str(error)
    return text, [line.strip() for line in text.splitlines() if line.startswith("  ")]


def test_the_largest_microbatch_that_fits_keeps_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ["batch_size=6000", "micro_batch_size=6000"]
    text, fitting = advice(monkeypatch, 10, *job)
    assert text.startswith("out of memory (tried to allocate 10.0 MiB)\n")
    size = int(fitting[0].removeprefix("micro_batch_size="))
    assert 6000 % size == 0
    peaks = next(line for line in text.splitlines() if line.startswith("peak")).split()
    assert float(peaks[2]) < 0.9 * 10 < float(peaks[1])
    assert size > 1000  # and not the smallest


def test_checkpointing_and_bf16_are_offered_where_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ["batch_size=4000", "micro_batch_size=4000", "recipe.layers=20"]
    text, fitting = advice(monkeypatch, 10_000, *job)
    assert fitting[1:] == ["activation_checkpointing=blocks", "precision=bf16"]
    text, fitting = advice(monkeypatch, 10_000, *job, "activation_checkpointing=blocks", "precision=fp16")
    assert [line.split("=")[0] for line in fitting] == ["micro_batch_size"]
    assert "precision=bf16" not in text


def test_what_cannot_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    text, fitting = advice(monkeypatch, 0.01, "batch_size=512")
    assert not fitting
    assert "train a smaller model" in text
    assert "micro_batch_size=1 activation_checkpointing=blocks precision=bf16" in text


@pytest.mark.parametrize("override", ["parallel=ddp", "recipe=unknown"])
def test_without_a_forecast_there_still_is_advice(override: str) -> None:
    error = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nmore"), [*JOB, override])
    assert str(error).startswith("out of memory (CUDA out of memory. Tried 2 GiB.); try half the micro_batch_size")
    assert error.exit_code == 4
