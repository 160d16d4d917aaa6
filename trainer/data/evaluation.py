"""Evaluation: which samples, on which rank, and sums over them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trainer.data.contract import Batch, Dataset, SampleId
from trainer.data.loader import Loader, to_device
from trainer.hardware import Hardware, kind_of
from trainer.parallel.world import World

Progress = Callable[[int, int], None]
"""Takes how many batches are done and how many there are, after each of them, on all ranks."""


class Evaluation:
    """A dataset to evaluate on, divided among the ranks. Its loading processes are kept for the next time.

    Args:
        dataset: what is evaluated on.
        limit: samples on all ranks, spread evenly over the dataset; None: all.
        micro_batch_size: samples of a forward pass.
        loader: opens the batches.
        hardware: of this process.
        world: the processes that evaluate together.
    """

    def __init__(
        self,
        dataset: Dataset,
        limit: int | None,
        micro_batch_size: int,
        loader: Loader,
        hardware: Hardware,
        world: World,
    ) -> None:
        samples = evaluation_samples(len(dataset), limit, micro_batch_size)
        mine = samples[world.rank :: world.size]
        # As many forward passes on every rank: under FSDP the others gather their weights from this one.
        fillers = samples[:1] * (math.ceil(len(samples) / world.size) - len(mine))
        self._counting, self._count = len(mine), len(mine + fillers)
        self._batches = loader.batches(dataset, mine + fillers, hardware)
        self._device, self._world = hardware.device, world

    def sums(
        self,
        forward: Callable[[Batch, bool], dict[str, Tensor]],
        count_targets: Callable[[Batch], int],
        progress: Progress,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> tuple[dict[str, float], int] | None:
        """Return the sums over the samples of all ranks, and their number of targets; None: it was told to stop.

        Args:
            forward: takes a batch on the device, and whether it counts, and returns scalars by name.
            count_targets: takes a batch on the host.
            progress: see ``Progress``.
            should_stop: asked between two batches, on all ranks, which must agree.
        """
        wide = kind_of(self._device).wide  # sums of thousands of batches
        targets = 0
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(self._batches):
            counts = number < self._counting
            values = forward(to_device(batch, self._device), counts)
            if counts:
                targets += count_targets(batch)
            for name, value in values.items():
                total = sums.setdefault(name, torch.zeros((), dtype=wide, device=self._device))
                if counts:
                    total += value
            progress(number + 1, self._count)
            if number + 1 < self._count and should_stop():
                return None
        # One copy to the host, at the end.
        totals = self._world.all_reduce_sum(torch.stack([sums[name] for name in sorted(sums)])).tolist()
        by_name = dict(zip(sorted(sums), totals, strict=True))
        (targets,) = self._world.all_reduce_sums(targets)
        return {name: by_name[name] for name in sums}, targets


def evaluation_samples(length: int, limit: int | None, size: int) -> list[list[SampleId]]:
    """Return the evaluation batches: ``limit`` samples (None: all) spread evenly, in order, never augmented."""
    chosen = np.arange(length) if limit is None or limit >= length else np.linspace(0, length - 1, limit).astype(int)
    return [[SampleId(int(i), None) for i in chosen[start : start + size]] for start in range(0, len(chosen), size)]
