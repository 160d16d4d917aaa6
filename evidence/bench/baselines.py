"""The baselines of the trainer: a loop written by hand, and other frameworks."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evidence.bench.turns import Block, stopwatch, synchronise
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.data.loader import to_device
from trainer.trainer import Trainer

LOG_EVERY = 10
MAX_NORM = 1.0
FIT_WARM_UP = 3
"""Optimizer steps of a framework's fit that are not timed; every repeat is a new fit."""


class _Indexed(torch.utils.data.Dataset[Batch]):
    """A recipe's dataset for torch's DataLoader: takes indices, returns a whole batch."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.dataset.batch([SampleId(index, None) for index in indices])


class Workload:
    """What every baseline trains: the model class, data, loss and optimizer of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.recipe = trainer.recipe
        self.device = trainer.device
        self.precision = trainer.config.precision
        self.lr = trainer.config.optimizer.lr
        self.batch_size = trainer.plan.batching.batch_size
        self.datasets = trainer.datasets
        self.dataset = _Indexed(trainer.datasets.train)

    def model(self) -> nn.Module:
        """Return a new model on the device."""
        return self.recipe.build_model(self.datasets).to(self.device)

    def optimizer(self, model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        """Return AdamW with weight decay for matrices only; ``fused``: in one kernel per group."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=fused)

    def loader(self) -> DataLoader[Batch]:
        """Return the usual shuffling DataLoader."""
        pin = self.device.type == "cuda"
        return DataLoader(
            self.dataset,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=lambda batch: batch,
            pin_memory=pin,
        )

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""
        return self.recipe.loss(model, batch).loss_sum / self.recipe.count_targets(batch)


class BareLoop:
    """A careful loop written by hand: autocast, clipping, a fused optimizer, the loss read every ten steps."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self.batches = chain.from_iterable(repeat(workload.loader()))
        self.step = 0
        self.log: list[tuple[int, float]] = []

    def run(self, steps: int) -> None:
        """Take optimizer steps."""
        workload, model, optimizer = self.workload, self.model, self.optimizer
        device = workload.device
        for _ in range(steps):
            batch = to_device(next(self.batches), device)
            with workload.precision.autocast(device):
                loss = workload.mean_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self.log.append((self.step, loss.item()))


def accelerate_block(workload: Workload, folder: Path) -> Block:
    """Return the loop of accelerate's quick tour, block by block."""
    from accelerate import Accelerator

    mode = workload.precision.mode
    precision = mode if mode in ("bf16", "fp16") else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=workload.device.type == "cpu")
    model = workload.model()
    model, optimizer, loader = accelerator.prepare(model, workload.optimizer(model), workload.loader())
    batches = chain.from_iterable(repeat(loader))
    log: list[float] = []

    def loop(steps: int) -> None:
        for step in range(steps):
            with accelerator.autocast():
                loss = workload.mean_loss(model, next(batches))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                log.append(loss.item())

    return stopwatch(loop, workload.device)


class _WithLoss(nn.Module):
    """Model and loss in one forward, as transformers' Trainer expects."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.model = workload.model()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.workload.mean_loss(self.model, batch)}


class _FitClock:
    """Times the steps of a fit after its first ``FIT_WARM_UP``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def after_step(self, step: int, last: int) -> None:
        if step in (FIT_WARM_UP, last):
            synchronise(self.device)
            now = time.perf_counter()
            if step == FIT_WARM_UP:
                self._began = now
            else:
                self.seconds = now - self._began


def transformers_block(workload: Workload, folder: Path) -> Block:
    """Return fits of transformers' Trainer, one per block."""
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments
    from transformers import Trainer as TransformersTrainer

    model = _WithLoss(workload)
    clock = _FitClock(workload.device)

    class Timer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.after_step(state.global_step, state.max_steps)

    def block(steps: int) -> float:
        arguments = TrainingArguments(
            output_dir=str(folder / "transformers"),
            max_steps=FIT_WARM_UP + steps,
            per_device_train_batch_size=workload.batch_size,
            learning_rate=workload.lr,
            optim="adamw_torch_fused",
            max_grad_norm=MAX_NORM,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_drop_last=True,
            dataloader_pin_memory=workload.device.type == "cuda",
            use_cpu=workload.device.type == "cpu",
            bf16=workload.precision.mode == "bf16",
            fp16=workload.precision.mode == "fp16",
        )

        def collate(batch: Batch) -> dict[str, Batch]:
            return {"batch": batch}

        trainer = TransformersTrainer(model, arguments, collate, workload.dataset, callbacks=[Timer()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return clock.seconds

    return block


def lightning_block(workload: Workload, folder: Path) -> Block:
    """Return fits of Lightning's Trainer, one per block."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = _FitClock(workload.device)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model()

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = workload.mean_loss(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.optimizer(self.model, fused=False)  # clipping refuses fused ones under autocast

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            clock.after_step(self.trainer.global_step, self.trainer.max_steps)

    module = Module()
    precision: Any = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(workload.precision.mode, "32-true")

    def block(steps: int) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it advises to use loader workers; no loop here has any
            trainer = lightning.Trainer(
                accelerator=workload.device.type,
                devices=1,
                precision=precision,
                max_steps=FIT_WARM_UP + steps,
                gradient_clip_val=MAX_NORM,
                log_every_n_steps=LOG_EVERY,
                default_root_dir=folder / "lightning",
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                logger=False,
            )
            trainer.fit(module, workload.loader())
        return clock.seconds

    return block


@dataclass(frozen=True)
class Framework:
    """A framework to measure beside the trainer."""

    name: str
    block: Callable[[Workload, Path], Block]
    whole_fit: bool
    """Whether a block is one whole call of the framework's fit, made once for each repeat."""
    needs: tuple[str, ...]

    def missing(self) -> str | None:
        """Return why it cannot be measured, without importing it; None: it can."""
        try:
            versions = {package: version(package) for package in self.needs}
        except PackageNotFoundError as error:
            return f"{error.name} is not installed"
        # The uploads 2.6.2 and 2.6.3 were malicious and act when imported (GHSA-w37p-236h-pfx3).
        if not versions.get("lightning", "2.5.").startswith("2.5."):
            return f"lightning {versions['lightning']} is installed; only 2.5 is measured"
        return None


FRAMEWORKS = (
    Framework("accelerate", accelerate_block, False, ("accelerate",)),
    Framework("transformers.Trainer", transformers_block, True, ("transformers", "accelerate")),
    Framework("Lightning", lightning_block, True, ("lightning",)),
)
