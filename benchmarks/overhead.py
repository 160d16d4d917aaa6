"""What the trainer costs over a loop written by hand: time and memory of a step."""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.jobs import BIGNET, LOG_EVERY, TINY_MLP, BareLoop, Job, Workload, gpt2_job
from benchmarks.rows import Bench, Row, Times, ratios
from evidence.stopwatch import Block, Clock, stopwatch
from mantissa.display import size
from mantissa.step.ledger import MemoryLedger
from mantissa.tensors import synchronise
from trainer.config.schema import Config
from trainer.data.contract import Batch
from trainer.errors import RunError
from trainer.hardware import Hardware, threads
from trainer.run.run import Run
from trainer.run.scores import Scores
from trainer.run.signals import Signals
from trainer.run_folder import RunFolder
from trainer.terminal import Terminal
from trainer.trainer import StepRecord, Trainer

MLFLOW_PATIENCE_S = 60.0
PEAK_STEP = 3
"""The optimizer step whose peak memory is measured: by then the optimizer has its state."""


class MeasuredRun(Run):
    """A run with all features on, which pauses after each of its blocks while a bare loop takes as many steps."""

    block_steps: int
    bare: Block
    clock: Clock
    seconds: Times
    """Seconds of each block by name: ``trainer`` is the run itself, ``bare`` the loop written by hand."""

    def measure(self, block_steps: int, bare: Block, clock: Clock) -> Times:
        """Train to the end in turns with a bare loop, and return the seconds of each block."""
        self.block_steps, self.bare, self.clock = block_steps, bare, clock
        self.seconds = {"trainer": [], "bare": []}
        self._began = clock()
        self.train()
        return self.seconds

    def step(self, microbatches: list[Batch]) -> StepRecord:
        """Take one optimizer step; where a block has ended before it, first let the bare loop run."""
        if self.trainer.step and self.trainer.step % self.block_steps == 0:
            self._end_block()
        return super().step(microbatches)

    def _end_block(self) -> None:
        synchronise(self.trainer.device)
        with self.monitor.paused():
            self.seconds["trainer"].append(self.clock() - self._began)
            self.seconds["bare"].append(self.bare(self.block_steps))
            self._wait_for_mlflow()
            self._began = self.clock()

    def _wait_for_mlflow(self) -> None:
        # Its import and first connection belong to the start, not to a step.
        deadline = time.monotonic() + MLFLOW_PATIENCE_S
        assert self.metric_log is not None
        while self.config.tracking.mlflow and self.metric_log.run.run_id is None:
            if time.monotonic() > deadline:
                raise RunError(f"MLflow has not started within {MLFLOW_PATIENCE_S:g} s, so its overhead is unknown")
            time.sleep(0.05)


def alternate(bench: Bench, job: Job, options: Sequence[str], clock: Clock = time.perf_counter) -> Times:
    """Return the seconds per repeat of a whole run with all features on, and of a bare loop that alternates with it.

    The run is called ``trainer``, the loop written by hand ``bare``. One further repeat comes first, as a warm-up.

    Args:
        bench: its folder takes the run.
        job: what is trained.
        options: further overrides.
        clock: of the run and the bare loop, in seconds.
    """
    hardware, folder = bench.hardware, bench.folder
    last = (bench.repeats + 1) * job.rounds * job.steps + 1  # so that evaluation and the end come after the last block
    local = [] if find_spec("mlflow") else ["tracking=local"]  # a machine for measurements may lack it
    place = (f"device={hardware.device}", f"output_dir={folder}", f"run_name={job.name.replace(' ', '-')}")
    tracked = (f"tracking.uri=sqlite:///{folder}/mlflow.db", "tracking.experiment=bench")
    length = (f"steps={last}", f"eval_every={last}", "eval_samples=1")
    config = job.config(*options, *local, *place, *tracked, *length)
    trainer = Trainer.from_config(config, hardware)
    bare = stopwatch(BareLoop(Workload(trainer)).run, hardware.device, clock)
    run_folder = RunFolder.create(config.output_dir, trainer.config.name)
    terminal = Terminal(Console(file=io.StringIO()))
    terminal.show_logs()
    run = MeasuredRun(trainer, Scores(trainer.config), run_folder, terminal, Signals(), time.monotonic(), command="")
    run.begin([])
    with threads(job.threads):
        seconds = run.measure(job.steps, bare, clock)
    return by_repeat(seconds, bench.repeats, job.rounds)


def by_repeat(seconds: Times, repeats: int, rounds: int) -> Times:
    """Return the seconds of each repeat of ``rounds`` blocks, without the first repeat, the warm-up."""
    firsts = range(rounds, (repeats + 1) * rounds, rounds)
    return {name: [sum(blocks[first : first + rounds]) for first in firsts] for name, blocks in seconds.items()}


def trainer_cost(bench: Bench) -> Iterator[Row]:
    """Measure the overhead of the trainer, with everything on, over a loop written by hand.

    That of a tiny model also in CPU time of the thread that trains: on a busy machine the seconds on the wall differ by
    more than it costs. The CPU time leaves out what it waits for, such as another thread of Python.
    """
    options = (f"precision={bench.mode}", "clip=norm", f"log_every={LOG_EVERY}", "checkpoint=none")
    measurements: list[tuple[Job, str, float, Clock]] = [
        (gpt2_job(bench.hardware), "%", 2.0, time.perf_counter),
        (TINY_MLP, "ms", 0.05, time.perf_counter),
    ]
    if not bench.hardware.is_gpu:
        # In short blocks, so that both loops see the same load.
        often = replace(TINY_MLP, name=f"{TINY_MLP.name} by CPU time", steps=TINY_MLP.steps // 5)
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


After = Callable[[int], None]
"""A function that is called after each optimizer step of a loop, with its number from 1."""
Fit = Callable[[int, After], None]
"""A function that takes a number of optimizer steps."""


@dataclass
class Loop:
    """A loop over a workload, ready to be measured."""

    model: nn.Module
    """The recipe's own model."""
    optimizer: torch.optim.Optimizer
    fit: Fit


def stepwise(run: Callable[[int], object], model: nn.Module, optimizer: torch.optim.Optimizer) -> Loop:
    """Return a loop of which each call continues the one before."""

    def fit(steps: int, after: After) -> None:
        for step in range(1, steps + 1):
            run(1)
            after(step)

    return Loop(model, optimizer, fit)


def bare(workload: Workload) -> Loop:
    """Return the loop written by hand."""
    loop = BareLoop(workload)
    return stepwise(loop.run, loop.model, loop.optimizer)


def mantissa(config: Config, hardware: Hardware) -> Loop:
    """Return the trainer's own steps."""
    trainer = Trainer.from_config(config, hardware)
    trainer.model.train()
    # All loaded before: the ledger counts the whole storage of data that a step touches.
    batches = iter(list(islice(trainer.batches(), PEAK_STEP)))
    return stepwise(lambda _: trainer.train_step(next(batches)), trainer.model, trainer.optimizer)


@dataclass
class FirstSteps:
    """What a loop's first ``PEAK_STEP`` steps leave."""

    peak_bytes: int = 0
    """Peak of the last one, by CUDA's allocator or the ledger; what existed before the loop does not count."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights after it, on the CPU."""


def first_steps(make: Callable[[], Loop], device: torch.device) -> FirstSteps:
    """Make a loop, take its first steps, and return their peak memory and the weights after them."""
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    loop, found = make(), FirstSteps()
    peak = _peak(loop, device)

    def after(step: int) -> None:
        if step == PEAK_STEP - 1:
            next(peak)
        elif step == PEAK_STEP:
            found.peak_bytes = next(peak) - before
            found.weights = {name: weight.detach().cpu().clone() for name, weight in loop.model.named_parameters()}

    loop.fit(PEAK_STEP, after)
    return found


def _peak(loop: Loop, device: torch.device) -> Iterator[int]:
    """Begin to measure, yield 0; then yield the peak in bytes since then."""
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield 0
        synchronise(device)
        yield torch.cuda.max_memory_allocated(device)
    else:
        with MemoryLedger(loop.model, loop.optimizer) as ledger:
            yield 0
        yield ledger.report().peak_bytes


def memory_is_by(device: torch.device) -> str:
    """Return what measures the peak."""
    return "CUDA's allocator" if device.type == "cuda" else "the ledger of mantissa/step/ledger.py"


def peak_memory(bench: Bench) -> Iterator[Row]:
    """Measure the peak memory of one step, trainer over hand-written loop; it is exact and needs no repeats."""
    hardware, device = bench.hardware, bench.hardware.device
    for job, mode in ((gpt2_job(hardware), bench.mode), (BIGNET, "fp32")):
        options = (f"precision={mode}", "clip=norm")
        config = job.config(*options, f"device={device}")
        workload = Workload(Trainer.from_config(config, hardware)).first_batches(PEAK_STEP)
        makers = (partial(mantissa, config, hardware), partial(bare, workload))
        ours, theirs = (first_steps(make, device).peak_bytes for make in makers)
        sizes = f"third step, {size(ours)} and {size(theirs)} by {memory_is_by(device)}"
        title = f"{job.name} {mode}, peak memory over a bare loop's"
        yield Row(title, "x", [ours / theirs], f"{job.line(*options)}; {sizes}", 1.02)
