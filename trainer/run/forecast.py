"""The memory of an optimizer step, forecast: the trainer's own step, taken with tensors that have no storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.step.ledger import Ledger
from trainer.config.schema import Config
from trainer.config.settle import Settled, alone, by_format, plan_of, settle
from trainer.data.contract import Batch, Datasets
from trainer.data.loader import OnDeviceLoader
from trainer.errors import RunError, UserError
from trainer.hardware import detect
from trainer.optim.masters import StochasticWeights
from trainer.optim.update import Update
from trainer.recipe import Recipe
from trainer.trainer import Trainer


def forecast(config: Config) -> Ledger:
    """Return the ledger of the second optimizer step (by then the optimizer has its state), of the eager model.

    Nothing is allocated but the datasets and two of their samples. The config is as composed.

    Raises:
        UserError: the config, the data or the hardware cannot do this.
        RunError: the computation depends on tensor values.
    """
    if config.parallel.kind != "single":
        raise UserError(
            f"parallel={config.parallel.kind}: memory is forecast and measured for one process only",
            "parallel=single",
        )
    settled = settle(plan_of(config, detect(config.device)))
    return ledger_of(alone(settled, settled.batching.micro_batch_size))


def ledger_of(settled: Settled) -> Ledger:
    """Return the ledger of a run of one process without torch.compile, see ``settle.alone``.

    Of several formats, that with the higher peak. Of accumulation, two microbatches are taken: in the second the
    gradients of the first exist, and all others repeat it. Recipes whose samples differ in shape are forecast for the
    shape of their first ones.

    Raises:
        RunError: the computation depends on tensor values.
    """
    return max(map(_ledger_of, by_format(settled)), key=lambda ledger: ledger.peak_bytes)


def _ledger_of(settled: Settled) -> Ledger:
    batching = settled.batching
    taken = min(2, batching.accumulation)
    try:
        # The model may hold tensors that are neither weights nor buffers: the mode takes their shapes.
        with FakeTensorMode(allow_non_fake_inputs=True):
            trainer = FakeTrainer(settled)
            microbatches = [trainer.microbatch() for _ in range(taken)]
            trainer.train_step(microbatches[:1])
            with trainer.ledger() as recording:
                trainer.train_step(microbatches)
            ledger = recording.report()
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        raise RunError(
            f"the computation of a step depends on tensor values ({error}), so its memory cannot be "
            "forecast; train with profiler=memory to measure it"
        ) from error
    # Microbatches that the loader puts on the device wait there.
    waiting = [tensor for tensor in microbatches[0].values() if tensor.device == trainer.device]
    more = (batching.accumulation - taken) * sum(tensor.nbytes for tensor in waiting)
    ledger.peak_bytes += more
    ledger.at_peak["inputs"] += more
    ledger.highest["inputs"] += more
    return ledger


def required_bytes(config: Config, ledger: Ledger) -> int:
    """Return what a run needs: the ledger's peak, and on a CPU a checkpoint's copy and the next step's samples."""
    copied = ("weights", "buffers", "optimizer") if copies_on_device(config) else ()
    loaded = ("inputs",) if not detect(config.device).is_gpu else ()
    return ledger.peak_bytes + sum(ledger.highest[name] for name in (*copied, *loaded))


def copies_on_device(config: Config) -> bool:
    """Return whether the host's copy of a checkpoint (weights, buffers, optimizer state) takes the device's memory."""
    return not detect(config.device).is_gpu and config.checkpoint.enabled and config.checkpoint.background


def meta_model(recipe: Recipe, datasets: Datasets) -> nn.Module:
    """Return the model without its weights where it can be built so, on the meta device."""
    try:
        with torch.device("meta"):
            return recipe.build_model(datasets)
    except (NotImplementedError, RuntimeError):  # one that computes while it is built
        return recipe.build_model(datasets)


class UpdateAlways(Update):
    """Takes every step: a fake flag cannot be read."""

    def read(self, flag: Tensor) -> bool:
        """Return that nothing overflowed."""
        return False

    def apply(self, skipped: Tensor) -> None:
        """Take the optimizer's step; the numbers that it reads from tensors are 1."""
        with _EveryNumberIsOne():
            super().apply(skipped)


class _EveryNumberIsOne(TorchDispatchMode):
    """Answers ``Tensor.item`` with 1: optimizers scale their updates by what they read (norms, counts of steps)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class FakeTrainer(Trainer):
    """A Trainer under FakeTensorMode: its tensors have shapes, dtypes and a device, and no storage.

    What is settled is without torch.compile.
    """

    update_class = UpdateAlways

    def __init__(self, settled: Settled) -> None:
        super().__init__(settled)
        if isinstance(self.masters, StochasticWeights):
            self.masters.free()
        with unset_fake_temporarily():
            self._sample = self.first_samples()
            """Real ones, which give the shapes of a batch."""

    def first_model(self) -> nn.Module:
        """Return the model with fake tensors in the place of its weights."""
        with unset_fake_temporarily():
            model = meta_model(self.recipe, self.datasets)
        return _fake_model(model, self.device)

    def microbatch(self) -> Batch:
        """Return a microbatch of the plan's size, where the loader would put it."""
        size = self.plan.batching.micro_batch_size
        device = self.device if isinstance(self.config.loader, OnDeviceLoader) else None
        return {
            name: torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
            for name, tensor in self._sample.items()
        }

    def count(self, microbatches: list[Batch]) -> tuple[int, int]:
        """Count real samples: any number does, and fake ones have no values."""
        with unset_fake_temporarily():
            return super().count([self._sample])


def _fake_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Make a fake tensor of everything in the model.

    (Built as fake tensors it could not be converted: ``Module.to`` cannot swap them.)
    """
    fakes: dict[int, Tensor] = {}  # a shared parameter stays shared
    for module in model.modules():
        holders: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in holders:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fakes.setdefault(id(tensor), _fake(tensor, device))
    return model


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
