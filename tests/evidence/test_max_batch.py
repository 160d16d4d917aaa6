"""The search for the largest microbatch, and what its options take; a real one is in test_memory_commands.py."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import product

import pytest
import torch

from evidence.memory import max_batch, trial
from evidence.memory.max_batch import LargestBatch, largest_micro_batch, parse_memory_budget, search
from trainer.errors import UserError, is_out_of_memory
from trainer.hardware import Hardware

GPU = Hardware(torch.device("cuda", 0), "a GPU", 2**33, 2, (9, 0))


def counted(largest: int) -> tuple[list[int], Callable[[int], bool]]:
    tried: list[int] = []
    return tried, lambda size: (tried.append(size), size <= largest)[1]


@pytest.mark.parametrize("largest", [0, 1, 2, 31, 32, 33, 100, 5000, 2**20])
def test_search_finds_the_last_that_fits_and_never_tries_more_than_there_are(largest: int) -> None:
    for first, guess, most in product([1, 32, 455], [1, 5, 40, 4000, 2**20], [1, 2, 33, 455, 2**20]):
        tried, fits = counted(largest)
        found = search(fits, min(first, most), guess, most)
        there = min(largest, most)
        assert 0 <= there - found <= there // 32, (first, guess, most)
        assert found == 0 or found in tried
        assert tried[0] == min(first, most)
        assert max(tried) <= most
        assert len(tried) == len(set(tried)) <= 30


def test_a_good_guess_takes_few_trials() -> None:
    tried, fits = counted(30)
    assert search(fits, 16, 32, 2**20) == 30
    assert len(tried) <= 6


def test_the_answer_keeps_the_batch() -> None:
    assert LargestBatch(23, 64, 1).overrides == "micro_batch_size=16 batch_size=64"
    assert LargestBatch(100, 64, 1).overrides == "micro_batch_size=64 batch_size=64"
    assert LargestBatch(6, 7, 1).overrides == "micro_batch_size=1 batch_size=7"
    assert LargestBatch(10, 20, multiple=2).overrides == "micro_batch_size=10 batch_size=20"
    assert LargestBatch(16, 30, multiple=2).overrides == "micro_batch_size=10 batch_size=30"


BIGNET = ["recipe=bignet", "device=cpu", "recipe.width=64"]
MIXED = ["recipe=resnet", "device=cpu", "data=digits", "augment=none", "augment.mixup=0.2"]


@pytest.mark.parametrize(
    ("job", "guess", "most", "found", "tried"),
    [
        # A step of more microbatches than one accumulates in the trials, too.
        ([*BIGNET, "batch_size=8"], 7, 9, "micro_batch_size=8 batch_size=8", [(8, 8), (9, 9)]),
        # No trial has more samples than the data.
        ([*BIGNET, "batch_size=64", "data.samples=455"], 9999, 455, "micro_batch_size=64 batch_size=64", [(455, 455)]),
        # The run's own batch comes first.
        ([*BIGNET, "batch_size=8"], 99, 5, "micro_batch_size=4 batch_size=8", [(8, 8), (5, 10)]),
        # Images that are mixed in pairs are tried in even numbers.
        ([*MIXED, "batch_size=64"], 7, 13, "micro_batch_size=8 batch_size=64", [(12, 24)]),
    ],
)
def test_trials_are_steps_as_training_takes_them(
    job: list[str],
    guess: int,
    most: int,
    found: str,
    tried: list[tuple[int, int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []

    def fits(overrides: list[str], limit_bytes: int) -> bool:
        assert limit_bytes == 95 * 2**20
        options = dict(override.split("=") for override in overrides)
        micro, batch = int(options["micro_batch_size"]), int(options["batch_size"])
        seen.append((micro, batch))
        return micro <= most

    monkeypatch.setattr(trial, "fits", fits)
    monkeypatch.setattr(max_batch, "_first_guess", lambda sized, limit: guess)
    largest = largest_micro_batch(job, 100 * 2**20)
    said = capsys.readouterr().out.splitlines()
    assert [("beyond batch_size=" in line) for line in said] == [micro > largest.batch_size for micro, _ in seen]
    multiple = 2 if job[0] == "recipe=resnet" else 1
    assert (largest.micro_batch_size, largest.overrides) == (most - most % multiple, found)
    assert set(tried) <= set(seen)
    assert seen[0] == (largest.batch_size, largest.batch_size)
    assert not [micro for micro, _ in seen if micro % multiple or micro > 455]


def test_a_memory_budget_is_an_amount_of_memory() -> None:
    budgets = {"8GiB": 2**33, "1.5MiB": 3 * 2**19, "500MB": 5 * 10**8, "device": 2**33}
    assert {text: parse_memory_budget(text, GPU) for text in budgets} == budgets
    for text, remedy in {"8": "8GiB", "9": "device", "0": "device", "much": "device"}.items():
        with pytest.raises(UserError) as refused:
            parse_memory_budget(text, GPU)
        assert refused.value.remedies == (f"memory_budget={remedy}",)


def test_out_of_memory_is_recognised_on_every_device() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    for message in (
        "could not create a primitive",
        "GET was unable to find an engine to execute this computation",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`",
        "HIP error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.",
        "MPS backend out of memory (MPS allocated: 9.07 GB, other allocations: 1.2 MB, max allowed: 9.07 GB).",
    ):
        assert is_out_of_memory(RuntimeError(message)), message
    for other in (
        RuntimeError("could not create a primitive descriptor for the matmul primitive"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448."),
        ValueError("could not create a primitive"),
        OSError(errno.ENOENT, "No such file"),
    ):
        assert not is_out_of_memory(other), other
