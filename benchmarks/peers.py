"""Other frameworks beside the trainer: the same model, weights, batches, precision and optimizer, side by side.

Each trains the workload by its own loop.
"""

from __future__ import annotations

import logging
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.jobs import LOG_EVERY, MAX_NORM, TINY_MLP, Job, Workload, endless, gpt2_job, resnet_job
from benchmarks.overhead import (
    PEAK_STEP,
    After,
    Fit,
    Loop,
    alternate,
    bare,
    first_steps,
    mantissa,
    memory_is_by,
    stepwise,
)
from benchmarks.rows import Bench, Row, ratios
from evidence.stopwatch import Block
from mantissa.tensors import synchronise
from trainer.config.schema import Config
from trainer.data.contract import Batch
from trainer.data.loader import to_device
from trainer.hardware import Hardware
from trainer.trainer import Trainer

FIT_WARM_UP = 3
"""Optimizer steps of a framework's fit that are not timed; every repeat is a new fit."""
ALIKE = 0.01
"""Loops train alike where their weights differ by less than this share of the distance that they went."""
MANTISSA = "Mantissa"


def fitted(fit: Fit, model: nn.Module, optimizer: torch.optim.Optimizer) -> Loop:
    """Return a loop that cannot be called step by step: a block is one whole fit, timed after its first steps."""
    device = next(model.parameters()).device

    def block(steps: int) -> float:
        ended: dict[int, float] = {}

        def after(step: int) -> None:
            if step in (FIT_WARM_UP, FIT_WARM_UP + steps):
                synchronise(device)
                ended[step] = time.perf_counter()

        fit(FIT_WARM_UP + steps, after)
        return ended[FIT_WARM_UP + steps] - ended[FIT_WARM_UP]

    return Loop(model, optimizer, fit, block)


def accelerate(workload: Workload, folder: Path) -> Loop:
    """Return the loop of accelerate's quick tour."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # which holds the precision of the job before
    precision = "bf16" if workload.in_bf16 else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=workload.device.type == "cpu")
    plain = workload.model()
    plain_optimizer = workload.optimizer(plain)
    model, optimizer, loader = accelerator.prepare(plain, plain_optimizer, workload.loader())
    batches = endless(loader)
    log: list[float] = []
    taken = 0

    def run(steps: int) -> None:
        nonlocal taken
        for _ in range(steps):
            with accelerator.autocast():
                loss = workload.mean_loss(model, next(batches))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            if taken % LOG_EVERY == 0:
                log.append(loss.item())

    return stepwise(run, plain, plain_optimizer)


def timm(workload: Workload, folder: Path) -> Loop:
    """Return the loop of timm's training script, with its means of loss and time; it has no function for it."""
    from timm.utils import AverageMeter, dispatch_clip_grad

    model = workload.model()
    optimizer = workload.optimizer(model)
    batches = endless(workload.loader())
    losses, times = AverageMeter(), AverageMeter()

    def run(steps: int) -> None:
        for _ in range(steps):
            began, batch = time.time(), to_device(next(batches), workload.device)
            with workload.precision.autocast(workload.device):
                loss = workload.mean_loss(model, batch)
            loss.backward()
            dispatch_clip_grad(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.update(loss.item(), workload.batch_size)
            times.update(time.time() - began)

    return stepwise(run, model, optimizer)


class _WithLoss(nn.Module):
    """Model and loss in one forward, as transformers' Trainer expects."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.workload = workload
        self.model = model

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.workload.mean_loss(self.model, batch)}


def transformers_trainer(workload: Workload, folder: Path) -> Loop:
    """Return fits of transformers' Trainer."""
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments
    from transformers import Trainer as TransformersTrainer

    model = workload.model()
    optimizer = workload.optimizer(model)

    class WithLoader(TransformersTrainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(workload.loader(lambda batch: {"batch": batch}))

    def fit(steps: int, after: After) -> None:
        class Watched(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                after(state.global_step)

        arguments = TrainingArguments(
            output_dir=str(folder / "transformers"),
            max_steps=steps,
            per_device_train_batch_size=workload.batch_size,
            learning_rate=workload.lr,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_NORM,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=workload.device.type == "cpu",
            bf16=workload.in_bf16,
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # it would split the batch among all GPUs
        # A new wrapper for each fit: accelerate wraps the forward of what it is given, and would do so again and again.
        trainer = WithLoader(
            _WithLoss(workload, model), arguments, train_dataset=workload.dataset(),
            optimizers=(optimizer, None), callbacks=[Watched()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    return fitted(fit, model, optimizer)


def lightning_trainer(workload: Workload, folder: Path) -> Loop:
    """Return fits of Lightning's Trainer."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = workload.model()
    optimizer = workload.optimizer(model, fused=not workload.in_bf16)

    class Module(lightning.LightningModule):
        after: After

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = workload.mean_loss(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.after(self.trainer.global_step)

    module = Module()

    def fit(steps: int, after: After) -> None:
        module.after = after
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it advises to use loader workers; no loop here has any
            trainer = lightning.Trainer(
                accelerator=workload.device.type,
                devices=1,
                precision="bf16-mixed" if workload.in_bf16 else "32-true",
                max_steps=steps,
                gradient_clip_val=MAX_NORM,
                log_every_n_steps=LOG_EVERY,
                default_root_dir=folder / "lightning",
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                logger=False,
            )
            interrupted = signal.getsignal(signal.SIGINT)
            try:
                trainer.fit(module, workload.loader())
            except SystemExit:  # what it makes of Ctrl-C, after which it ignores further ones
                signal.signal(signal.SIGINT, interrupted)
                raise KeyboardInterrupt from None

    return fitted(fit, model, optimizer)


@dataclass(frozen=True)
class Framework:
    """A framework to measure beside the trainer."""

    name: str
    make: Callable[[Workload, Path], Loop]
    """Maker of the loop, from the workload and a folder for what the framework writes."""
    needs: tuple[str, ...]
    """Packages; the first is the one whose version is shown."""
    note: str = ""
    """Difference from the loop written by hand, in words."""

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
    Framework("accelerate", accelerate, ("accelerate",)),
    Framework("transformers.Trainer", transformers_trainer, ("transformers", "accelerate")),
    Framework(
        "Lightning",
        lightning_trainer,
        ("lightning",),
        note="under autocast its AdamW is not fused, because Lightning then does not clip gradients for a fused one",
    ),
    Framework("timm", timm, ("timm",)),
)


def peers_jobs(hardware: Hardware) -> tuple[Job, ...]:
    """Return a language, a vision and a tiny model; on a CPU small enough for minutes."""
    tiny = replace(TINY_MLP, steps=500, rounds=1)
    if hardware.is_gpu:
        return replace(gpt2_job(hardware), steps=50, rounds=1), replace(resnet_job(hardware), steps=20, rounds=1), tiny
    language = ("recipe=gpt2", "recipe.size=mini", "data=synthetic", "data.vocab_size=4096", "batch_size=4")
    vision = ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=64", "data=synthetic", "data.classes=10")
    return Job("gpt2 mini", language, 5), Job("resnet18", (*vision, "batch_size=32"), 10), tiny


def peers(bench: Bench, jobs: Sequence[Job] = (), frameworks: Sequence[Framework] = FRAMEWORKS) -> Iterator[Row]:
    """Measure a step of each framework and of the trainer, over one of a loop written by hand; and say its memory.

    All loops are in one process, and take turns: they have the same kernels and the same allocator.
    """
    for job, mode in product(jobs or peers_jobs(bench.hardware), dict.fromkeys((bench.mode, "fp32"))):
        yield from side_by_side(bench, job, mode, frameworks)


def side_by_side(bench: Bench, job: Job, mode: str, frameworks: Sequence[Framework]) -> Iterator[Row]:
    """Measure the loops of one job in one precision."""
    device = bench.hardware.device
    options = [f"precision={mode}", "clip=norm", "schedule=constant", "schedule.warmup_steps=0"]
    options += [f"log_every={LOG_EVERY}", "checkpoint=none"]
    config = job.config(*options, f"device={device}")
    workload = Workload(Trainer.from_config(config, bench.hardware)).first_batches(PEAK_STEP)
    baseline = first_steps(partial(bare, workload), device)
    way = _distance(baseline.weights, workload.weights)
    titles: dict[str, str] = {}
    beside: dict[str, str] = {}
    timed: list[Framework] = []
    for name, known, note, make in _loops(config, bench, workload, frameworks):
        title = f"{job.name} {mode}, {{}} of {name} {known}".rstrip() + " / bare loop"
        try:
            first = first_steps(make, device)
        except Exception as error:  # the others are measured without it
            yield Row(title.format("step"), "x", [], f"failed: {type(error).__name__}: {error}")
            continue
        drift = _distance(first.weights, baseline.weights) / way
        said = f"; after {PEAK_STEP} steps its weights differ by {drift:.2%} of the distance that the bare loop's moved"
        said = ("" if drift < ALIKE else "; NOT the same training") + said + (f"; {note}" if note else "")
        titles[name] = title.format("step")
        peak = f"{first.peak_bytes / baseline.peak_bytes:.3f}x"
        beside[name] = f"peak memory of the third step {peak}, by {memory_is_by(device)}{said}"
        timed += [framework for framework in frameworks if framework.name == name]

    def blocks(workload: Workload) -> dict[str, Block]:
        return {framework.name: framework.make(workload, bench.folder).block for framework in timed}

    times = alternate(bench, job, options, blocks)
    for name, title in titles.items():
        key = "trainer" if name == MANTISSA else name
        how = f"{job.line(*options)}; {job.steps * job.rounds} steps a repeat; {beside[name]}"
        yield Row(title, "x", ratios(times, key, "bare"), how)


def _loops(
    config: Config, bench: Bench, workload: Workload, frameworks: Sequence[Framework]
) -> Iterator[tuple[str, str, str, Callable[[], Loop]]]:
    """Yield name, version, note and maker of the trainer's loop and of the frameworks' that are installed."""
    yield MANTISSA, "", "", partial(mantissa, config, bench.hardware)
    for framework in frameworks:
        known, why = framework.installed()
        if why:
            print(f"  {framework.name}: {why}")
        else:
            yield framework.name, known, framework.note, partial(framework.make, workload, bench.folder)


def _distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Return the Euclidean distance between the weights of two loops."""
    return math.sqrt(sum(float((own - others[name]).double().square().sum()) for name, own in weights.items()))
