"""The frameworks that are measured beside the trainer: each trains the same workload, by its own loop."""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evidence.bench.baselines import LOG_EVERY, MAX_NORM, BareLoop, Workload, endless
from evidence.bench.overhead import PEAK_STEP, Watch, watched
from evidence.bench.turns import Block, stopwatch, synchronise
from trainer.data.contract import Batch
from trainer.data.loader import to_device

FIT_WARM_UP = 3
"""Optimizer steps of a framework's fit that are not timed; every repeat is a new fit."""
Fit = Callable[[int, Watch], None]
"""Takes a number of optimizer steps in one call of the framework's own fit, and calls the watch around each."""


@dataclass(frozen=True)
class Loop:
    """A framework's loop over a workload, ready to be measured."""

    model: nn.Module
    """The recipe's own model."""
    block: Block
    first_steps: Callable[[Watch], None]
    """Takes ``PEAK_STEP`` steps, watched."""


def stepwise(run: Callable[[int], object], model: nn.Module, optimizer: torch.optim.Optimizer) -> Loop:
    """Return a loop that can be called step by step."""
    device = next(model.parameters()).device
    return Loop(model, stopwatch(run, device), partial(watched, run, model, optimizer))


def fitted(fit: Fit, model: nn.Module) -> Loop:
    """Return a loop of which every block is one whole fit."""
    device = next(model.parameters()).device

    def block(steps: int) -> float:
        clock = _FitClock(device)
        fit(FIT_WARM_UP + steps, clock)
        return clock.seconds

    return Loop(model, block, partial(fit, PEAK_STEP))


class _FitClock:
    """Times the steps of a fit after its first ``FIT_WARM_UP``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def before(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pass

    def after(self, step: int, last: int) -> None:
        if step in (FIT_WARM_UP, last):
            synchronise(self.device)
            now = time.perf_counter()
            if step == FIT_WARM_UP:
                self._began = now
            else:
                self.seconds = now - self._began


def bare(workload: Workload, folder: Path) -> Loop:
    """Return the loop written by hand."""
    loop = BareLoop(workload)
    return stepwise(loop.run, loop.model, loop.optimizer)


def accelerate(workload: Workload, folder: Path) -> Loop:
    """Return the loop of accelerate's quick tour."""
    from accelerate import Accelerator

    mode = workload.precision.mode
    precision = mode if mode in ("bf16", "fp16") else "no"
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
    mode = workload.precision.mode

    class WithLoader(TransformersTrainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(workload.loader(lambda batch: {"batch": batch}))

    def fit(steps: int, watch: Watch) -> None:
        class Watched(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                watch.before(state.global_step + 1, model, optimizer)

            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                watch.after(state.global_step, state.max_steps)

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
            bf16=mode == "bf16",
            fp16=mode == "fp16",
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # it would split the batch among all GPUs
        # A new wrapper for each fit: accelerate wraps the forward of what it is given, and would do so again and again.
        trainer = WithLoader(
            _WithLoss(workload, model), arguments, train_dataset=workload.dataset,
            optimizers=(optimizer, None), callbacks=[Watched()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    return fitted(fit, model)


def lightning_trainer(workload: Workload, folder: Path) -> Loop:
    """Return fits of Lightning's Trainer."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = workload.model()
    precision: Any = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(workload.precision.mode, "32-true")
    optimizer = workload.optimizer(model, fused=not _under_autocast(workload.precision.mode))

    class Module(lightning.LightningModule):
        watch: Watch

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = workload.mean_loss(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.watch.before(self.trainer.global_step + 1, model, optimizer)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.watch.after(self.trainer.global_step, self.trainer.max_steps)

    module = Module()

    def fit(steps: int, watch: Watch) -> None:
        module.watch = watch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it advises to use loader workers; no loop here has any
            trainer = lightning.Trainer(
                accelerator=workload.device.type,
                devices=1,
                precision=precision,
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

    return fitted(fit, model)


def _under_autocast(mode: str) -> bool:
    return mode in ("bf16", "fp16")


def _of_lightning(mode: str) -> str:
    why = "AdamW is not fused, because under autocast Lightning does not clip gradients for a fused one"
    return why if _under_autocast(mode) else ""


def _of_timm(mode: str) -> str:
    return "a loop of its optimizer, schedule, clipping and meters; its train script is no part of the package"


def timm_parts(workload: Workload, folder: Path) -> Loop:
    """Return a loop of timm's optimizer, schedule, clipping, scaler and meters.

    timm's train script is no part of its package. As in it, gradients are cleared before the backward pass, and the
    loss is read in every step.
    """
    from timm.optim import create_optimizer_v2
    from timm.scheduler import StepLRScheduler
    from timm.utils import AverageMeter, NativeScaler, dispatch_clip_grad

    device = workload.device
    model = workload.model()
    optimizer = create_optimizer_v2(
        model, "adamw", lr=workload.lr, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    schedule = StepLRScheduler(optimizer, decay_t=10**9, t_in_epochs=False)  # constant
    scaler = NativeScaler(device.type) if workload.precision.mode == "fp16" else None
    losses = AverageMeter()
    batches = endless(workload.loader())
    taken = 0

    def run(steps: int) -> None:
        nonlocal taken
        for _ in range(steps):
            batch = to_device(next(batches), device)
            with workload.precision.autocast(device):
                loss = workload.mean_loss(model, batch)
            losses.update(loss.item(), workload.batch_size)
            optimizer.zero_grad()
            if scaler is not None:
                scaler(loss, optimizer, MAX_NORM, parameters=model.parameters())
            else:
                loss.backward()
                dispatch_clip_grad(model.parameters(), MAX_NORM)
                optimizer.step()
            taken += 1
            schedule.step_update(taken, losses.avg)

    return stepwise(run, model, optimizer)


@dataclass(frozen=True)
class Framework:
    """A framework to measure beside the trainer."""

    name: str
    make: Callable[[Workload, Path], Loop]
    needs: tuple[str, ...]
    """Packages; the first is the one whose version is shown."""
    whole_fit: bool = False
    """Whether a block is one whole call of the framework's fit, made once for each repeat."""
    vision_only: bool = False
    note: Callable[[str], str] = lambda mode: ""
    """Takes the precision, and returns in what it differs from the loop written by hand."""

    @property
    def version(self) -> str:
        """The installed version, or an empty string."""
        try:
            return version(self.needs[0])
        except PackageNotFoundError:
            return ""

    def missing(self) -> str | None:
        """Return why it cannot be measured, without importing it; None: it can."""
        try:
            versions = {package: version(package) for package in self.needs}
        except PackageNotFoundError as error:
            return f"{error.name} is not installed; make bench-peers installs it"
        # The uploads 2.6.2 and 2.6.3 were malicious and act when imported (GHSA-w37p-236h-pfx3).
        if not versions.get("lightning", "2.5.").startswith("2.5."):
            return f"lightning {versions['lightning']} is installed; only 2.5 is measured"
        return None


FRAMEWORKS = (
    Framework("accelerate", accelerate, ("accelerate",)),
    Framework("transformers.Trainer", transformers_trainer, ("transformers", "accelerate"), whole_fit=True),
    Framework("Lightning", lightning_trainer, ("lightning",), whole_fit=True, note=_of_lightning),
    Framework("timm's parts", timm_parts, ("timm",), vision_only=True, note=_of_timm),
)
