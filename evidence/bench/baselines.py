"""What every loop beside the trainer trains, and the first of them: a loop written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from trainer.data.contract import Batch, Dataset, SampleId
from trainer.data.loader import OnDeviceLoader, to_device
from trainer.trainer import Trainer

LOG_EVERY = 10
MAX_NORM = 1.0


class _Indexed(torch.utils.data.Dataset[Batch]):
    """A recipe's dataset for torch's DataLoader: takes samples, returns a whole batch."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, samples: list[SampleId]) -> Batch:
        return self.dataset.batch(samples)


class _OneBatch(_Indexed):
    """Returns the same batch each time, as ``loader=synthetic-on-device`` does."""

    batch: Batch

    def __getitems__(self, samples: list[SampleId]) -> Batch:
        return self.batch


class _Ready(_Indexed):
    """Returns batches that are in memory on their own, by the index of their first sample."""

    batches: dict[int, Batch]

    def __getitems__(self, samples: list[SampleId]) -> Batch:
        return self.batches[samples[0].index]


class _Shuffled(Sampler[SampleId]):
    """In the first epoch the trainer's order, later torch's shuffles: the same for every loop, and as cheap."""

    def __init__(self, first: list[SampleId]) -> None:
        self.first = first
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[SampleId]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if not epoch:
            return iter(self.first)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(epoch))
        return iter([self.first[index] for index in order.tolist()])


def _as_it_is(batch: Batch) -> Batch:
    return batch


class Workload:
    """What every baseline trains: a trainer's model and initial weights, batches, loss and optimizer."""

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
        self.dataset = _Indexed(train)
        self.on_device = isinstance(trainer.config.loader, OnDeviceLoader)
        if self.on_device:
            first = self.dataset.__getitems__(self.order[: self.batch_size])
            repeated = _OneBatch(train)
            repeated.batch = to_device(first, self.device)
            self.dataset = repeated

    def first_batches(self, count: int) -> Workload:
        """Return the workload with its first batches in memory, so that a step touches nothing else of the data.

        There is one more, for loaders that fetch ahead.
        """
        ready = _Ready(self.datasets.train)
        starts = range(0, (count + 1) * self.batch_size, self.batch_size)
        of_steps = [self.order[start : start + self.batch_size] for start in starts]
        ready.batches = {samples[0].index: self.dataset.__getitems__(samples) for samples in of_steps}
        workload = copy.copy(self)
        workload.dataset = ready
        return workload

    def model(self) -> nn.Module:
        """Return a new model on the device, with the trainer's weights."""
        model = self.recipe.build_model(self.datasets).to(self.device)
        model.load_state_dict(self.weights)
        return model

    def optimizer(self, model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        """Return AdamW with weight decay for matrices only; ``fused``: in one kernel per group."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=fused)

    def loader(self, collate: Callable[[Batch], Any] = _as_it_is) -> DataLoader[Any]:
        """Return torch's DataLoader over the trainer's order of samples; ``collate`` takes a whole batch."""
        return DataLoader(
            self.dataset,
            self.batch_size,
            sampler=_Shuffled(self.order),
            drop_last=True,
            collate_fn=collate,  # type: ignore[arg-type]
            pin_memory=self.device.type == "cuda" and not self.on_device,
        )

    def units(self) -> tuple[str, int]:
        """Return the recipe's unit (tokens, images, samples), and how many of them one step has."""
        batch = self.dataset.__getitems__(self.order[: self.batch_size])
        return self.recipe.unit, self.recipe.count_units(batch)

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
