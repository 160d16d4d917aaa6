"""Loops that take turns, so that what is compared is measured under the same load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from trainer.trainer import Trainer

Times = dict[str, list[float]]
"""Seconds of each loop by its name, one number per repeat."""
Block = Callable[[int], float]
"""Takes a number of optimizer steps and returns the seconds they took."""
Clock = Callable[[], float]
One = TypeVar("One")
Round = TypeVar("Round")


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


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
    batches = trainer.batches()

    def run(steps: int) -> None:
        for _ in range(steps):
            trainer.train_step(next(batches))

    return run


def in_turns(them: Sequence[One], rounds: Iterable[Round]) -> Iterator[tuple[One, Round]]:
    """Yield all of them in each round, in reverse order every second time, so that none is always the later one."""
    for number, each_round in enumerate(rounds):
        for one in them if number % 2 == 0 else reversed(them):
            yield one, each_round


def interleave(
    blocks: Mapping[str, Callable[[], float]],
    repeats: int,
    warm_up: int = 1,
    before: Callable[[str, int], object] = lambda name, repeat: None,
) -> Times:
    """Call the blocks in turn, in reverse order every second repeat, and return their seconds.

    ``warm_up`` further repeats come first and are not kept. ``before`` is called before each block, with its name and
    the number of the repeat (from 0, warm-up included).
    """
    times: Times = {name: [] for name in blocks}
    for name, repeat in in_turns(list(blocks), range(warm_up + repeats)):
        before(name, repeat)
        times[name].append(blocks[name]())
    return {name: seconds[warm_up:] for name, seconds in times.items()}


def ratios(times: Times, above: str, below: str) -> list[float]:
    """Return one ratio per repeat, of two loops that took turns within it."""
    return [a / b for a, b in zip(times[above], times[below], strict=True)]
