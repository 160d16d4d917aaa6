"""The jobs that the benchmarks train, and what every loop beside the trainer is given of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recipes.data.synthetic import Vectors
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.data.loader import OnDeviceLoader, to_device
from trainer.hardware import Hardware
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """A recipe with overrides, as on the command line."""

    name: str
    overrides: tuple[str, ...]
    steps: int = 1
    """Optimizer steps in one block, after which another loop has its turn."""
    rounds: int = 1
    """Blocks of each loop in one repeat."""
    recipe: type[Recipe] | None = None
    """Replaces the config's recipe; ``command`` then describes it."""
    command: str = "python scripts/train.py"
    threads: int | None = None
    """Number of threads of torch's operators on a CPU; None: torch's default."""

    def config(self, *further: str) -> Config:
        """Return the config of this job with further overrides."""
        config = compose([*self.overrides, *further])
        return config if self.recipe is None else replace(config, recipe=self.recipe())

    def line(self, *further: str) -> str:
        """Return the command that trains this, for the report."""
        return " ".join([self.command, *self.overrides, *further])


def gpt2_job(hardware: Hardware) -> Job:
    """Return GPT-2, 124M on a GPU and mini on a CPU, on synthetic tokens."""
    if hardware.is_gpu:
        return Job("gpt2 124M", ("recipe=gpt2", "recipe.size=124M", "data=synthetic", "batch_size=16"), 10, 5)
    overrides = ("recipe=gpt2", "recipe.size=mini", "data=synthetic", "data.vocab_size=4096", "batch_size=16")
    return Job("gpt2 mini", overrides, 2, 5)


def resnet_job(hardware: Hardware) -> Job:
    """Return ResNet-50 on 224 × 224 images; on a GPU the batch stays on the device, or loading would be the limit."""
    overrides = ("recipe=resnet", "recipe.arch=resnet50", "data=synthetic")
    if hardware.is_gpu:
        return Job("resnet50", (*overrides, "batch_size=128", "loader=synthetic-on-device"), 10, 2)
    return Job("resnet50", (*overrides, "batch_size=32"))


def shakespeare(text: str) -> Job:
    """Return nanoGPT's experiment on a file of text; empty: on the source of the standard library."""
    data = (f"data.path={text}",) if text else ("data=python_docs", "data.tokenizer=chars")
    return Job("shakespeare", ("experiment=shakespeare_cpu", *data), steps=5)


@dataclass
class TinyMLP(Recipe):
    """An MLP of 64 → 64 → 10. It has no name, so ``recipe=`` does not offer it."""

    def sizes(self, hardware: Hardware) -> Sizes:
        """Return sizes so small that most of a step is overhead."""
        return Sizes(steps=1000, batch_size=32, micro_batch_size=32)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        """Normal vectors, labelled by a fixed linear map."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8192, 64, generator=generator)
        labels = (x @ torch.randn(64, 10, generator=generator)).argmax(1)
        return Datasets(Vectors(x, labels), Vectors(x[:64], labels[:64]), "normal vectors")

    def build_model(self, datasets: Datasets) -> nn.Module:
        """Build the two layers."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def count_targets(self, batch: Batch) -> int:
        """One label per vector."""
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Cross-entropy."""
        return LossOutput(F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum"), {})


TINY_MLP = Job(
    "tiny MLP",
    ("data=synthetic", "batch_size=32"),
    steps=100,
    rounds=20,
    recipe=TinyMLP,
    command="one thread, an MLP of 64 → 64 → 10 as the recipe, with",
    threads=1,  # at this size, a second thread only waits at barriers
)
# No more samples than one batch: the ledger counts the data that a step touches, and the model is to be measured.
BIGNET = Job("bignet", ("recipe=bignet", "data=synthetic", "data.samples=512", "profiler=none"))

LOG_EVERY = 10
MAX_NORM = 1.0


class _Batches(torch.utils.data.Dataset[Batch]):
    """A dataset for torch's DataLoader that takes samples and returns a whole batch."""

    def __init__(self, size: int, fetch: Callable[[Sequence[SampleId]], Batch]) -> None:
        self.size, self.fetch = size, fetch

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, samples: list[SampleId]) -> Batch:
        return self.fetch(samples)


class Workload:
    """What every other loop trains: a trainer's model and initial weights, batches, loss and optimizer."""

    def __init__(self, trainer: Trainer) -> None:
        self.recipe = trainer.recipe
        self.device = trainer.device
        self.precision = trainer.config.precision
        self.lr = trainer.config.optimizer.lr
        self.batch_size = trainer.plan.batching.batch_size
        self.datasets = trainer.datasets
        self.weights = {name: tensor.detach().cpu().clone() for name, tensor in trainer.model.state_dict().items()}
        """The trainer's at this moment, on the CPU."""
        train = trainer.datasets.train
        self.order = trainer.order.samples(0, len(train))
        """Samples of the trainer's first epoch, and of each epoch of the others, in order."""
        self.on_device = isinstance(trainer.config.loader, OnDeviceLoader)
        self.fetch: Callable[[Sequence[SampleId]], Batch] = train.batch
        if self.on_device:
            first = to_device(train.batch(self.order[: self.batch_size]), self.device)
            self.fetch = lambda _: first

    def first_batches(self, count: int) -> Workload:
        """Return the workload with its first batches in memory, so that a step touches nothing else of the data.

        There is one more, for loaders that fetch ahead.
        """
        size = self.batch_size
        starts = range(0, min((count + 1) * size, len(self.order)), size)
        of_steps = [self.order[start : start + size] for start in starts]
        ready = {samples[0].index: self.fetch(samples) for samples in of_steps}
        workload = copy.copy(self)
        workload.fetch = lambda samples: ready[samples[0].index]
        return workload

    def model(self) -> nn.Module:
        """Return a new model on the device, with the trainer's weights."""
        model = self.recipe.build_model(self.datasets).to(self.device)
        model.load_state_dict(self.weights)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW with weight decay for matrices only, in one kernel per group."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)

    def loader(self) -> DataLoader[Any]:
        """Return torch's DataLoader over the trainer's order of samples."""
        return DataLoader(
            _Batches(len(self.order), self.fetch),
            self.batch_size,
            sampler=self.order,
            drop_last=True,
            collate_fn=lambda batch: batch,  # a whole one: see _Batches
            pin_memory=self.device.type == "cuda" and not self.on_device,
        )

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""
        return self.recipe.loss(model, batch).loss_sum / self.recipe.count_targets(batch)


def endless(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """Return the batches of epoch after epoch."""
    return chain.from_iterable(repeat(loader))


class BareLoop:
    """A careful loop written by hand: autocast, clipping, a fused optimizer, the loss read every ten steps."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        self.batches = endless(workload.loader())
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
