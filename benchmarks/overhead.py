"""What the trainer costs over a loop written by hand: time and memory of a step."""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from typing import Protocol

import torch
from rich.console import Console
from torch import nn

from benchmarks.jobs import BIGNET, LOG_EVERY, TINY_MLP, BareLoop, Job, Workload, gpt2_job
from benchmarks.rows import Bench, Row
from benchmarks.turns import Times, ratios
from evidence.turns import Block, Clock, stopwatch, synchronise
from mantissa.display import size
from trainer.errors import RunError
from trainer.hardware import threads
from trainer.profiling.ledger import MemoryLedger
from trainer.run.run import Run
from trainer.run.signals import Signals
from trainer.run.terminal import Terminal
from trainer.run_folder import RunFolder
from trainer.trainer import Trainer

MLFLOW_PATIENCE_S = 60.0
PEAK_STEP = 3
"""The optimizer step whose peak memory is measured: by then the optimizer has its state."""


class Turns:
    """Lets other loops take turns with a trainer's run, which cannot be called block by block.

    In each round of a repeat the run takes ``steps`` optimizer steps and then each of ``others`` as many. One further
    repeat comes first, as a warm-up, and is not kept.
    """

    def __init__(
        self, job: Job, repeats: int, others: dict[str, Block], clock: Clock, report: Callable[[str, int], object]
    ) -> None:
        self.steps, self.steps_per_repeat = job.steps, job.steps * job.rounds
        self.last_step = self.steps_per_repeat * (repeats + 1)
        self.others, self.clock, self.report = others, clock, report
        self._times: Times = {name: [0.0] * (repeats + 1) for name in ("trainer", *others)}

    @property
    def times(self) -> Times:
        """Seconds per repeat by name; the run is called ``trainer``."""
        return {name: seconds[1:] for name, seconds in self._times.items()}

    def start(self, step: int = 0) -> None:
        """Start the clock of the run's next block, after ``step`` optimizer steps."""
        self.report("Mantissa", step // self.steps_per_repeat)
        self._began = self.clock()

    def take(self, step: int) -> None:
        """If the run's optimizer step ``step`` (from 1) ends a block, run the others' blocks."""
        if step % self.steps or step > self.last_step:
            return
        repeat = (step - 1) // self.steps_per_repeat
        self._times["trainer"][repeat] += self.clock() - self._began
        for name, block in self.others.items():
            self.report(name, repeat)
            self._times[name][repeat] += block(self.steps)
        self.start(step)


class MeasuredRun(Run):
    """A run with all features on, which pauses between its steps while other loops run."""

    turns: Turns

    def after_step(self) -> None:
        """Do what is due after a step; at the end of a block, let the other loops run."""
        super().after_step()
        step = self.trainer.step
        if step % self.turns.steps == 0:
            synchronise(self.trainer.device)
            with self.monitor.paused():
                self.turns.take(step)
                if step == self.turns.steps_per_repeat:
                    self._wait_for_mlflow()
                    self.turns.start(step)

    def _wait_for_mlflow(self) -> None:
        # Its import and first connection belong to the start, not to a step.
        deadline = time.monotonic() + MLFLOW_PATIENCE_S
        assert self.tracker is not None
        while self.config.tracking.mlflow and self.tracker.run_id is None:
            if time.monotonic() > deadline:
                raise RunError(f"MLflow has not started within {MLFLOW_PATIENCE_S:g} s, so its overhead is unknown")
            time.sleep(0.05)


def alternate(
    bench: Bench,
    job: Job,
    options: Sequence[str],
    others: Callable[[Workload], dict[str, Block]] = lambda workload: {},
    clock: Clock = time.perf_counter,
) -> Times:
    """Return the seconds per repeat of a whole run with all features on, and of loops that alternate with it.

    The run is called ``trainer``, the loop written by hand ``bare``.

    Args:
        bench: its folder takes the run.
        job: what is trained.
        options: further overrides.
        others: returns the blocks of other loops by name.
        clock: of the run and the bare loop, in seconds.
    """
    hardware, repeats, folder = bench.hardware, bench.repeats, bench.folder
    last = (repeats + 1) * job.rounds * job.steps + 1  # so that evaluation and the end come after the last block
    local = [] if find_spec("mlflow") else ["tracking=local"]  # a machine for measurements may lack it
    place = (f"device={hardware.device}", f"output_dir={folder}", f"run_name={job.name.replace(' ', '-')}")
    tracked = (f"tracking.uri=sqlite:///{folder}/mlflow.db", "tracking.experiment=bench")
    length = (f"steps={last}", f"eval_every={last}", "eval_samples=1")
    config = job.config(*options, *local, *place, *tracked, *length)
    bench.report(f"{job.name}: building")
    trainer = Trainer.from_config(config, hardware)
    workload = Workload(trainer)
    blocks = {"bare": stopwatch(BareLoop(workload).run, hardware.device, clock)} | others(workload)
    run_folder = RunFolder.create(config.output_dir, trainer.config.name)
    run = MeasuredRun(trainer, run_folder, None, Terminal(Console(file=io.StringIO())), Signals(), [])
    run.turns = turns = Turns(
        job, repeats, blocks, clock, lambda name, repeat: bench.repeat(f"{job.name}: {name}", repeat)
    )
    with threads(job.threads):
        turns.start()
        run.train()
    return turns.times


def trainer_cost(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the overhead of the trainer, with everything on, over a loop written by hand.

    That of a tiny model also in CPU time of the thread that trains: on a busy machine the seconds on the wall differ by
    more than it costs. The CPU time leaves out what it waits for, such as another thread of Python.
    """
    language, tiny = jobs or (gpt2_job(bench.hardware), TINY_MLP)
    options = (f"precision={bench.mode}", "clip=norm", f"log_every={LOG_EVERY}", "checkpoint=none")
    measurements: list[tuple[Job, str, float, Clock]] = [(language, "%", 2.0, time.perf_counter)]
    measurements.append((tiny, "ms", 0.05, time.perf_counter))
    if not bench.hardware.is_gpu:
        # In short blocks, so that both loops see the same load.
        often = replace(tiny, name=f"{tiny.name} by CPU time", steps=max(1, tiny.steps // 5))
        measurements.append((often, "ms", 0.05, time.thread_time))
    for job, unit, target, clock in measurements:
        times = alternate(bench, job, options, clock=clock)
        how = f"{job.line(*options)}; {job.rounds} × {job.steps} steps a repeat"
        how += "" if find_spec("mlflow") else "; without MLflow"
        cost = overheads(times, unit, job.rounds * job.steps)
        yield Row(f"{job.name}, Mantissa over a bare loop", unit, cost, how, target)


def overheads(times: Times, unit: str, steps: int) -> list[float]:
    """Return the trainer's overhead over ``bare`` for each repeat of ``steps`` steps: in ``%``, or ``ms`` per step."""
    if unit == "%":
        return [100 * (ratio - 1) for ratio in ratios(times, "trainer", "bare")]
    return [1e3 * (a - b) / steps for a, b in zip(times["trainer"], times["bare"], strict=True)]


class Watch(Protocol):
    """Is called around the optimizer steps of a loop."""

    def before(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take note that ``step`` (from 1) begins."""

    def after(self, step: int, last: int) -> None:
        """Take note that ``step`` of ``last`` has ended."""


class PeakWatch:
    """Measures the peak memory of step ``PEAK_STEP``: by CUDA's allocator, elsewhere by the ledger."""

    def __init__(self, device: torch.device) -> None:
        """Begin before the loop is built: what is allocated by then does not count."""
        self.device, self.cuda = device, device.type == "cuda"
        self.how = "CUDA's allocator" if self.cuda else "the ledger of trainer/profiling/ledger.py"
        self.bytes = 0
        gc.collect()
        self._before = torch.cuda.memory_allocated(device) if self.cuda else 0

    def before(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start measuring."""
        if step != PEAK_STEP:
            return
        if self.cuda:
            synchronise(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._ledger = MemoryLedger(model, optimizer)
            self._ledger.__enter__()

    def after(self, step: int, last: int) -> None:
        """Read the peak."""
        if step != PEAK_STEP:
            return
        if self.cuda:
            synchronise(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        else:
            self._ledger.__exit__(None, None, None)
            self.bytes = self._ledger.report().peak_bytes


def watched(run: Callable[[int], object], model: nn.Module, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
    """Take ``PEAK_STEP`` steps of a loop that is called step by step."""
    for step in range(1, PEAK_STEP + 1):
        watch.before(step, model, optimizer)
        run(1)
        watch.after(step, PEAK_STEP)


def peak_memory(bench: Bench, jobs: Sequence[tuple[Job, str]] = ()) -> Iterator[Row]:
    """Measure the peak memory of one step, trainer over hand-written loop; it is exact and needs no repeats."""
    hardware = bench.hardware
    for job, mode in jobs or ((gpt2_job(hardware), bench.mode), (BIGNET, "fp32")):
        bench.report(f"{job.name} {mode}")
        options = (f"precision={mode}", "clip=norm")
        ours = PeakWatch(hardware.device)
        workload = trainer_peak(bench, job, options, ours)
        theirs = PeakWatch(hardware.device)
        bare = BareLoop(workload)
        watched(bare.run, bare.model, bare.optimizer, theirs)
        title = f"{job.name} {mode}, peak memory over a bare loop's"
        sizes = f"third step, {size(ours.bytes)} and {size(theirs.bytes)} by {theirs.how}"
        yield Row(title, "x", [ours.bytes / theirs.bytes], f"{job.line(*options)}; {sizes}", 1.02)


def trainer_peak(bench: Bench, job: Job, options: Sequence[str], watch: PeakWatch) -> Workload:
    """Take the trainer's first steps, watched, and return its workload with the weights from before them."""
    trainer = Trainer.from_config(job.config(*options, f"device={bench.hardware.device}"), bench.hardware)
    workload = Workload(trainer).first_batches(PEAK_STEP)
    trainer.model.train()
    # All loaded before: the ledger counts the whole storage of data that a step touches.
    batches = iter(list(islice(trainer.batches(), PEAK_STEP)))
    watched(lambda _: trainer.train_step(next(batches)), trainer.model, trainer.optimizer, watch)
    return workload
