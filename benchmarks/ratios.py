"""Ratios of loops that alternate in one process: formats, optimizers, DDP; largest batches; times of whole commands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.jobs import BareLoop, Job, Workload, gpt2_job, resnet_job
from benchmarks.rows import ENDLESS, Bench, Row, interleave, ratios
from evidence.memory.max_batch import largest_micro_batch
from evidence.stopwatch import over, steps_of, stopwatch
from mantissa.formats import BASIC
from mantissa.verdict import shell
from trainer.data.contract import Batch
from trainer.errors import RunError, UserError
from trainer.files import PROJECT
from trainer.hardware import UNAVAILABLE, detect
from trainer.precision import kernels
from trainer.trainer import Trainer

BF16_TARGET = 1.8
OPTIMIZERS = ("muon", "lion", "lamb", "adafactor")
"""Choices of ``optimizer`` that are measured beside adamw."""
PROCESSES = 2
STEPS = 4
"""Number of optimizer steps in a block of several processes."""
NCHW = "bf16 recipe.channels_last=false"
FIRST = "python scripts/train.py recipe=gpt2 recipe.size=nano data.tokenizer=bytes precision=bf16"
"""What ``make train`` runs."""
DOCUMENTED = (
    (FIRST, "valid/loss", "nats"),
    ("python scripts/train.py recipe=resnet recipe.arch=resnet18 steps=60", "valid/top1", "%"),
    ("python scripts/train.py recipe=gpt2 precision=bf16", "valid/loss", "nats"),
)
"""The first commands of README, the metric that each reaches, and its unit."""


def precision(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the speedup of each precision over fp32, and of channels_last in bf16."""
    hardware = bench.hardware
    language, vision = jobs or (gpt2_job(hardware), resnet_job(hardware))
    modes = [mode for mode in BASIC if hardware.support(mode) != UNAVAILABLE]
    yield from _speedups(bench, language, [(mode, "fp32") for mode in modes[1:]])
    some = modes[1:] if hardware.is_gpu else ["bf16"]
    yield from _speedups(bench, vision, [*((mode, "fp32") for mode in some), ("bf16", NCHW)])


def _speedups(bench: Bench, job: Job, pairs: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Measure pairs of a faster and a slower choice of ``precision``, with what else it needs."""
    hardware = bench.hardware
    amx = hardware.device.type == "cpu" and "amx_bf16" in hardware.cpu_flags  # the target is for such a machine
    title = f"{job.name}, throughput, {{}} / {{}}"
    measured = []
    for fast, slow in pairs:
        if why := bench.left_out(fast):
            yield Row(title.format(fast, slow), "x", [], why)
        else:
            measured.append((fast, slow))
    names = dict.fromkeys(name for pair in measured for name in pair)
    times = interleave({name: _training_block(bench, job, name) for name in names}, bench.repeats)
    for fast, slow in measured:
        how = f"{job.line(f'precision={fast}')}; vs. precision={slow}; {job.steps} steps a repeat"
        target = BF16_TARGET if amx and (fast, slow) == ("bf16", "fp32") else None
        yield Row(title.format(fast, slow), "x", ratios(times, slow, fast), how, target, at_most=False)


def fp32_kernels(bench: Bench) -> Iterator[Row]:
    """Measure a step with fp32 arithmetic on 16-bit operands, on a CPU where that is faster than its own kernels.

    Torch's own kernels may take 20 times as long, so two repeats are enough.
    """
    job, hardware = gpt2_job(bench.hardware), bench.hardware
    for mode in ("bf16", "fp16"):
        if not kernels.not_timed_here(mode, hardware):
            continue
        wide, native = (f"{mode} precision.kernels={setting}" for setting in ("fp32", "native"))
        times = interleave(
            {name: _training_block(bench, job, name) for name in (wide, native, "fp32")}, min(bench.repeats, 2)
        )
        for other, words in ((native, "with torch's own kernels"), ("fp32", "in fp32")):
            title = f"{job.name}, a step in {mode} with fp32 arithmetic / {words}"
            yield Row(title, "x", ratios(times, wide, other), job.line(f"precision={wide}"))


def _trainer(bench: Bench, job: Job, *options: str) -> Trainer:
    return Trainer.from_config(job.config(*options, ENDLESS, f"device={bench.hardware.device}"), bench.hardware)


def _training_block(bench: Bench, job: Job, precision: str) -> Callable[[], float]:
    trainer = _trainer(bench, job, *f"precision={precision}".split(), "clip=norm")
    trainer.model.train()
    timed = stopwatch(steps_of(trainer), trainer.device)

    def block() -> float:
        kernels.clear()  # those of the block before
        trainer.config.precision.apply()  # sets flags of the whole process
        trainer.config.use_kernels(trainer.hardware, trainer.convolves)
        return timed(job.steps)

    return block


def optimizers(bench: Bench) -> Iterator[Row]:
    """Measure a step with each optimizer beside one with AdamW."""
    job = gpt2_job(bench.hardware)
    title = f"{job.name}, a step with {{}} / with adamw"
    blocks: dict[str, Callable[[], float]] = {}
    for name in ("adamw", *OPTIMIZERS):
        try:
            steps = steps_of(_trainer(bench, job, f"optimizer={name}"))
            blocks[name] = partial(stopwatch(steps, bench.hardware.device), job.steps)
        except UserError as error:  # the library that has it is not installed
            yield Row(title.format(name), "x", [], f"not measured: {error}")
    times = interleave(blocks, bench.repeats)
    for name in list(blocks)[1:]:
        yield Row(title.format(name), "x", ratios(times, name, "adamw"), job.line(f"optimizer={name}"))


def diagnostics(bench: Bench) -> Iterator[Row]:
    """Measure a step that ``diagnostics=numerics`` looks at beside one that it does not, in turns."""
    options = ("recipe=gpt2", "recipe.size=nano", "data.tokenizer=bytes", "precision=nvfp4", "diagnostics=numerics")
    job = Job("gpt2 nano nvfp4", options)
    trainer = _trainer(bench, job, "diagnostics.every=2")
    half = trainer.precision.half
    session = trainer.config.diagnostics.start(trainer.model, trainer.update, half, trainer.world)

    def take(microbatches: list[Batch]) -> None:
        session.begin(trainer.step + 1)
        trainer.train_step(microbatches)
        list(session.collect())

    block = stopwatch(over(trainer.batches(), take), trainer.device)
    seconds = [block(1) for _ in range(2 + 2 * bench.repeats)][2:]
    measured = [looked / plain for plain, looked in zip(seconds[::2], seconds[1::2], strict=True)]
    yield Row(f"{job.name}, a step that diagnostics=numerics looks at / another", "x", measured, job.line())


def parallel(bench: Bench) -> Iterator[Row]:
    """Measure Mantissa's DDP against torch's own in two processes."""
    hardware, name = bench.hardware, f"{PROCESSES} processes, Mantissa's DDP over torch's DDP written by hand"
    if hardware.is_gpu and torch.cuda.device_count() < PROCESSES:
        yield Row(name, "%", [], f"not measured: needs {PROCESSES} GPUs")
        return
    options = (f"precision={bench.mode}", "clip=norm", "parallel=ddp")
    file, torchrun = bench.folder / "times.json", f"torchrun --nproc-per-node={PROCESSES}"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}"]
    command += ["-m", "benchmarks.ratios", str(file), str(bench.repeats), *options]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, hardware.cpu_cores // PROCESSES))}
    ended = shell.run(command, cwd=PROJECT, env=environment)
    if ended.code:
        raise RunError(f"{' '.join(command)} ended with status {ended.code}:\n{ended.output[-2000:]}")
    overhead = [100 * (ratio - 1) for ratio in ratios(json.loads(file.read_text()), "mantissa", "bare")]
    line = gpt2_job(hardware).line(*options).removeprefix("python ")
    yield Row(name, "%", overhead, f"{torchrun} {line}; {STEPS} steps a repeat, alternating in the same processes", 3.0)


class BareDDP(BareLoop):
    """The hand-written loop around torch's DistributedDataParallel with its defaults."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.model = nn.parallel.DistributedDataParallel(self.model)


def _rank(file: str, repeats: str, *options: str) -> None:
    """Run as one of the processes that ``parallel`` starts."""
    hardware = detect("auto")
    config = gpt2_job(hardware).config(*options, ENDLESS)
    world = config.parallel.world("auto")
    trainer = Trainer.from_config(config, hardware, world)
    workload = Workload(trainer)
    workload.batch_size = trainer.plan.batching.micro_batch_size
    loops = {"mantissa": steps_of(trainer), "bare": BareDDP(workload).run}
    blocks = {name: partial(stopwatch(loop, trainer.device), STEPS) for name, loop in loops.items()}
    times = interleave(blocks, int(repeats))
    if world.is_main:
        Path(file).write_text(json.dumps(times))
    dist.destroy_process_group()


def max_batch(bench: Bench) -> Iterator[Row]:
    """Measure the largest batch of ResNet-50 that fits in 1 GiB; what fits needs no repeats."""
    options = ["recipe=resnet", "recipe.arch=resnet50", "recipe.image_size=64", "data=synthetic", "data.samples=512"]
    title, how = "resnet50, largest batch in 1 GiB, {}", f"python scripts/max_batch.py {' '.join(options)} precision="
    largest = dict[str, int]()
    for mode in ("fp32", "bf16"):
        given = [*options, f"precision={mode}", f"device={bench.hardware.device}"]
        largest[mode] = largest_micro_batch(given, 2**30).micro_batch_size
        yield Row(title.format(mode), "images", [largest[mode]], f"{how}{mode} memory_budget=1GiB")
    yield Row(title.format("bf16 / fp32"), "x", [largest["bf16"] / largest["fp32"]], "the two above")


def startup(bench: Bench) -> Iterator[Row]:
    """Measure the seconds from the start of a process to its first step, and to the report of a mistake."""
    train = ["recipe=gpt2", f"precision={bench.mode}", "steps=1", "eval_samples=1", f"device={bench.hardware.device}"]
    mistake = ["precision=bf61"]

    def seconds(*arguments: str, code: int = 0, until: str | None = None) -> float:
        return _seconds([sys.executable, str(PROJECT / "scripts/train.py"), *arguments], bench.folder, code, until)

    seconds(*train, "checkpoint=none")  # fills caches
    blocks = {
        "first step": lambda: seconds(*train, until="     step "),
        "mistake": lambda: seconds(*mistake, code=2),
    }
    times = interleave(blocks, min(bench.repeats, 3), warm_up=0)
    how = "python scripts/train.py {}; warm caches"
    yield Row("command to the end of the first step", "s", times["first step"], how.format(" ".join(train)), 5.0)
    yield Row("command to the error message", "s", times["mistake"], how.format(" ".join(mistake)), 1.5)


def documented(bench: Bench) -> Iterator[Row]:
    """Run the README's first commands as they are: the seconds of each whole process, and what it reaches."""
    for number, (command, metric, unit) in enumerate(DOCUMENTED):
        place = bench.folder / str(number)
        words = shlex.split(command)[1:]
        full = [sys.executable, str(PROJECT / words[0]), *words[1:], f"output_dir={place}", "tracking=local"]
        ended = shell.run(full, cwd=bench.folder)
        if ended.code:
            raise RunError(f"{command} ended with status {ended.code}:\n{ended.output[-2000:]}")
        (summary,) = (json.loads(path.read_text(encoding="utf-8")) for path in place.glob("*/summary.json"))
        how = f"{command} tracking=local; one run"
        yield Row(f"{command}: time", "s", [ended.seconds], how)
        reached = summary["final"][metric] * (100 if unit == "%" else 1)
        yield Row(f"{command}: {metric}", unit, [reached], how)


def _seconds(command: list[str], folder: Path, code: int, until: str | None) -> float:
    """Return the seconds until a process ends with ``code``, or prints a line that begins with ``until``.

    Raises:
        RunError: it ended otherwise.
    """
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    began, printed = time.perf_counter(), []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if until is not None and line.startswith(until):
                seconds = time.perf_counter() - began
                process.terminate()
                return seconds
    if until is None and process.returncode == code:
        return time.perf_counter() - began
    raise RunError(f"{' '.join(command)} ended with status {process.returncode}:\n{''.join(printed[-20:])}")


if __name__ == "__main__":
    _rank(*sys.argv[1:])
