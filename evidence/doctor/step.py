"""A step of the trainer, as the doctor takes it again: the trainer's own model, optimizer and loss, in one process."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.errors import FormatError
from mantissa.formats import FORMATS, FP32, Format, with_masters
from mantissa.step.batch import Batch
from mantissa.step.flags import flags_of
from mantissa.step.remedies import Remedies
from mantissa.step.step import Step
from mantissa.step.updates import UpdateMeter
from mantissa.tensors import random_state, set_random_state
from trainer.config.command_line import as_typed
from trainer.config.schema import Config
from trainer.config.settle import Settled
from trainer.data.loader import DataOrder, to_device
from trainer.errors import UserError
from trainer.optim.groups import LR_FACTOR
from trainer.optim.masters import StochasticWeights
from trainer.optim.optimizer import Optimizer
from trainer.parallel.compile import Compile
from trainer.parallel.world import World
from trainer.parallel.wrap import Parallel
from trainer.precision.modes import Precision
from trainer.precision.modules import OPTION, with_islands
from trainer.precision.names import typed
from trainer.precision.scaler import StaticScaler
from trainer.trainer import Trainer


class Typed(str):
    """Overrides as a shell reads them, and no other words."""


class Overrides(Remedies):
    """What to set on the command line.

    Args:
        optimizer: of the run.
        precision: of the run.
        folder: of the run; None: there is none yet.
    """

    deterministic = Typed("deterministic=true")
    eager = Typed("compile=off")
    time_budget = "time_budget={:.0f}s"

    def __init__(self, optimizer: Optimizer, precision: Precision, folder: Path | None) -> None:
        self._optimizer, self._precision = optimizer, precision
        self.fresh_state = "a fresh state of the optimizer at this step"
        if folder is not None:
            self.fresh_state = Typed(shlex.quote(f"init_from={as_typed(str(folder))}"))

    def modules(self, names: Sequence[str]) -> Typed:
        return Typed(typed(OPTION, with_islands(self._precision.modules, names)))

    def operators(self, names: Sequence[str]) -> Typed:
        return Typed(f'"precision.fp32_ops=[{",".join(names)}]"')

    def format(self, format: Format) -> Typed:
        had, other = self._precision, self._precision.in_mode(format.name)
        modules = [typed(OPTION, other.modules)] * (other.modules != had.modules)
        return Typed(" ".join([f"precision={format.name}", *modules]))

    def rate(self, factor: float) -> Typed:
        return Typed(f"optimizer.lr={self._optimizer.lr * factor:.6g}")

    def scale(self, value: float) -> Typed:
        return Typed(f"scaler=dynamic scaler.init={value:.10g}")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerStep(Step):
    """A step of the trainer."""

    sums_loss: bool = True
    config: Config
    """Config of the run."""
    settled: Settled
    order: DataOrder
    prototype: nn.Module
    """The recipe's model, which is copied for each replay."""

    def build(self, format: Format, as_run: bool) -> _Eager:
        try:
            with flags_of(format.number):  # a trainer sets them, and the run's own stay
                return _Eager(self, replace(self.settled, world=World(), config=self._config_in(format)))
        except UserError as error:
            raise FormatError(str(error)) from error

    def _config_in(self, format: Format) -> Config:
        """Return the config of the run, for one eager process in a format whose loss scale the replay sets."""
        precision = self.config.precision.in_mode(format.name)
        return replace(
            self.config,
            precision=replace(
                precision, modules=with_islands(precision.modules, self.fp32_modules), fp32_ops=self.fp32_ops or None
            ),
            scaler=StaticScaler(force=True, scale=1.0),
            compile=Compile(),
            parallel=Parallel(),
        )

    @property
    def unit_roundoff(self) -> float:
        modes = self.config.precision.in_mode(self.format.name).formats
        return max(FORMATS[mode].number.unit_roundoff for mode in modes)

    def batches(self, first: int, count: int) -> list[list[Batch]]:
        samples, batching, hardware = self.settled.datasets.train, self.settled.batching, self.settled.hardware
        return list(self.config.loader.steps(samples, self.order, batching, first - 1, count, hardware=hardware))

    def count(self, microbatches: list[Batch]) -> int:
        return max(1, sum(map(self.config.recipe.count_targets, microbatches)))

    def loss_divisor(self, count: int, format: Format) -> tuple[float, float]:
        return Precision(mode=format.name).loss_divisor(count)

    def with_fp32_weights(self) -> TrainerStep:
        return self.in_format(with_masters(self.format.number))


def step_of(trainer: Trainer, folder: Path | None = None) -> TrainerStep:
    """Copy what the next step of a trainer starts from; ``folder`` is that of its run."""
    trainer.enter(trainer.next_precision)
    config = replace(trainer.config, precision=trainer.precision)
    settled, hardware, datasets = trainer.plan, trainer.hardware, trainer.datasets
    format, order = config.precision.format, trainer.order
    # Data may draw from the generators, before the step does.
    (microbatches,) = config.loader.steps(datasets.train, order, settled.batching, trainer.step, 1, hardware=hardware)

    # What the optimizer changes, and what it has kept.
    kept = trainer.model if isinstance(trainer.masters, StochasticWeights) else trainer.masters or trainer.model
    names = {id(parameter): name for name, parameter in (trainer.masters or trainer.model).named_parameters()}
    moments = {
        names[id(parameter)]: {key: _copy(value) for key, value in state.items()}
        for parameter, state in trainer.optimizer.state.items()
    }

    # A model to copy, which draws nothing that the step would: the trainer may take it, too, with its own dropout.
    generators = random_state(trainer.device)
    prototype = trainer.recipe.build_model(datasets)
    set_random_state(generators, trainer.device)
    return TrainerStep(
        remedies=Overrides(config.optimizer, config.precision, folder),
        number=trainer.step + 1,
        format=format,
        written_in=format,
        device=trainer.device,
        microbatches=microbatches,
        weights={name: _copy(tensor) for name, tensor in kept.named_parameters()},
        stored={name: _copy(tensor) for name, tensor in trainer.model.named_parameters()},
        buffers={name: _copy(tensor) for name, tensor in trainer.model.named_buffers()},
        generators=generators,
        moments=moments,
        scale=trainer.loss_scale.scale.item(),
        least_scale=config.scaler.floor if trainer.loss_scale.recovers else 0.0,
        fp32_modules=[name for name, mode in config.precision.modules.items() if mode == FP32.name],
        fp32_ops=config.precision.fp32_ops or [],
        eps=max((group.get("eps") or 0.0 for group in trainer.optimizer.param_groups), default=0.0),
        compiles=config.compile.mode != "off",
        round_as_eager=config.precision.rounds_as_eager,
        config=config,
        settled=settled,
        order=order,
        prototype=prototype,
    )


class _Eager(Trainer):
    """A trainer of one process, whose model is a copy of a step's and whose gradients come from a replay."""

    def __init__(self, step: TrainerStep, settled: Settled) -> None:
        self._prototype = step.prototype
        super().__init__(settled)

    def first_model(self) -> nn.Module:
        return copy.deepcopy(self._prototype).to(self.device)

    @property
    def clip(self) -> Any:
        return self.config.clip

    def loss(self, batch: Batch) -> Tensor:
        return self.recipe.loss(self.model, to_device(batch, self.device)).loss_sum

    def autocast(self) -> AbstractContextManager[Any]:
        return self.config.precision.autocast(self.device)

    @torch.no_grad()
    def stand_before(self, step: Step) -> None:
        """Make the optimizer and the schedule stand where the run did."""
        self.step = step.number - 1
        for name, parameter in (self.masters or self.model).named_parameters():
            for key, value in step.moments.get(name, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    value = torch.empty_like(parameter).copy_(value)
                elif isinstance(value, Tensor):
                    value = value.clone()
                self.optimizer.state[parameter][key] = value
        for group in self.optimizer.param_groups:
            group[LR_FACTOR] = group[LR_FACTOR] * step.lr_factor

    def end_step(self, scale: float, correction: float, meter: UpdateMeter | None) -> None:
        """Take the optimizer's step with the gradients that backward left, and count it."""
        self._set_lr()
        self.loss_scale.scale.fill_(scale)
        self.update.meter = meter
        self.finish(correction)
        self.update.meter = None


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
