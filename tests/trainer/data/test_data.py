from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.helpers import CPU, Arrays, context
from trainer.data.contract import Batch, SampleId, fingerprint
from trainer.data.evaluation import Evaluation, evaluation_samples
from trainer.data.loader import Batching, DataOrder, Loader, OnDeviceLoader, PinnedLoader
from trainer.data.user_dataset import UserDataset
from trainer.errors import RunError, UserError
from trainer.parallel.world import World
from trainer.recipe import DataSource

LENGTH = 23


class Echo:
    """Returns the requested samples, and random numbers that depend only on their seeds."""

    def __len__(self) -> int:
        return LENGTH

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        noise = [0 if seed is None else np.random.default_rng(seed).integers(2**40) for _, seed in samples]
        return {
            "index": torch.tensor([index for index, _ in samples]),
            "seed": torch.tensor([-1 if seed is None else seed for _, seed in samples]),
            "noise": torch.tensor(noise),
        }


class Broken(Echo):
    def batch(self, samples: Sequence[SampleId]) -> Batch:
        if any(index == 7 for index, _ in samples):
            raise UserError("data.path=photos: photos/cat.jpg cannot be read; remove it")
        return super().batch(samples)


def stream(loader: Loader, batching: Batching, first: int = 0, count: int = 9, seed: int = 0) -> list[list[Batch]]:
    return list(loader.steps(Echo(), DataOrder(LENGTH, seed), batching, first, count, CPU))


def samples(order: DataOrder, positions: Iterable[int]) -> list[SampleId]:
    """Return the samples at these positions, each looked up by itself."""
    return [order.samples(position, 1)[0] for position in positions]


def flat(steps: list[list[Batch]]) -> dict[str, list[int]]:
    batches = list(chain.from_iterable(steps))
    return {name: torch.cat([batch[name] for batch in batches]).tolist() for name in batches[0]}


@pytest.mark.parametrize("length", [1, 2, 23, 1000])
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_every_epoch_is_a_permutation_of_its_own(length: int, seed: int) -> None:
    found = [each.index for each in samples(DataOrder(length, seed), range(3 * length))]
    epochs = [found[start : start + length] for start in range(0, 3 * length, length)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length > 2:
        assert len({tuple(epoch) for epoch in [*epochs, range(length)]}) == 4


def test_each_sample_of_each_epoch_of_each_seed_has_randomness_of_its_own() -> None:
    seeds = [each.seed for seed in range(5) for each in samples(DataOrder(50, seed), range(200))]
    assert len(set(seeds)) == len(seeds)
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    bits = np.unpackbits(np.array(seeds, dtype=">u8").view(np.uint8)).reshape(len(seeds), 64)[:, 1:]
    assert (abs(bits.mean(0) - 0.5) < 0.1).all()  # each bit is set half of the time


def test_a_samples_seed_depends_on_the_sample_and_not_on_its_place() -> None:
    """So that a longer data set, in another order, would not change how these samples are augmented."""
    short, long = (dict(samples(DataOrder(length, 0), range(length))) for length in (LENGTH, LENGTH + 5))
    assert short.items() <= long.items()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("loader", [Loader(0), PinnedLoader(0)], ids=["plain", "pinned"])
def test_microbatches_change_no_sample(micro_batch_size: int, loader: Loader) -> None:
    steps = stream(loader, Batching(8, micro_batch_size))
    assert [len(step) for step in steps] == [8 // micro_batch_size] * 9
    assert flat(steps) == flat(stream(Loader(0), Batching(8, 8)))


def test_workers_change_no_sample() -> None:
    """Forty steps, so that each worker has many."""
    assert flat(stream(PinnedLoader(2), Batching(4, 2), count=40)) == flat(stream(Loader(0), Batching(4, 2), count=40))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_dataset_is_raised_unchanged_and_workers_end(workers: int) -> None:
    """Not when Python next looks for cycles, where each would be waited for in vain."""
    steps = PinnedLoader(workers).steps(Broken(), DataOrder(LENGTH, 0), Batching(4, 2), 0, 20, CPU)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(UserError, match=r"^data.path=photos: photos/cat.jpg cannot be read; remove it$"):
            list(steps)
        del steps
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_a_loading_process_that_the_system_ends_is_one_sentence() -> None:
    steps = PinnedLoader(2).steps(Echo(), DataOrder(LENGTH, 0), Batching(4, 2), 0, 1000, CPU)
    next(steps)
    for process in multiprocessing.active_children():
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"where memory is short; set loader\.workers=1"):
        list(steps)


class Ends(Echo):
    def batch(self, samples: Sequence[SampleId]) -> Batch:
        os._exit(3)


def test_memory_is_not_named_where_a_loading_process_ends_by_itself() -> None:
    with pytest.raises(RunError, match="a loading process ended with exit code 3") as ended:
        list(Loader(1).steps(Ends(), DataOrder(LENGTH, 0), Batching(4, 2), 0, 1, CPU))
    assert "memory" not in str(ended.value)


@pytest.mark.parametrize(
    ("loader", "blocks", "words"),
    [
        (Loader(2), 7, "7.0 KiB, too little for 2 batches of 2.0 KiB from each of 2 loading processes"),
        (Loader(2), 8, ""),
        (PinnedLoader(2), 15, "15.0 KiB, too little for 4 batches"),
        (Loader(1), 3, "3.0 KiB, too little for 2 batches of 2.0 KiB from each of 1 loading process "),
    ],
    ids=["full", "fits", "more are prefetched", "for one too many"],
)
def test_batches_that_shared_memory_does_not_hold_are_refused_with_a_number_of_workers_that_fits(
    loader: Loader, blocks: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(Echo):
        def batch(self, samples: Sequence[SampleId]) -> Batch:
            return {"image": torch.zeros(len(samples), 256)}

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=blocks, f_frsize=1024))
    batches: Any = loader.batches(Large(), [], CPU)
    found = batches.dataset.__getitems__([SampleId(0, None), SampleId(1, None)])
    if not words:
        assert found["image"].is_shared()
        return
    assert isinstance(found, UserError)
    assert words in found.problem
    assert found.remedies == (f"loader.workers={int(loader.workers) - 1}",)


def test_what_shared_memory_has_no_room_for_ends_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends batches would print its error, and the run would wait for ever."""

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    batches: Any = Loader(1).batches(Echo(), [], CPU)
    found = batches.dataset.__getitems__([SampleId(0, None)])
    assert isinstance(found, UserError)
    assert found.remedies == ("loader.workers=0",)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_change_torchs_generator(workers: int) -> None:
    """Dropout draws from it: the number of workers, or of evaluations, must not shift what it draws."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    numpy_before = np.random.get_state()[1].copy()
    stream(PinnedLoader(workers), Batching(4, 2), count=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_on_device_loader_repeats_the_first_step() -> None:
    steps = stream(OnDeviceLoader(0), Batching(6, 2), first=5, count=4)
    first = flat(stream(Loader(0), Batching(6, 2), 0, 1))
    assert len(steps) == 4
    assert all(flat([step]) == first for step in steps)


@pytest.mark.parametrize(
    ("cores", "ranks", "on_cpu", "on_gpu"),
    [
        *((1, 1, 1, 1), (2, 1, 2, 2), (4, 1, 4, 4), (16, 1, 14, 14), (64, 1, 16, 32)),
        *((16, 2, 6, 6), (64, 8, 6, 6), (192, 8, 16, 22), (4, 8, 1, 1)),
    ],
)
def test_auto_workers_leave_cores_to_the_thread_that_launches_kernels_and_to_the_other_ranks(
    cores: int, ranks: int, on_cpu: int, on_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that are arrays need none: tests/trainer/config/test_settle.py."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        here = replace(CPU, cpu_cores=cores, device=torch.device(device))
        opened = context(DataSource(), here, datasets=SimpleNamespace(decodes=True))
        assert Loader().resolve(opened)[0].workers == expected


def test_evaluation_samples_are_spread_evenly_in_order_and_never_augmented() -> None:
    everything = evaluation_samples(10, None, 4)
    assert [[sample.index for sample in batch] for batch in everything] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    some = list(chain.from_iterable(evaluation_samples(1000, 11, 4)))
    assert [sample.index for sample in some] == [0, 99, 199, 299, 399, 499, 599, 699, 799, 899, 999]
    assert all(sample.seed is None for sample in some)
    assert len(list(chain.from_iterable(evaluation_samples(10, 50, 4)))) == 10


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_evaluate_every_sample_once_in_as_many_batches_each(ranks: int) -> None:
    """Of three batches the last is a short one; a rank without one repeats the first, which counts nothing."""
    totals, forwards = torch.zeros(2), []
    for rank in range(ranks):
        world, seen = World(), []
        world.rank, world.size = rank, ranks

        def forward(batch: Batch, counts: bool, seen: list[int] = seen) -> dict[str, torch.Tensor]:
            seen.append(len(batch["index"]))
            return {"loss": batch["index"].sum().double()}

        evaluation = Evaluation(Echo(), None, 8, Loader(workers=0), CPU, world)
        watch = Mock()
        found = evaluation.sums(forward, lambda batch: len(batch["index"]), watch)
        assert found is not None
        sums, targets = found
        totals += torch.tensor([sums["loss"], targets])
        forwards.append(len(seen))
        done = [call.args for call in watch.call_args_list]  # the same on all ranks, which may stop there together
        assert done == [(number, len(seen)) for number in range(1, len(seen) + 1)]
    assert totals.tolist() == [LENGTH * (LENGTH - 1) / 2, LENGTH]
    assert len({*forwards}) == 1


def test_an_evaluation_that_is_told_to_stop_has_no_result() -> None:
    """It is asked between two batches, of which there are three, and after the last one no longer."""

    def forward(batch: Batch, counts: bool) -> dict[str, torch.Tensor]:
        return {"loss": batch["index"].sum().double()}

    for answers, done in (([False, True], 2), ([False, False], 3)):
        progress, should_stop = Mock(), Mock(side_effect=answers)
        evaluation = Evaluation(Echo(), None, 8, Loader(workers=0), CPU, World())
        found = evaluation.sums(forward, lambda batch: len(batch["index"]), progress, should_stop)
        assert (progress.call_count, found is None) == (done, answers[-1])
        assert should_stop.call_count == 2


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "ranks", "micro", "batch"),
    [
        (10, 4, 1, [2, 5], [8, 12]),
        (4, 8, 1, [2, 4], [8]),
        (480, 100, 1, [80, 96], [400, 500]),
        (6, 2, 2, [1, 3], [4, 8]),
        (3, 2, 2, [], [4]),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(
    batch_size: int, micro_batch_size: int, ranks: int, micro: list[int], batch: list[int]
) -> None:
    with pytest.raises(UserError) as refused:
        Batching(batch_size, micro_batch_size, ranks)
    expected = [*(f"micro_batch_size={size}" for size in micro), *(f"batch_size={size}" for size in batch)]
    assert [*refused.value.remedies] == expected
    for remedy in refused.value.remedies:
        key, _, size = remedy.partition("=")
        Batching(**{"batch_size": batch_size, "micro_batch_size": micro_batch_size} | {key: int(size)}, ranks=ranks)


class Drawn:
    """Samples that are drawn from the global generators."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), np.random.rand(), random.random()


def test_opening_a_programs_data_leaves_the_global_generators_as_they_were() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    UserDataset(Drawn(), None)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_the_fingerprint_differs_for_other_data() -> None:
    def of(x: torch.Tensor) -> str:
        return fingerprint(Arrays(x=x), Arrays(x=x[:3]))

    x = torch.arange(12.0)
    assert of(x) == of(x.clone())
    changed = x.clone()
    changed[-1] = 0
    assert len({of(x), of(changed), of(x[:-1]), of(x.double())}) == 4
