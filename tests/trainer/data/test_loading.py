"""The thread that works ahead: where there is one, its order, errors and end. Events decide, never the time."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers import CPU, compose, same_bits
from tests.trainer.data.test_data import Echo, stream
from trainer.config.settle import plan_of, settle
from trainer.data.contract import Batch, SampleId
from trainer.data.loader import STEPS_AHEAD, Batches, Batching, Loader, OnDeviceLoader, PinnedLoader, prefetched
from trainer.hardware import Hardware

GPU = replace(CPU, device=torch.device("cuda", 3))
Ahead = Generator[int, None, None]


def nothing() -> None:
    pass


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches ahead")]


class Source:
    """Counts up; notes which numbers were begun."""

    def __init__(self, error_at: int | None = None) -> None:
        self.error_at = error_at
        self.begun: list[int] = []
        self._changed = threading.Condition()

    def items(self) -> Iterator[int]:
        for number in range(10**9):
            with self._changed:
                self.begun.append(number)
                self._changed.notify_all()
            if number == self.error_at:
                raise ZeroDivisionError("a bug")
            yield number

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self.begun, 60)


@pytest.mark.parametrize("count", [1, 3])
def test_it_works_on_the_next_items_while_one_is_used_and_not_on_more(count: int) -> None:
    source = Source()
    ahead = prefetched(source.items(), count, nothing)
    for number in range(5):
        assert next(ahead) == number
        source.wait_for(number + count)  # although nobody has asked for it
    ahead.close()
    assert source.begun == list(range(5 + count))


def test_errors_come_in_their_place_with_their_traceback() -> None:
    ahead = prefetched(Source(error_at=3).items(), 2, nothing)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match=r"^a bug$") as raised:
        next(ahead)
    assert "items" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert list(ahead) == []
    with pytest.raises(ZeroDivisionError):
        next(prefetched(iter([1]), 2, lambda: 1 // 0))  # of the preparation
    assert threads() == []


ENDS: dict[str, Callable[[list[Ahead]], object]] = {
    "closed": lambda held: held[0].close(),
    "forgotten": lambda held: held.clear(),
    "a cycle": lambda held: held.append(held),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_thread_ends_with_it(end: Callable[[list[Ahead]], None]) -> None:
    held = [prefetched(Source().items(), 2, nothing)]
    assert [next(held[0]) for _ in range(3)] == [0, 1, 2]
    (thread,) = threads()
    end(held)
    del held
    gc.collect()
    assert not thread.is_alive()


class AheadOnCpu(PinnedLoader):
    """Uses the thread as for a GPU."""

    def batches(self, dataset: Any, samples: Any, hardware: Hardware, in_a_step: int = 1) -> Batches:
        return replace(super().batches(dataset, samples, hardware, in_a_step), ahead=STEPS_AHEAD * in_a_step)


@pytest.mark.parametrize(
    ("loader", "hardware", "ahead"),
    [
        (PinnedLoader(0), GPU, 6),
        (PinnedLoader(0), CPU, 0),  # it would take the cores that compute
        (PinnedLoader(1), GPU, 0),  # workers and torch's own thread are ahead already
        (Loader(0), GPU, 0),
        (OnDeviceLoader(0), GPU, 0),
    ],
)
def test_a_thread_works_two_steps_ahead_for_a_gpu_without_workers(
    loader: Loader, hardware: Hardware, ahead: int
) -> None:
    batches = loader.batches(Echo(), [], hardware, in_a_step=3)
    assert (batches.ahead if isinstance(batches, Batches) else 0) == ahead


def test_no_thread_uses_the_generator_of_the_training() -> None:
    class Drawing(Echo):
        uses_global_generator = True

    batches = PinnedLoader(0).batches(Drawing(), [], GPU)
    assert isinstance(batches, Batches)
    assert (batches.pins, batches.ahead) == (True, 0)


@pytest.mark.parametrize("pins", [False, True])
def test_images_go_straight_into_page_locked_memory(pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered into new memory and copied from there, 256 images of 224² took 53 ms, ten times as long."""
    data = settle(plan_of(compose("recipe=resnet", "data=synthetic", "data.samples=16"), CPU)).datasets.train
    samples = [[SampleId(row, None) for row in rows] for rows in ((3, 1), (1, 2))]
    expected = [data.batch(each)["image"] for each in samples]
    empty, asked = torch.empty, []

    def noted(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.accelerator, "set_device_index", id)
    found = [batch["image"] for batch in (PinnedLoader if pins else Loader)(0).batches(data, samples, GPU)]
    assert asked == [pins, pins]
    assert all(map(torch.equal, found, expected))
    assert found[0].data_ptr() != found[1].data_ptr()  # the device may still read the first


@pytest.mark.parametrize("batching", [Batching(4, 4), Batching(6, 1)])
def test_the_thread_changes_no_batch_and_no_generator(batching: Batching) -> None:
    before = torch.get_rng_state()
    loaded, plain = (stream(loader, batching, 5, 20) for loader in (AheadOnCpu(0), Loader(0)))
    assert len(loaded) == 20
    assert same_bits(loaded, plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert threads() == []


def test_a_thread_has_one_core_and_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPU 0, the default of a new thread, pinning would take memory from rank 0."""
    devices: list[torch.device] = []
    cores: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    class Noting(Echo):
        def batch(self, samples: Any) -> Batch:
            cores.append(torch.get_num_threads())
            return super().batch(samples)

    try:
        assert len(list(Batches(Noting(), [[SampleId(1, None)]], GPU.device, pins=False, ahead=2))) == 1
        assert (devices, cores, torch.get_num_threads()) == ([GPU.device], [1], 2)
    finally:
        torch.set_num_threads(before)
