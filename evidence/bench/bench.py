"""The measurements of scripts/bench.py: ratios between loops that alternate in one process, under the same load."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import torch
from rich.console import Console
from torch import nn

from evidence.bench.baselines import FRAMEWORKS, LOG_EVERY, BareLoop, Workload
from evidence.bench.inference import evaluation, generation
from evidence.bench.jobs import BIGNET, TINY_MLP, Job, gpt2_job, resnet_job, steps_of
from evidence.bench.loading import loader
from evidence.bench.measurement import Bench, Measurement
from evidence.bench.nanogpt import nanogpt
from evidence.bench.parts import ema_cost, meters_cost, optimizers
from evidence.bench.roofline import roofline
from evidence.bench.scale import parallel, saving
from evidence.bench.turns import Block, Row, Turns, overheads, ratios, stopwatch, synchronise
from trainer.config.schema import Config
from trainer.errors import RunError
from trainer.files import PROJECT
from trainer.formats import size
from trainer.hardware import UNAVAILABLE, Hardware, threads
from trainer.precision.modes import BASIC_MODES
from trainer.profiling.ledger import MemoryLedger
from trainer.run.folder import RunFolder
from trainer.run.run import Run
from trainer.run.signals import Signals
from trainer.run.terminal import Terminal
from trainer.trainer import Trainer

Variants = dict[str, tuple[str, ...]]
"""Overrides by the name of the variant."""
BF16_TARGET = 1.8
MLFLOW_PATIENCE_S = 60.0


class MeasuredRun(Run):
    """A run with all features on, which pauses between its steps while other loops run."""

    turns: Turns
    background_s: float = 0.0
    """CPU time of its background threads (MLflow's feed, system metrics) over all timed repeats."""

    def after_step(self) -> None:
        """Do what is due after a step; at the end of a block, let the other loops run."""
        super().after_step()
        step = self.trainer.step
        if not self.turns.due(step):
            return
        synchronise(self.trainer.device)
        with self.monitor.paused():
            self.turns.take(step)
            if step == self.turns.steps_per_repeat:
                self._wait_for_mlflow()
                self.background_s -= _background_s()
                self.turns.start()
            elif step == self.turns.last_step:
                self.background_s += _background_s()

    def _wait_for_mlflow(self) -> None:
        # Its import and first connection belong to the start, not to a step.
        deadline = time.monotonic() + MLFLOW_PATIENCE_S
        assert self.tracker is not None
        while self.config.tracking.mlflow and self.tracker.run_id is None:
            if time.monotonic() > deadline:
                raise RunError(f"MLflow has not started within {MLFLOW_PATIENCE_S:g} s, so its overhead is unknown")
            time.sleep(0.05)


def _background_s() -> float:
    """Return the CPU seconds so far of all Python threads but the main one (0 where the system has no such count)."""
    if not psutil.LINUX:
        return 0.0
    ours = {thread.native_id for thread in threading.enumerate()} - {threading.main_thread().native_id}
    return sum(thread.user_time + thread.system_time for thread in psutil.Process().threads() if thread.id in ours)


def precision(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the speedup of each precision over fp32, and of channels_last in bf16."""
    hardware = bench.hardware
    language, vision = jobs or (gpt2_job(hardware), resnet_job(hardware))
    modes = [mode for mode in BASIC_MODES if hardware.support(mode) != UNAVAILABLE]
    every: Variants = {mode: (f"precision={mode}",) for mode in modes}
    some = every if hardware.is_gpu else {mode: every[mode] for mode in ("fp32", "bf16")}
    yield from _speedups(bench, language, every, [(mode, "fp32") for mode in modes[1:]])
    layouts: Variants = some | {"bf16 NCHW": ("precision=bf16", "recipe.channels_last=false")}
    yield from _speedups(bench, vision, layouts, [*((mode, "fp32") for mode in list(some)[1:]), ("bf16", "bf16 NCHW")])


def _speedups(bench: Bench, job: Job, variants: Variants, pairs: list[tuple[str, str]]) -> Iterator[Row]:
    hardware = bench.hardware
    amx = hardware.device.type == "cpu" and "amx_bf16" in hardware.cpu_flags  # the targets are for such a machine
    measured = []
    for fast, slow in pairs:
        if why := bench.left_out(mode := fast.partition(" ")[0]):
            yield Row(_throughput(job, fast, slow), "x", [], f"left out: {why}; measured with modes={mode}")
        else:
            measured.append((fast, slow))
    blocks = {}
    for name, overrides in variants.items():
        if any(name in pair for pair in measured):
            bench.report(f"{job.name}: building {name}")
            blocks[name] = _training_block(job, overrides, hardware)
    times = bench.interleave(job.name, blocks)
    for fast, slow in measured:
        how = f"{job.line(*variants[fast])}; vs. {' '.join(variants[slow])}; {job.steps} steps a repeat"
        target = BF16_TARGET if amx and (fast, slow) == ("bf16", "fp32") else None
        yield Row(_throughput(job, fast, slow), "x", ratios(times, slow, fast), how, target, at_most=False)


def _throughput(job: Job, fast: str, slow: str) -> str:
    return f"{job.name}, throughput, {fast} / {slow}"


def _training_block(job: Job, overrides: tuple[str, ...], hardware: Hardware) -> Callable[[], float]:
    config = job.config(*overrides, "clip=norm", "steps=1000000", f"device={hardware.device}")
    trainer = Trainer.from_config(config, hardware)
    trainer.model.train()
    timed = stopwatch(steps_of(trainer), hardware.device)

    def block() -> float:
        trainer.config.precision.apply()  # sets flags of the whole process
        return timed(job.steps)

    return block


def trainer_cost(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the overhead of the trainer, with everything on, over a loop written by hand, and that of frameworks."""
    language, tiny = jobs or (gpt2_job(bench.hardware), TINY_MLP)
    yield from _cost(bench, language, "%", 2.0)
    yield from _cost(bench, tiny, "ms", 0.15)


def _cost(bench: Bench, job: Job, unit: str, target: float) -> Iterator[Row]:
    hardware, repeats, folder = bench.hardware, bench.repeats, bench.folder
    options = (f"precision={bench.mode}", "clip=norm", f"log_every={LOG_EVERY}", "checkpoint=none")
    last = (repeats + 1) * job.rounds * job.steps + 1  # so that evaluation and the end come after the last block
    config = job.config(
        *(*options, f"device={hardware.device}", f"output_dir={folder}", f"run_name={job.name.replace(' ', '-')}"),
        *(f"tracking.uri=sqlite:///{folder}/mlflow.db", "tracking.experiment=bench"),
        *(f"steps={last}", f"eval_every={last}", "eval_samples=1"),
    )
    bench.report(f"{job.name}: building")
    trainer = Trainer.from_config(config, hardware)
    workload = Workload(trainer)
    others = {"bare": stopwatch(BareLoop(workload).run, hardware.device)}
    fits: dict[str, Block] = {}
    missing = {framework.name: framework.missing() for framework in FRAMEWORKS}
    for framework in FRAMEWORKS:
        if missing[framework.name] is None:
            (fits if framework.whole_fit else others)[framework.name] = framework.block(workload, folder)
    run_folder = RunFolder.create(config.output_dir, trainer.plan.run_name)
    run = MeasuredRun(trainer, run_folder, None, Terminal(Console(file=io.StringIO())), Signals(), [])
    run.turns = turns = Turns(job.steps, job.rounds, repeats, others, fits)
    turns.report = lambda doing: bench.report(f"{job.name}: {doing}")
    with threads(job.threads):
        turns.start()
        run.train()
    measured = f"{job.line(*options)}; {job.rounds} × {job.steps} steps a repeat"
    background_ms = 1e3 * run.background_s / (repeats * turns.steps_per_repeat)
    for name in ("trainer", *missing):
        title = f"{job.name}, {'Mantissa' if name == 'trainer' else name} over a bare loop"
        if why := missing.get(name):
            yield Row(title, unit, [], f"not measured: {why}")
        elif name == "trainer":
            how = f"{measured}; MLflow's threads used another {background_ms:.3f} ms of CPU per step"
            yield Row(title, unit, overheads(turns.times, name, unit, turns.steps_per_repeat), how, target)
        else:
            yield Row(title, unit, overheads(turns.times, name, unit, turns.steps_per_repeat), measured)


def peak_memory(bench: Bench, jobs: Sequence[tuple[Job, str]] = ()) -> Iterator[Row]:
    """Measure the peak memory of one step, trainer over hand-written loop; it is exact and needs no repeats."""
    hardware = bench.hardware
    how = "CUDA's allocator" if hardware.device.type == "cuda" else "the ledger of trainer/profiling/ledger.py"
    for job, mode in jobs or ((gpt2_job(hardware), bench.mode), (BIGNET, "fp32")):
        bench.report(f"{job.name} {mode}")
        options = (f"precision={mode}", "clip=norm")
        workload, ours = _trainer_peak(job.config(*options, f"device={hardware.device}"), hardware)
        gc.collect()  # on a GPU, what the trainer held would count again
        theirs = _bare_peak(workload)
        title = f"{job.name} {mode}, peak memory over a bare loop's"
        sizes = f"third step, {size(ours)} and {size(theirs)} by {how}"
        yield Row(title, "x", [ours / theirs], f"{job.line(*options)}; {sizes}", 1.02)


def _trainer_peak(config: Config, hardware: Hardware) -> tuple[Workload, int]:
    trainer = Trainer.from_config(config, hardware)
    trainer.model.train()
    steps = steps_of(trainer)
    peak = _peak_bytes(trainer.model, trainer.optimizer, lambda: steps(1))
    return Workload(trainer), peak


def _bare_peak(workload: Workload) -> int:
    bare = BareLoop(workload)
    return _peak_bytes(bare.model, bare.optimizer, lambda: bare.run(1))


def _peak_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> int:
    """Return the peak bytes of the third step, when the optimizer has its state."""
    device = next(model.parameters()).device
    step()
    step()
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device)
    with MemoryLedger(model, optimizer) as ledger:
        step()
    return ledger.report().peak_bytes


def startup(bench: Bench, script: Path = PROJECT / "scripts/train.py") -> Iterator[Row]:
    """Measure the seconds from the start of a process to its first step, and to the report of a mistake."""
    folder, options = bench.folder, (f"precision={bench.mode}", "steps=1", f"device={bench.hardware.device}")
    train = [sys.executable, str(script), "recipe=gpt2", *options]
    mistake = [sys.executable, str(script), "precision=bf61"]
    bench.report("filling caches")
    _seconds([*train, "eval_samples=1", "checkpoint=none"], folder, code=0)  # fills caches
    blocks = {
        "import torch": lambda: _seconds([sys.executable, "-c", "import torch"], folder, code=0),
        "mistake": lambda: _seconds(mistake, folder, code=2),
        "first step": lambda: _seconds(train, folder, until="step 1/1"),
    }
    times = bench.interleave("a process", blocks, min(bench.repeats, 3), warm_up=0)
    for name, command, target in (("first step", train, 15.0), ("mistake", mistake, 4.0)):
        line = f"python scripts/train.py {' '.join(command[2:])}"
        title = {"first step": "command to the end of the first step", "mistake": "command to the error message"}
        yield Row(f"{title[name]}, absolute", "s", times[name], f"{line}; warm caches", target)
        yield Row(f"{name} / import torch", "x", ratios(times, name, "import torch"), line)
    yield Row("import torch, absolute", "s", times["import torch"], "python -c 'import torch'")


def _seconds(command: list[str], folder: Path, code: int | None = None, until: str | None = None) -> float:
    """Return the seconds until a process ends with ``code``, or prints a line that begins with ``until``.

    Raises:
        RunError: it ended otherwise.
    """
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    try:
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                if until is not None and line.startswith(until):
                    return time.perf_counter() - began
        if process.wait() == code:
            return time.perf_counter() - began
    finally:
        process.kill()
        process.wait()
    raise RunError(f"{' '.join(command)} ended with status {process.returncode}:\n{''.join(lines[-20:])}")


MEASUREMENTS: dict[str, Measurement] = {
    "precision": precision,
    "trainer": trainer_cost,
    "nanogpt": nanogpt,
    "roofline": roofline,
    "optimizers": optimizers,
    "meters": meters_cost,
    "ema": ema_cost,
    "memory": peak_memory,
    "loader": loader,
    "generation": generation,
    "evaluation": evaluation,
    "startup": startup,
    "saving": saving,
    "parallel": parallel,
}
