"""The measurements of scripts/bench.py: ratios between loops that alternate in one process, under the same load."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from evidence.bench.inference import evaluation, generation
from evidence.bench.jobs import Job, gpt2_job, resnet_job, steps_of
from evidence.bench.loading import loader
from evidence.bench.measurement import Bench, Measurement
from evidence.bench.nanogpt import nanogpt
from evidence.bench.overhead import peak_memory, trainer_cost
from evidence.bench.parts import diagnostics_cost, ema_cost, optimizers
from evidence.bench.peers import peers
from evidence.bench.roofline import roofline
from evidence.bench.scale import parallel, saving
from evidence.bench.turns import Row, ratios, stopwatch
from mantissa.formats import BASIC
from trainer.errors import RunError
from trainer.files import PROJECT
from trainer.hardware import UNAVAILABLE, Hardware
from trainer.precision import kernels
from trainer.trainer import Trainer

Variants = dict[str, tuple[str, ...]]
"""Overrides by the name of the variant."""
BF16_TARGET = 1.8


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
            yield Row(_throughput(job, fast, slow), "x", [], f"left out: {why}")
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
        kernels.clear()  # those of the block before
        trainer.config.precision.apply(trainer.in_fp32_arithmetic)  # sets flags of the whole process
        return timed(job.steps)

    return block


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
    "peers": peers,
    "nanogpt": nanogpt,
    "roofline": roofline,
    "optimizers": optimizers,
    "diagnostics": diagnostics_cost,
    "ema": ema_cost,
    "memory": peak_memory,
    "loader": loader,
    "generation": generation,
    "evaluation": evaluation,
    "startup": startup,
    "saving": saving,
    "parallel": parallel,
}
