"""One training by another framework, in a process of its own: ``python benchmarks/loops.py NAME WORKLOAD LINES``.

Each function is the loop that the framework's documentation shows first, changed only so that all train alike: torch's
AMP tutorial, accelerate's quick tour, transformers' and Lightning's Trainer. Nothing of this project is imported. The
file LINES gets JSON with ``step``, and the means of ``step_time_s`` and ``loss`` over the steps since the last line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

MAX_NORM = 1.0


class Workload:
    """What is trained, as ``benchmarks/peers.py`` wrote it: model, weights, samples, rate, precision, device.

    ``every`` is the number of steps of a line.
    """

    def __init__(self, file: Path) -> None:
        given = torch.load(file, weights_only=True)
        self.folder, self.every = file.parent, given["every"]
        self.device, self.lr, self.batch_size = torch.device(given["device"]), given["lr"], given["batch_size"]
        self.in_bf16 = given["precision"] == "bf16"
        self.dataset = TensorDataset(*given["samples"])
        self.steps = len(self.dataset) // self.batch_size
        self.model = _Model(given["config"])
        self.model.plain.load_state_dict(given["weights"])

    def loader(self) -> DataLoader[Any]:
        """Return the batches in their order."""
        return DataLoader(self.dataset, self.batch_size, drop_last=True)


class _Model(nn.Module):
    """A plain model of its library, and its mean loss on a batch."""

    plain: nn.Module

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        if "arch" in config:
            import torchvision

            self.plain = torchvision.models.get_model(config["arch"], num_classes=config["classes"])
        else:
            from transformers import GPT2Config, GPT2LMHeadModel

            self.plain = GPT2LMHeadModel(GPT2Config(**config))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            loss: Tensor = self.plain(input_ids=inputs, labels=inputs).loss
            return loss
        return F.cross_entropy(self.plain(inputs), labels)


class Meter:
    """Writes a line every few steps."""

    def __init__(self, workload: Workload, lines: TextIO) -> None:
        self.lines = lines
        self.every, self.device = workload.every, workload.device
        self.began = time.perf_counter()
        self.losses: list[Tensor] = []

    def after(self, step: int, loss: Tensor) -> None:
        """Note the loss of a step, counted from 1, at its end."""
        self.losses.append(loss.detach())
        if step % self.every == 0:
            self.line(step, float(torch.stack(self.losses).mean()))
            self.losses = []

    def line(self, step: int, loss: float) -> None:
        """Write the line that ends with a step, and its mean loss."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds = (now - self.began) / self.every
        print(json.dumps({"step": step, "step_time_s": seconds, "loss": loss}), file=self.lines, flush=True)
        self.began = now


def bare(workload: Workload, meter: Meter) -> None:
    """The loop of torch's tutorial on automatic mixed precision; bf16 needs no scaler."""
    device = workload.device
    model = workload.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr)
    for step, batch in enumerate(workload.loader(), start=1):
        batch = [tensor.to(device) for tensor in batch]
        with torch.autocast(device.type, torch.bfloat16, enabled=workload.in_bf16):
            loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        meter.after(step, loss)


def accelerate(workload: Workload, meter: Meter) -> None:
    """The loop of accelerate's quick tour."""
    from accelerate import Accelerator

    precision = "bf16" if workload.in_bf16 else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=workload.device.type == "cpu")
    plain = workload.model
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), lr=workload.lr), workload.loader()
    )
    for step, batch in enumerate(loader, start=1):
        loss = model(*batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        meter.after(step, loss)


def transformers_trainer(workload: Workload, meter: Meter) -> None:
    """A fit of transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model

        def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
            return {"loss": self.model(*batch)}

    class Watched(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **rest: Any) -> None:
            if "loss" in logs:
                meter.line(state.global_step, float(logs["loss"]))

    def collate(samples: list[tuple[Tensor, ...]]) -> dict[str, list[Tensor]]:
        return {"batch": [torch.stack(tensors) for tensors in zip(*samples, strict=True)]}

    class InOrder(Trainer):
        def _get_train_sampler(self, *given: Any) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(workload.dataset)

    arguments = TrainingArguments(
        output_dir=str(workload.folder / "transformers"),
        max_steps=workload.steps,
        per_device_train_batch_size=workload.batch_size,
        learning_rate=workload.lr,
        lr_scheduler_type="constant",
        logging_steps=workload.every,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        use_cpu=workload.device.type == "cpu",
        bf16=workload.in_bf16,
    )
    trainer = InOrder(
        WithLoss(), arguments, train_dataset=workload.dataset, data_collator=collate, callbacks=[Watched()]
    )
    trainer.train()


def lightning_trainer(workload: Workload, meter: Meter) -> None:
    """A fit of Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(*batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=workload.lr)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            meter.after(self.trainer.global_step, outputs["loss"])

    trainer = lightning.Trainer(
        accelerator="gpu" if workload.device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if workload.in_bf16 else "32-true",
        max_steps=workload.steps,
        gradient_clip_val=MAX_NORM,
        default_root_dir=workload.folder / "lightning",
    )
    trainer.fit(Module(), workload.loader())


LOOPS: dict[str, Callable[[Workload, Meter], None]] = {
    "bare": bare,
    "accelerate": accelerate,
    "transformers.Trainer": transformers_trainer,
    "Lightning": lightning_trainer,
}


def main(name: str, file: str, lines: str) -> None:
    """Train, and write what is measured."""
    workload = Workload(Path(file))
    with open(lines, "w", encoding="utf-8") as output:
        LOOPS[name](workload, Meter(workload, output))


if __name__ == "__main__":
    main(*sys.argv[1:])
