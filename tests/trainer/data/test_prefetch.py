"""Batches that a thread prepares: where it does, and that nothing but the waiting changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import CPU, compose, same_bits
from tests.trainer.data.test_data import Echo, stream
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.data.evaluation import Evaluation
from trainer.data.loader import STEPS_AHEAD, Batches, Batching, DataOrder, Loader, OnDeviceLoader, PinnedLoader
from trainer.debug import Overfit
from trainer.hardware import Hardware
from trainer.parallel.world import World
from trainer.run.run import Run
from trainer.run.start import train
from trainer.trainer import StepRecord

GPU = replace(CPU, device=torch.device("cuda", 3))


class AheadOnCpu(PinnedLoader):
    """Uses the thread as for a GPU."""

    def batches(
        self, dataset: Dataset, samples: Iterable[list[SampleId]], hardware: Hardware, in_a_step: int = 1
    ) -> Batches:
        batches = super().batches(dataset, samples, hardware, in_a_step)
        assert isinstance(batches, Batches)
        return replace(batches, ahead=STEPS_AHEAD * in_a_step)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches ahead")]


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


@pytest.mark.parametrize(
    ("augment", "ahead"), [("none", 2), ("light", 2), ("imagenet", 2), ("randaugment", 0), ("trivialaugment", 0)]
)
def test_no_thread_uses_the_generator_of_the_training(augment: str, ahead: int) -> None:
    datasets = compose("recipe=resnet", "data=digits", f"augment={augment}").resolve(CPU).config.open_datasets()
    for dataset in (datasets.train, Overfit().datasets(datasets, 4).train):
        batches = PinnedLoader(0).batches(dataset, [], GPU)
        assert isinstance(batches, Batches)
        assert (batches.pins, batches.ahead) == (True, ahead)


@pytest.mark.parametrize("batching", [Batching(4, 4), Batching(8, 2), Batching(6, 1)])
@pytest.mark.parametrize("first", [0, 5])
def test_the_thread_changes_no_batch_and_no_generator(batching: Batching, first: int) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loaded, plain = (stream(loader, batching, first, 20) for loader in (AheadOnCpu(0), Loader(0)))
    assert len(loaded) == 20
    assert same_bits(loaded, plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert threads() == []


def test_a_thread_has_one_core_and_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPU 0, the default of a new thread, pinning would take memory from rank 0."""
    devices: list[torch.device] = []
    cores: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
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


def test_evaluation_uses_it_each_time() -> None:
    def sums(loader: Loader) -> list[tuple[dict[str, float], int]]:
        evaluation = Evaluation(Echo(), None, 4, loader, CPU, World())

        def forward(batch: Batch) -> dict[str, Tensor]:
            if 0 in batch["index"]:  # the first batch
                assert len(threads()) == isinstance(loader, AheadOnCpu)
            return {"loss": batch["index"].double().mul(batch["index"][0]).sum()}

        return [evaluation.sums(forward, len) for _ in range(2)]

    assert sums(AheadOnCpu(0)) == sums(Loader(0))
    assert threads() == []


def test_two_threads_may_ask_for_samples() -> None:
    """The thread asks for those of training, and a forward pass that inspects the model for the first ones."""
    order, expected = DataOrder(7, 0), DataOrder(7, 0).samples(7, 7)
    others = 0

    def switch(frame: FrameType, event: str, argument: object) -> Any:
        """Before each line of the method, let another thread ask for another epoch."""
        nonlocal others
        if frame.f_code is not DataOrder.samples.__code__:
            return None
        if event == "line":
            others += 1
            other = threading.Thread(target=order.samples, args=(0, 2))
            other.start()
            other.join()
        return switch

    before = sys.gettrace()
    sys.settrace(switch)
    try:
        found = order.samples(7, 7)
    finally:
        sys.settrace(before)
    assert found == expected
    assert others > 5


BIGNET = (
    *("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "micro_batch_size=2", "steps=8"),
    *("profiler=none", "tracking=local", "device=cpu", "eval_every=8", "log_every=4"),
)


class Failing(Run):
    def step(self, microbatches: list[Batch]) -> StepRecord:
        if self.trainer.step == 3:
            raise ZeroDivisionError("a bug")
        return super().step(microbatches)


def test_a_run_that_fails_ends_the_thread(tmp_path: Path) -> None:
    config = replace(compose(*BIGNET, f"output_dir={tmp_path}", "checkpoint=none"), loader=AheadOnCpu(0))
    with pytest.raises(ZeroDivisionError) as held:
        train(config, run_class=Failing)
    assert threads() == []  # although the error's traceback holds every frame
    assert held.value is not None
