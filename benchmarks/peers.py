"""Other frameworks beside the trainer, each as its user runs it: a process of its own, in turns.

The model, its initial weights, the samples, learning rate, clipping and precision are the same. Kernels, allocator,
optimizer's implementation and logging are each program's own: the trainer is ``python scripts/train.py``, the others
are ``benchmarks/loops.py``, which imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.jobs import MAX_NORM, Job, Workload, gpt2_job
from benchmarks.rows import Bench, Row, Times, interleave, ratios
from mantissa.verdict import shell
from recipes.data.images.pixels import IMAGENET_MEAN, IMAGENET_STD
from recipes.resnet import ResNet
from trainer.errors import RunError
from trainer.files import PROJECT
from trainer.trainer import Trainer

LOOPS = PROJECT / "benchmarks/loops.py"
MANTISSA, BARE = "Mantissa", "bare"
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


def peers_jobs(bench: Bench) -> tuple[Job, ...]:
    """Return a language model of a long and of a short context, and ResNet-50; on a GPU one language model.

    There, loading images would be the limit of the others, which read them in the process that trains. The first half
    of the steps is not timed: MLflow is imported beside it.
    """
    if bench.hardware.is_gpu:
        return (replace(gpt2_job(bench.hardware), steps=60),)
    language = ("recipe=gpt2", "recipe.size=mini", "data=synthetic", "data.vocab_size=4096")
    vision = ("recipe=resnet", "recipe.arch=resnet50", "data=synthetic", "batch_size=16")
    return (
        Job("gpt2 mini 16 x 256", (*language, "batch_size=16", "recipe.context=256"), steps=12),
        Job("gpt2 mini 8 x 64", (*language, "batch_size=8", "recipe.context=64"), steps=100),
        Job("resnet50 batch 16", vision, steps=10),
    )


def peers(bench: Bench, jobs: Sequence[Job] = (), frameworks: Sequence[Framework] = FRAMEWORKS) -> Iterator[Row]:
    """Measure a step of each framework and of the trainer over one of a bare loop."""
    for job, mode in product(jobs or peers_jobs(bench), dict.fromkeys((bench.mode, "fp32"))):
        yield from side_by_side(bench, job, mode, frameworks)


def side_by_side(bench: Bench, job: Job, mode: str, frameworks: Sequence[Framework]) -> Iterator[Row]:
    """Measure the programs of one job in one precision.

    A first round is not timed: it shows which of them cannot run, and whether they train alike.
    """
    options = _options(bench, job, mode)
    folder = bench.folder / f"{job.name} {mode}".replace(" ", "-")
    folder.mkdir()
    file = write_workload(bench, job, options, folder / "workload.pt")
    blocks = {MANTISSA: partial(_train, job, options, folder), BARE: partial(_loop, BARE, file, job.steps)}
    known = {MANTISSA: MANTISSA, BARE: BARE}
    for framework in frameworks:
        shown, why = framework.installed()
        if why:
            print(f"  {framework.name}: {why}")
        else:
            known[framework.name] = f"{framework.name} {shown}"
            blocks[framework.name] = partial(_loop, framework.name, file, job.steps)
    losses: dict[str, float] = {}
    for name in list(blocks):
        try:
            losses[name] = blocks[name]()["loss"]
        except RunError as error:
            if name == BARE:
                raise
            yield Row(f"{job.name} {mode}, step of {known[name]} / bare loop", "x", [], f"failed: {error}")
            del blocks[name]

    def seconds(name: str) -> float:
        return float(blocks[name]()["seconds"])

    times: Times = interleave({name: partial(seconds, name) for name in blocks}, bench.repeats, warm_up=0)
    for name in [name for name in blocks if name != BARE]:
        drift = abs(losses[name] / losses[BARE] - 1)
        how = f"{job.line(*options)}; the mean of the last {job.steps - job.steps // 2} steps, a process each repeat"
        how += f"; loss {losses[name]:.3f}, bare {losses[BARE]:.3f}" + ("" if drift < ALIKE else ": NOT alike")
        yield Row(f"{job.name} {mode}, step of {known[name]} / bare loop", "x", ratios(times, name, BARE), how)


def _options(bench: Bench, job: Job, mode: str) -> list[str]:
    return [
        f"precision={mode}", f"device={bench.hardware.device.type}", "clip=norm", f"clip.max_norm={MAX_NORM:g}",
        "schedule=constant", "schedule.warmup_steps=0", f"steps={job.steps}", f"eval_every={job.steps}",
        "eval_samples=1", f"log_every={job.steps // 2}", "checkpoint=none",
    ]  # fmt: skip


def write_workload(bench: Bench, job: Job, options: Sequence[str], file: Path) -> Path:
    """Write model, initial weights, samples and numbers of a job for ``benchmarks/loops.py``."""
    trainer = Trainer.from_config(job.config(*options), bench.hardware)
    workload = Workload(trainer)
    batch = workload.fetch(workload.order[: job.steps * workload.batch_size])
    weights = {name.removeprefix("gpt2."): tensor for name, tensor in workload.weights.items()}
    samples: list[Tensor]
    if isinstance(trainer.recipe, ResNet):
        config: dict[str, Any] = {"arch": trainer.recipe.arch, "classes": len(weights["fc.bias"])}
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        samples = [(batch["image"] / 255 - mean) / std, batch["label"]]
    else:
        config = trainer.model.gpt2.config.to_diff_dict()  # type: ignore[union-attr, operator]
        samples = [batch["tokens"][:, :-1]]
    numbers = {"lr": workload.lr, "batch_size": workload.batch_size}
    place = {"device": bench.hardware.device.type, "precision": trainer.config.precision.mode}
    torch.save(numbers | place | {"config": config, "weights": weights, "samples": samples}, file)
    return file


def _train(job: Job, options: Sequence[str], folder: Path) -> dict[str, float]:
    """Run the trainer's command; return seconds and loss of a step in its second half, as it logs their means."""
    output = folder / f"run-{len(list(folder.iterdir()))}"
    place = (f"output_dir={output}", "run_name=run", f"tracking.uri=sqlite:///{folder}/mlflow.db")
    _run([sys.executable, str(PROJECT / "scripts/train.py"), *job.overrides, *options, *place])
    rows = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next(row for row in reversed(rows) if "step_time_s" in row)
    return {"seconds": last["step_time_s"], "loss": last["loss"]}


def _loop(name: str, file: Path, steps: int) -> dict[str, float]:
    return dict(json.loads(_run([sys.executable, str(LOOPS), name, str(file), str(steps)]).splitlines()[-1]))


def _run(command: list[str]) -> str:
    ended = shell.run(command, errors_apart=True)
    if ended.code:
        raise RunError((ended.errors.strip().splitlines() or [f"exit code {ended.code}"])[-1])
    return ended.output
