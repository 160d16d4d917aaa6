"""Ratios between loops that alternate in one process: formats, optimizers, averages, checkpoints, …"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.jobs import BareLoop, Job, Workload, gpt2_job, resnet_job
from benchmarks.rows import ENDLESS, Bench, Row
from benchmarks.turns import Times, interleave, ratios
from evidence.turns import steps_of, stopwatch
from mantissa.formats import BASIC
from trainer.checkpoint.store import Checkpoint
from trainer.checkpoint.writer import CheckpointWriter
from trainer.errors import RunError, UserError
from trainer.files import PROJECT
from trainer.hardware import UNAVAILABLE, detect
from trainer.parallel.world import World
from trainer.precision import kernels
from trainer.profiling.diagnostics import Numerics
from trainer.trainer import Trainer

BF16_TARGET = 1.8
OPTIMIZERS = ("muon", "lion", "lamb", "adafactor", "schedulefree schedule=constant")
"""Choices of ``optimizer``, with what else they need, that are measured beside adamw."""
PROCESSES = 2
STEPS = 4
"""Optimizer steps between two checkpoints, and in a block of several processes."""
Variants = dict[str, tuple[str, ...]]
"""Overrides by the name of the variant."""


def precision(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the speedup of each precision over fp32, and of channels_last in bf16."""
    hardware = bench.hardware
    language, vision = jobs or (gpt2_job(hardware), resnet_job(hardware))
    modes = [mode for mode in BASIC if hardware.support(mode) != UNAVAILABLE]
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
        if why := bench.left_out(fast.partition(" ")[0]):
            yield Row(_throughput(job, fast, slow), "x", [], why)
        else:
            measured.append((fast, slow))
    blocks = {}
    for name, overrides in variants.items():
        if any(name in pair for pair in measured):
            bench.report(f"{job.name}: building {name}")
            blocks[name] = _training_block(bench, job, overrides)
    times = bench.interleave(job.name, blocks)
    for fast, slow in measured:
        how = f"{job.line(*variants[fast])}; vs. {' '.join(variants[slow])}; {job.steps} steps a repeat"
        target = BF16_TARGET if amx and (fast, slow) == ("bf16", "fp32") else None
        yield Row(_throughput(job, fast, slow), "x", ratios(times, slow, fast), how, target, at_most=False)


def _throughput(job: Job, fast: str, slow: str) -> str:
    return f"{job.name}, throughput, {fast} / {slow}"


def _trainer(bench: Bench, job: Job, *options: str) -> Trainer:
    return Trainer.from_config(job.config(*options, ENDLESS, f"device={bench.hardware.device}"), bench.hardware)


def _training_block(bench: Bench, job: Job, overrides: tuple[str, ...]) -> Callable[[], float]:
    trainer = _trainer(bench, job, *overrides, "clip=norm")
    trainer.model.train()
    timed = stopwatch(steps_of(trainer), trainer.device)

    def block() -> float:
        kernels.clear()  # those of the block before
        trainer.config.precision.apply(trainer.in_fp32_arithmetic)  # sets flags of the whole process
        return timed(job.steps)

    return block


def optimizers(bench: Bench, job: Job | None = None, names: Sequence[str] = OPTIMIZERS) -> Iterator[Row]:
    """Measure a step with each optimizer beside one with AdamW."""
    job = job or gpt2_job(bench.hardware)
    loops: dict[str, Callable[[int], None]] = {}
    missing: dict[str, str] = {}
    for name in ("adamw", *names):
        try:
            loops[name] = steps_of(_trainer(bench, job, *f"optimizer={name}".split()))
        except UserError as error:  # the library that has it is not installed
            missing[name] = str(error)
    times = bench.times(job.name, loops, job.steps)
    for name in names:
        title = f"{job.name}, a step with {name.partition(' ')[0]} / with adamw"
        if name in missing:
            yield Row(title, "x", [], f"not measured: {missing[name]}")
        else:
            yield Row(title, "x", ratios(times, name, "adamw"), job.line(f"optimizer={name}"))


def ema_cost(bench: Bench, job: Job | None = None) -> Iterator[Row]:
    """Measure what ema=default adds to a step: the update of the averages."""
    job = job or gpt2_job(bench.hardware)
    trainer = _trainer(bench, job, "ema=default")

    def update(steps: int) -> None:
        for _ in range(steps):
            trainer.average.update(trainer.step)

    times = bench.times(job.name, {"step": steps_of(trainer), "update": update}, 1, 2 * bench.repeats)
    share = [100 * update / (step - update) for step, update in zip(times["step"], times["update"], strict=True)]
    how = f"{job.line('ema=default')}; steps and further updates of the averages alternate"
    yield Row(f"{job.name}, ema=default, over ema=none", "%", share, how, 2.0)


def diagnostics_cost(bench: Bench, job: Job | None = None) -> Iterator[Row]:
    """Measure what diagnostics=numerics adds to its step, as a share of the steps from it to the next."""
    job = job or gpt2_job(bench.hardware)
    trainer = _trainer(bench, job, "clip=norm")
    every = Numerics().every
    diagnostics = Numerics(1).start(trainer.model, trainer.update, trainer.config.precision.half, every, World())
    batches = trainer.batches()

    def update(measured: bool) -> float:
        correction = trainer.gradients(next(batches)).correction

        def step(_: int) -> None:
            with diagnostics.step(1) if measured else nullcontext():
                trainer.update.step(0, correction)
            list(diagnostics.collect())

        return stopwatch(step, trainer.device)(1)

    blocks: dict[str, Callable[[], float]] = {
        "step": partial(stopwatch(steps_of(trainer), trainer.device), 1),
        "update": partial(update, False),
        "measured": partial(update, True),
    }
    times = bench.interleave(job.name, blocks, 2 * bench.repeats)
    columns = zip(times["step"], times["update"], times["measured"], strict=True)
    share = [100 * (measured - update) / (every * step) for step, update, measured in columns]
    how = f"{job.line()}; updates with and without a measurement alternate, the difference is spread over {every} steps"
    yield Row(f"{job.name}, diagnostics=numerics, over diagnostics=none", "%", share, how, 2.0)


def saving(bench: Bench, job: Job | None = None) -> Iterator[Row]:
    """Measure how long the loop waits for a checkpoint, and how much writing it slows the next steps."""
    job = job or gpt2_job(bench.hardware)
    options = (f"precision={bench.mode}", "clip=norm")
    trainer = _trainer(bench, job, *options)
    block = stopwatch(steps_of(trainer), trainer.device)
    for background in (True, False):
        how = "in the background" if background else "in the loop (checkpoint.background=false)"
        writer = CheckpointWriter(Checkpoint(background=background), bench.folder / str(background), World())
        stalls, slowed = [], []
        for repeat in range(bench.repeats + 1):
            bench.repeat(f"{job.name}: a checkpoint {how}", repeat)
            alone = block(STEPS)
            stall = writer.save(trainer.state_dict(), {}, None)
            after = block(STEPS)
            writer.finish()
            if repeat:  # the first repeat allocates host memory and is a warm-up
                stalls.append(100 * stall / (alone / STEPS))
                slowed.append(100 * (after + stall - alone) / (alone / STEPS))
        measured = f"{job.line(*options)}; one checkpoint after every {STEPS} steps"
        name = f"{job.name}, a checkpoint {how}"
        yield Row(f"{name}: stall, of one step", "%", stalls, measured, 10.0 if background else None)
        slower = f"{measured}; with the slower steps that follow"
        yield Row(f"{name}: total overhead, of one step", "%", slowed, slower)


def parallel(bench: Bench, overrides: Sequence[str] = ()) -> Iterator[Row]:
    """Measure two processes: Mantissa's DDP against torch's own, and both against one process."""
    hardware = bench.hardware
    if hardware.is_gpu and torch.cuda.device_count() < PROCESSES:
        yield Row("DDP over torch's own", "%", [], f"not measured: needs {PROCESSES} GPUs")
        return
    options = (f"precision={bench.mode}", "clip=norm", *overrides)
    line = gpt2_job(hardware).line(*options, "parallel=ddp").removeprefix("python ")
    one, two = (_in_processes(count, bench, options) for count in (1, PROCESSES))
    cores = f"{PROCESSES} GPUs" if hardware.is_gpu else f"{hardware.cpu_cores} cores"
    yield Row(
        f"{PROCESSES} processes, Mantissa's DDP over torch's DDP written by hand",
        "%",
        [100 * (ratio - 1) for ratio in ratios(two, "mantissa", "bare")],
        f"torchrun --nproc-per-node={PROCESSES} {line}; {STEPS} steps a repeat, alternating in the same processes",
        3.0,
    )
    yield Row(
        f"step time, {PROCESSES} processes vs. one with the same global batch, {cores}",
        "x",
        [a / b for a, b in zip(two["mantissa"], one["mantissa"], strict=True)],
        f"{line}; vs. parallel=single; one job after the other, not alternating",
    )


def _in_processes(count: int, bench: Bench, options: Sequence[str]) -> Times:
    bench.report(f"{count} process{'es' * (count > 1)}, {bench.repeats} repeats")
    file = bench.folder / f"{count}.json"
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={count}"] if count > 1 else []
    command = [sys.executable, *torchrun, "-m", "benchmarks.ratios", str(file), str(bench.repeats), *options]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, bench.hardware.cpu_cores // count))}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    times: Times = json.loads(file.read_text())
    return times


class BareDDP(BareLoop):
    """The hand-written loop around torch's DistributedDataParallel with its defaults."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.model = nn.parallel.DistributedDataParallel(self.model)


def _rank(file: str, repeats: str, *options: str) -> None:
    """Run as one of the processes that ``parallel`` starts."""
    mode = "ddp" if "RANK" in os.environ else "single"
    job = gpt2_job(detect("auto"))
    config = job.config(*options, f"parallel={mode}", ENDLESS)
    world = config.parallel.world("auto")
    trainer = Trainer.from_config(config, detect("auto"), world)
    blocks = {"mantissa": stopwatch(steps_of(trainer), trainer.device)}
    if mode == "ddp":
        workload = Workload(trainer)
        workload.batch_size = trainer.plan.batching.micro_batch_size
        blocks["bare"] = stopwatch(BareDDP(workload).run, trainer.device)
    times = interleave({name: partial(block, STEPS) for name, block in blocks.items()}, int(repeats))
    if world.first:
        Path(file).write_text(json.dumps(times))
    if dist.is_initialized():
        dist.destroy_process_group()


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


if __name__ == "__main__":
    _rank(*sys.argv[1:])
