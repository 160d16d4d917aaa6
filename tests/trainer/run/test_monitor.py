from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mantissa.formats import FORMATS
from trainer.errors import NonFiniteError
from trainer.parallel.world import World
from trainer.precision.scaler import AutoScaler, DynamicScaler
from trainer.run import monitor as module
from trainer.run.monitor import Monitor, NonFiniteGradients
from trainer.run.step_metrics import STEP_METRICS, StepMetric
from trainer.trainer import StepRecord

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("five_metrics")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that tests set by hand."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


Lines = list[tuple[int, dict[str, float]]]


def watch(
    log_every: int = 4, last_step: int = 100, scaler: Any = None, recovers: bool = True, world: Any = None
) -> Monitor:
    """The monitor of a trainer that takes no steps."""
    options = {"log_every": log_every, "recipe": SimpleNamespace(unit="tokens"), "scaler": scaler or DynamicScaler()}
    trainer: Any = SimpleNamespace(config=SimpleNamespace(**options), plan=SimpleNamespace(steps=last_step))
    trainer.loss_scale, trainer.device, trainer.world = SimpleNamespace(recovers=recovers), CPU, world or World()
    return Monitor(trainer)


def lines_of(monitor: Monitor, records: list[StepRecord]) -> Lines:
    """What it has to log."""
    return [(each.step, metrics) for each in records if (metrics := monitor.add(each))]


def record(step: int, loss: float = 1.0, skipped: bool = False, scale: float = 64.0, units: int = 10) -> StepRecord:
    norm = math.inf if skipped else 0.5 * step
    tensors = [torch.tensor(value) for value in (loss, norm, skipped, scale)]
    return StepRecord(step, *tensors, lr=step / 1000, units=units)


@pytest.mark.parametrize(
    ("formats", "scaled"), [("fp16", True), ("bf16 fp16", True), ("fp16 bf16", True), ("bf16 fp32", False)]
)
def test_a_run_is_scaled_where_one_of_its_formats_is(formats: str, scaled: bool) -> None:
    monitor = watch(scaler=AutoScaler(), recovers=formats.startswith("fp16"))
    phases = [SimpleNamespace(format=FORMATS[name]) for name in formats.split()]
    monitor.trainer.config.precision = SimpleNamespace(phases=phases)  # type: ignore[assignment]
    assert monitor.ever_scaled == scaled


def test_a_loss_that_is_not_finite_is_named_once_where_the_step_is_not_skipped() -> None:
    monitor = watch()
    lines_of(monitor, [record(step, loss=math.nan, skipped=True) for step in (1, 2)])
    with pytest.warns(UserWarning, match="^step 3: the loss is not finite, but the update is") as warned:
        lines_of(monitor, [record(step, loss=math.nan if step > 2 else 1.0) for step in range(2, 9)])
    assert len(warned) == 1


def test_one_line_per_window_and_for_the_first_and_the_last_step() -> None:
    lines = lines_of(watch(last_step=10), [record(step, loss=float(step)) for step in range(1, 11)])
    assert [step for step, _ in lines] == [1, 4, 8, 10]
    assert [metrics["loss"] for _, metrics in lines] == [1.0, 3.0, 6.5, 9.5]  # the mean over the window's steps
    assert [metrics["lr"] for _, metrics in lines] == [0.001, 0.004, 0.008, 0.01]
    assert [metrics["grad_norm"] for _, metrics in lines] == [0.5, 2.0, 4.0, 5.0]
    assert all(metrics["process_memory_bytes"] > 2**20 for _, metrics in lines)


def test_throughput_counts_the_window_and_leaves_out_what_was_paused(clock: SimpleNamespace) -> None:
    monitor = watch(log_every=2)
    clock.now += 50  # building
    monitor.start()
    clock.now += 30  # the first step warms up
    lines = lines_of(monitor, [record(1)])
    clock.now += 2
    lines += lines_of(monitor, [record(2)])
    clock.now += 3
    monitor.add(record(3))
    with monitor.paused():
        clock.now += 1000
    clock.now += 1
    lines += lines_of(monitor, [record(4, units=30)])
    assert [metrics["step_time_s"] for _, metrics in lines] == [30, 2, 2]
    assert [metrics["tokens_per_s"] for _, metrics in lines] == [pytest.approx(1 / 3), 5, 10]
    assert monitor.throughput() == (10, 2)  # of two steps of three


def test_the_throughput_is_that_of_most_steps(clock: SimpleNamespace) -> None:
    monitor = watch(log_every=2, last_step=7)
    monitor.start()
    for step, seconds in enumerate((30, 9, 1, 1, 1, 1, 1), 1):
        clock.now += seconds
        monitor.add(record(step))
    assert monitor.throughput() == (10, 1)


def test_nothing_is_read_between_log_steps() -> None:
    class Untouchable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: object, *rest: object) -> None:  # type: ignore[override]
            raise AssertionError(f"{function} waits for the device")

    monitor = watch(log_every=100)
    monitor.add(record(1))
    for step in range(2, 50):
        values = [torch.tensor(1.0).as_subclass(Untouchable) for _ in range(4)]
        monitor.add(StepRecord(step, *values, lr=0.1, units=1))
    with pytest.raises(AssertionError, match="waits for the device"):
        monitor.collect()


def test_too_many_skips_in_a_row_are_counted_across_windows() -> None:
    monitor = watch(log_every=1, scaler=DynamicScaler(max_consecutive_skips=2))
    for step in (1, 2):
        monitor.add(record(step, skipped=True))
    monitor.add(record(3))
    for step in (4, 5):
        monitor.add(record(step, skipped=True))
    with pytest.raises(NonFiniteError, match=r"step 6: 3 steps in a row"):
        monitor.add(record(6, skipped=True))


@pytest.mark.parametrize("floor", [1.0, 0.1])
def test_an_overflow_at_the_floor_ends_the_run(floor: float) -> None:
    """The scale is fp32, and fp32's 0.1 is above the configured floor."""
    monitor = watch(log_every=1, scaler=DynamicScaler(init=2.0, floor_scale=floor))
    monitor.add(record(1, skipped=True, scale=2 * floor))
    with pytest.raises(NonFiniteError, match=rf"step 2: .*scaler.floor_scale={floor:g}"):
        monitor.add(record(2, skipped=True, scale=floor))


def test_an_error_has_the_last_line_of_a_run_that_diverges() -> None:
    monitor = watch(log_every=10, recovers=False)
    for step in range(1, 10):
        monitor.add(record(step, loss=float("nan") if step == 4 else 1.0, skipped=step >= 4))
    with pytest.raises(NonFiniteGradients, match="step 4") as raised:
        monitor.add(record(10, skipped=True))
    assert raised.value.failure["step"] == 4
    assert raised.value.failure["rank"] == [0]
    assert raised.value.metrics["skipped_steps"] == 1


def test_a_row_of_the_table_is_all_that_a_metric_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor and of a number that the host knows, each combined in its own way; they keep no graph."""
    monkeypatch.setitem(STEP_METRICS, "peak", StepMetric(lambda step, _: step.grad_norm, max))
    monkeypatch.setitem(STEP_METRICS, "seen", StepMetric(lambda step, _: step.units, None))
    monkeypatch.setitem(STEP_METRICS, "graph", StepMetric(lambda *_: float(torch.is_grad_enabled()), sum))
    lines = lines_of(watch(), [record(step, units=step) for step in range(1, 5)])
    assert [(line["peak"], line["seen"], line["graph"]) for _, line in lines] == [(0.5, 1, 0), (2.0, 10, 0)]


def test_an_interval_goes_on_where_a_run_is_resumed_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that is newer than the checkpoint begins with the steps after it."""
    steps = [record(step, loss=float(step), skipped=step == 3) for step in range(1, 5)]
    expected = lines_of(watch(), steps)[-1][1]
    stopped = watch()
    lines_of(stopped, steps[:3])
    stopped.collect()
    monkeypatch.setitem(STEP_METRICS, "newer", StepMetric(lambda step, _: step.loss, sum))
    resumed = watch()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    ((_, line),) = lines_of(resumed, steps[3:])
    names = ("loss", "lr", "grad_norm", "loss_scale", "skipped_steps")
    assert [line[name] for name in names] == [expected[name] for name in names]
    assert (line["skipped_steps"], line["newer"]) == (1, 4)


class TwoRanks(World):
    """Both ranks are this process; the other's share of the loss is not finite."""

    size = 2

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.tensor([0.0, 1.0]) if len(tensor) == 2 else tensor * torch.nan


def test_the_ranks_whose_loss_was_not_finite_are_named() -> None:
    monitor = watch(log_every=1, recovers=False, world=TwoRanks())
    with pytest.raises(NonFiniteGradients, match=r"loss nan") as raised:
        monitor.add(record(1, skipped=True))
    assert raised.value.failure["rank"] == [1]


@pytest.mark.parametrize(("last_step", "peak"), [(4, 50), (1, 90)], ids=["several steps", "one step"])
def test_the_peak_memory_of_a_gpu_is_of_its_steps_without_the_first_and_what_is_between(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, last_step: int, peak: int
) -> None:
    allocator = SimpleNamespace(peak=0, reserved=0)

    def needs(size: int) -> None:
        allocator.peak = max(allocator.peak, size)
        allocator.reserved = max(allocator.reserved, size)

    def fails(size: int) -> None:
        needs(size)
        raise OSError("the disk is full")

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: allocator.peak)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: allocator.reserved)
    reset = lambda device: vars(allocator).update(peak=10, reserved=10)  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    needs(200)  # before the training
    monitor = watch(log_every=1)
    monitor.trainer.device = torch.device("cuda", 0)
    monitor.start()
    lines: Lines = []
    for step, size in enumerate((90, 50, 40, 30)[:last_step], 1):
        needs(size)
        clock.now += 1
        lines += lines_of(monitor, [record(step)])
        with monitor.paused():  # an evaluation
            needs(120)
    assert [lines[0][1]["memory_bytes"], lines[-1][1]["memory_bytes"]] == [90, peak]
    with pytest.raises(OSError, match="disk"), monitor.paused():
        fails(130)
    assert (monitor.peak_memory(), monitor.reserved_memory()) == (peak, 130)
