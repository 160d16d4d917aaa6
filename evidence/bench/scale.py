"""Measurements of checkpointing in the background, and of several processes against torch's own DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evidence.bench.baselines import BareLoop, Workload
from evidence.bench.jobs import Job, gpt2_job, steps_of
from evidence.bench.measurement import Bench
from evidence.bench.turns import Row, interleave, ratios, stopwatch
from trainer.checkpoint.store import Checkpoint
from trainer.checkpoint.writer import CheckpointWriter
from trainer.errors import RunError
from trainer.files import PROJECT
from trainer.hardware import detect
from trainer.parallel.world import World
from trainer.trainer import Trainer

PROCESSES = 2
STEPS = 4
"""Optimizer steps in a block."""


def saving(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure how long the loop waits for a checkpoint, and how much writing it slows the next steps."""
    hardware = bench.hardware
    (job,) = jobs or (gpt2_job(hardware),)
    options = (f"precision={bench.mode}", "clip=norm", f"device={hardware.device}", "steps=1000000")
    trainer = Trainer.from_config(job.config(*options), hardware)
    block = stopwatch(steps_of(trainer), hardware.device)
    for background in (True, False):
        how = "in the background" if background else "in the loop (checkpoint.background=false)"
        writer = CheckpointWriter(Checkpoint(background=background), bench.folder / str(background), World())
        stalls, slowed = [], []
        for repeat in range(bench.repeats + 1):
            bench.report(
                f"{job.name}: a checkpoint {how}, {f'repeat {repeat} of {bench.repeats}' if repeat else 'warm-up'}"
            )
            alone = block(STEPS)
            stall = writer.save(trainer.state_dict(), {}, None)
            after = block(STEPS)
            writer.finish()
            if repeat:  # the first repeat allocates host memory and is a warm-up
                stalls.append(100 * stall / (alone / STEPS))
                slowed.append(100 * (after + stall - alone) / (alone / STEPS))
        measured = f"{job.line(*options[:2])}; one checkpoint after every {STEPS} steps"
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
    found = {count: _in_processes(count, bench, overrides) for count in (1, PROCESSES)}
    line = found[PROCESSES]["line"]
    times = found[PROCESSES]["times"]
    one, two = found[1]["times"]["mantissa"], times["mantissa"]
    cores = f"{hardware.cpu_cores} cores" if not hardware.is_gpu else f"{PROCESSES} GPUs"
    yield Row(
        f"{PROCESSES} processes, Mantissa's DDP over torch's DDP written by hand",
        "%",
        [100 * (ratio - 1) for ratio in ratios(times, "mantissa", "bare")],
        f"torchrun --nproc-per-node={PROCESSES} {line}; {STEPS} steps a repeat, alternating in the same processes",
        3.0,
    )
    yield Row(
        f"step time, {PROCESSES} processes vs. one with the same global batch, {cores}",
        "x",
        [a / b for a, b in zip(two, one, strict=True)],
        f"{line}; vs. parallel=single; one job after the other, not alternating",
    )


def _in_processes(count: int, bench: Bench, overrides: Sequence[str]) -> dict[str, Any]:
    bench.report(f"{count} process{'es' * (count > 1)}, {bench.repeats} repeats")
    file = bench.folder / f"{count}.json"
    options = (f"precision={bench.mode}", "clip=norm", *overrides)
    command = [sys.executable, "-m", "evidence.bench.scale", str(file), str(bench.repeats), *options]
    if count > 1:
        command[1:2] = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "-m"]
    threads = str(max(1, bench.hardware.cpu_cores // count))
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


class BareDDP(BareLoop):
    """The hand-written loop around torch's DistributedDataParallel with its defaults."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.model = nn.parallel.DistributedDataParallel(self.model)


def _rank(file: str, repeats: str, *options: str) -> None:
    """Run as one of the processes that ``parallel`` starts."""
    mode = "ddp" if "RANK" in os.environ else "single"
    job = gpt2_job(detect("auto"))
    config = job.config(*options, f"parallel={mode}", "steps=1000000")
    world = config.parallel.world("auto")
    trainer = Trainer.from_config(config, detect("auto"), world)
    blocks = {"mantissa": stopwatch(steps_of(trainer), trainer.device)}
    if mode == "ddp":
        workload = Workload(trainer)
        workload.batch_size = trainer.plan.batching.micro_batch_size
        blocks["bare"] = stopwatch(BareDDP(workload).run, trainer.device)
    times = interleave({name: partial(block, STEPS) for name, block in blocks.items()}, int(repeats))
    if world.first:
        Path(file).write_text(
            json.dumps({"line": job.line(*options, "parallel=ddp").removeprefix("python "), "times": times})
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(*sys.argv[1:])
