"""Other frameworks beside the trainer, each as its user runs it: in a process of its own, which stands still until
its next turn.

The model, its initial weights, the samples, learning rate, clipping and precision are the same. Kernels, allocator,
optimizer's implementation and logging are each program's own: the trainer is ``python scripts/train.py``, the others
are ``benchmarks/loops.py``, which imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.jobs import MAX_NORM, Job, Workload
from benchmarks.rows import Bench, Row, interleave, ratios
from recipes.data.images.pixels import IMAGENET_MEAN, IMAGENET_STD
from recipes.resnet import ResNet
from trainer.errors import RunError
from trainer.files import PROJECT
from trainer.trainer import Trainer

LOOPS = PROJECT / "benchmarks/loops.py"
MANTISSA, BARE = "Mantissa", "bare"
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1  # see prctl(2)
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes a command that the kernel kills where its parent is killed; else it would stand still for ever."""
SPARE = 4
"""Lines more than are timed, so that no program ends before its last turn does."""
ALIKE = 0.02
"""Programs train alike where their losses differ by less than this share: transformers' own loss leaves out the last
token of each sample, and weight decay is each optimizer's own."""


@dataclass(frozen=True)
class Framework:
    """A framework to measure beside the trainer; the name is that of its loop in ``benchmarks/loops.py``."""

    name: str
    needs: tuple[str, ...]
    """Packages; the first is the one whose version is shown."""

    def installed(self) -> tuple[str, str]:
        """Return its version and, without importing it, why it cannot be measured (empty: it can)."""
        try:
            first, *_ = [version(package) for package in self.needs]
        except PackageNotFoundError as error:
            return "", f"{error.name} is not installed; make bench-peers installs it"
        # The uploads 2.6.2 and 2.6.3 were malicious and act when imported (GHSA-w37p-236h-pfx3).
        unsafe = self.needs[0] == "lightning" and not first.startswith("2.5.")
        return first, f"lightning {first} is installed; only 2.5 is measured" if unsafe else ""


FRAMEWORKS = (
    Framework("accelerate", ("accelerate",)),
    Framework("transformers.Trainer", ("transformers", "accelerate")),
    Framework("Lightning", ("lightning",)),
)


class Program:
    """A training in a process group of its own, which stands still until its turn.

    Args:
        command: what starts it; the first word is the path of a program.
        lines: JSONL that it appends to; those that count have ``step``, ``step_time_s`` and ``loss``.
        errors: file for what it prints as errors.
    """

    def __init__(self, command: Sequence[str], lines: Path, errors: Path) -> None:
        self.lines, self.errors = lines, errors
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # transformers would take all
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENDS_WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
                process_group=0,
            )

    def turn(self) -> float:
        """Let it train for two lines, and return the ``step_time_s`` of the second: the pause is in that of the first.

        Raises:
            RunError: it has ended.
        """
        end = len(self.rows()) + 2
        self._signal(signal.SIGCONT)
        while len(rows := self.rows()) < end:
            if self.process.poll() is not None:
                lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                last = (lines or [f"exit code {self.process.returncode}"])[-1]
                raise RunError(f"{self.errors.stem}: {last}")
            time.sleep(0.05)
        self._signal(signal.SIGSTOP)
        return float(rows[end - 1]["step_time_s"])

    def rows(self) -> list[dict[str, Any]]:
        """Return its lines so far."""
        text = self.lines.read_text(encoding="utf-8") if self.lines.exists() else ""
        whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in map(json.loads, whole) if {"step", "step_time_s", "loss"} <= set(row)]

    def close(self) -> None:
        """Kill all of the group."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, number)


def peers_jobs(bench: Bench) -> tuple[Job, ...]:
    """Return a language model of a long and of a short context, and ResNet-50; on a GPU one language model.

    There, loading images would be the limit of the others, which read them in the process that trains.
    """
    if bench.hardware.is_gpu:  # all five programs are in its memory at once
        overrides = ("recipe=gpt2", "recipe.size=124M", "data=synthetic", "batch_size=4")
        return (Job("gpt2 124M 4 x 1024", overrides, steps=50),)
    language = ("recipe=gpt2", "recipe.size=mini", "data=synthetic", "data.vocab_size=4096")
    vision = ("recipe=resnet", "recipe.arch=resnet50", "data=synthetic", "batch_size=16")
    return (
        Job("gpt2 mini 16 x 256", (*language, "batch_size=16", "recipe.context=256")),
        Job("gpt2 mini 8 x 64", (*language, "batch_size=8", "recipe.context=64"), steps=10),
        Job("resnet50 batch 16", vision),
    )


def peers(bench: Bench) -> Iterator[Row]:
    """Measure a step of each framework and of the trainer over one of a bare loop."""
    for job, mode in product(peers_jobs(bench), dict.fromkeys((bench.mode, "fp32"))):
        yield from side_by_side(bench, job, mode, FRAMEWORKS)


def side_by_side(bench: Bench, job: Job, mode: str, frameworks: Sequence[Framework]) -> Iterator[Row]:
    """Measure the programs of one job in one precision.

    Two turns of each are not timed: the first shows which of them cannot run, the second ends imports beside the steps.
    """
    options = _options(bench, job, mode)
    folder = bench.folder / f"{job.name} {mode}".replace(" ", "-")
    folder.mkdir()
    file = write_workload(bench, job, options, folder / "workload.pt")
    known = {MANTISSA: MANTISSA, BARE: BARE}
    for framework in frameworks:
        shown, why = framework.installed()
        if why:
            print(f"  {framework.name}: {why}")
        else:
            known[framework.name] = f"{framework.name} {shown}"
    with ExitStack() as stack:
        programs: dict[str, Program] = {}
        for name in known:
            program = stack.enter_context(closing(_started(name, job, options, file)))
            try:
                program.turn()
            except RunError as error:
                if name == BARE:
                    raise
                yield Row(f"{job.name} {mode}, step of {known[name]} / bare loop", "x", [], f"failed: {error}")
            else:
                programs[name] = program
        times = interleave({name: each.turn for name, each in programs.items()}, bench.repeats)
        losses = {name: {row["step"]: row["loss"] for row in each.rows()} for name, each in programs.items()}
    common = sorted(set.intersection(*map(set, losses.values())))
    alike = {name: fmean(of[step] for step in common) for name, of in losses.items()}
    for name in [name for name in programs if name != BARE]:
        drift = abs(alike[name] / alike[BARE] - 1)
        how = f"{job.line(*options)}; turns of {2 * job.steps} steps, the second half timed"
        how += f"; loss to step {common[-1]}: {alike[name]:.3f}, bare {alike[BARE]:.3f}"
        values = ratios(times, name, BARE)
        if drift >= ALIKE:
            how, values = f"{how}: NOT alike", []
        yield Row(f"{job.name} {mode}, step of {known[name]} / bare loop", "x", values, how)


def _options(bench: Bench, job: Job, mode: str) -> list[str]:
    steps = job.steps * (2 * (bench.repeats + 2) + SPARE)
    return [
        f"precision={mode}", f"device={bench.hardware.device.type}", "clip=norm", f"clip.max_norm={MAX_NORM:g}",
        "schedule=constant", "schedule.warmup_steps=0", f"steps={steps}", f"eval_every={steps}",
        "eval_samples=1", f"log_every={job.steps}", "checkpoint=none",
    ]  # fmt: skip


def write_workload(bench: Bench, job: Job, options: Sequence[str], file: Path) -> Path:
    """Write model, initial weights, samples and numbers of a job for ``benchmarks/loops.py``."""
    trainer = Trainer.from_config(job.config(*options), bench.hardware)
    workload = Workload(trainer)
    batch = workload.fetch(trainer.order.samples(0, trainer.plan.steps * workload.batch_size))
    weights = {name.removeprefix("gpt2."): tensor for name, tensor in workload.weights.items()}
    samples: list[Tensor]
    if isinstance(trainer.recipe, ResNet):
        config: dict[str, Any] = {"arch": trainer.recipe.arch, "classes": len(weights["fc.bias"])}
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        samples = [(batch["image"] / 255 - mean) / std, batch["label"]]
    else:
        config = trainer.model.gpt2.config.to_diff_dict()  # type: ignore[union-attr, operator]
        samples = [batch["tokens"][:, :-1]]
    numbers = {"lr": workload.lr, "batch_size": workload.batch_size, "every": job.steps}
    place = {"device": bench.hardware.device.type, "precision": trainer.config.precision.mode}
    torch.save(numbers | place | {"config": config, "weights": weights, "samples": samples}, file)
    return file


def _started(name: str, job: Job, options: Sequence[str], file: Path) -> Program:
    """Start a program, which writes a line every ``job.steps`` steps."""
    folder = file.parent
    lines, errors = folder / f"{name}.jsonl", folder / f"{name}.err"
    if name != MANTISSA:
        return Program([sys.executable, str(LOOPS), name, str(file), str(lines)], lines, errors)
    place = (f"output_dir={folder}", "run_name=run", f"tracking.uri=sqlite:///{folder}/mlflow.db")
    command = [sys.executable, str(PROJECT / "scripts/train.py"), *job.overrides, *options, *place]
    return Program(command, folder / "run/metrics.jsonl", errors)
