"""The time of a training loop's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from mantissa.tensors import synchronise
from trainer.data.contract import Batch
from trainer.trainer import Trainer

Block = Callable[[int], float]
"""Takes a number of optimizer steps and returns the seconds they took."""
Clock = Callable[[], float]


def stopwatch(loop: Callable[[int], object], device: torch.device, clock: Clock = time.perf_counter) -> Block:
    """Return the loop as a block that returns its seconds, the device's work included."""

    def block(steps: int) -> float:
        synchronise(device)
        began = clock()
        loop(steps)
        synchronise(device)
        return clock() - began

    return block


def steps_of(trainer: Trainer) -> Callable[[int], None]:
    """Return the function that takes a number of optimizer steps."""
    return over(trainer.batches(), trainer.train_step)


def over(batches: Iterator[list[Batch]], take: Callable[[list[Batch]], object]) -> Callable[[int], None]:
    """Return the function that takes the batches of a number of steps, one after the other."""

    def run(steps: int) -> None:
        for _ in range(steps):
            take(next(batches))

    return run
