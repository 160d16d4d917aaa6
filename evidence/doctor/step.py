"""A step of the trainer, as the doctor takes it again: the trainer's own model, optimizer and loss, in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.errors import FormatError
from mantissa.formats import FORMATS
from mantissa.step.memory import available_bytes
from mantissa.step.step import Built, Remedies, Step
from mantissa.step.updates import UpdateMeter
from mantissa.tensors import random_state, set_random_state
from trainer.config.schema import Config
from trainer.config.settle import Settled
from trainer.data.loader import to_device
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.optim.groups import LR_FACTOR
from trainer.optim.masters import StochasticWeights
from trainer.parallel.compile import Compile
from trainer.parallel.world import World
from trainer.parallel.wrap import Parallel
from trainer.precision.modes import Precision
from trainer.precision.scaler import StaticScaler
from trainer.trainer import Trainer


class Overrides(Remedies):
    """What to set on the command line."""

    deterministic = "deterministic=true"
    eager = "compile=off"
    fresh_state = "a new run with init_from= this one, whose optimizer begins anew"
    time_budget = "time_budget={:.0f}s"

    def modules(self, names: Sequence[str]) -> str:
        quoted = (name if any(map(str.isalpha, name)) else f"'{name}'" for name in names)  # 0.10 would be a number
        return f'"precision.fp32_modules=[{",".join(quoted)}]"'

    def operators(self, names: Sequence[str]) -> str:
        return f'"precision.fp32_ops=[{",".join(names)}]"'

    def format(self, name: str) -> str:
        return f"precision={name}"

    def rate(self, factor: float) -> str:
        return f"an optimizer.lr of {factor:g} times this one"

    def scale(self, value: float) -> str:
        return f"scaler=dynamic scaler.init={value:.10g}"


def step_of(trainer: Trainer) -> Step:
    """Copy what the next step of a trainer starts from."""
    config, plan, recipe, masters = trainer.config, trainer.plan, trainer.recipe, trainer.masters
    hardware, datasets = trainer.hardware, trainer.datasets
    steps = partial(config.loader.steps, datasets.train, trainer.order, plan.batching, hardware=hardware)
    (microbatches,) = steps(trainer.step, 1)  # data may draw from the generators, before the step does
    kept = trainer.model if masters is None or isinstance(masters, StochasticWeights) else masters
    names = {id(parameter): name for name, parameter in (masters or trainer.model).named_parameters()}
    moments = {
        names[id(parameter)]: {key: _copy(value) for key, value in state.items()}
        for parameter, state in trainer.optimizer.state.items()
    }
    generators = random_state(trainer.device)
    prototype = recipe.build_model(datasets)
    set_random_state(generators, trainer.device)  # the trainer may take the step, too, with its own dropout

    def build(format: str, fp32_modules: list[str], fp32_ops: list[str], as_run: bool) -> Built:
        own = _in_format(config, format, fp32_modules, fp32_ops)
        try:
            eager = _Eager(replace(plan, config=own), hardware, prototype)
        except UserError as error:
            raise FormatError(str(error)) from error
        return Built(
            model=eager.model,
            optimizer=eager.optimizer,
            loss=lambda batch: eager.recipe.loss(eager.model, to_device(batch, eager.device)).loss_sum,
            autocast=partial(own.precision.autocast, eager.device),
            prepare=partial(eager.stand_before, moments),
            update=eager.end_step,
            fp32_modules=eager.fp32_modules,
            masters=eager.masters,
            clip=own.clip,
        )

    return Step(
        number=trainer.step + 1,
        format=config.precision.format,
        build=build,
        batches=lambda first, count: list(steps(first - 1, count)),
        device=trainer.device,
        microbatches=microbatches,
        weights={name: _copy(tensor) for name, tensor in kept.named_parameters()},
        stored={name: _copy(tensor) for name, tensor in trainer.model.named_parameters()},
        buffers={name: _copy(tensor) for name, tensor in trainer.model.named_buffers()},
        generators=generators,
        scale=trainer.loss_scale.scale.item(),
        least_scale=config.scaler.floor if trainer.loss_scale.recovers else 0.0,
        count=lambda batches: max(1, sum(map(recipe.count_targets, batches))),
        loss_divisor=lambda targets, format: Precision(mode=format.name).loss_divisor(targets),
        sums_loss=True,
        fp32_modules=config.precision.fp32_modules,
        fp32_ops=config.precision.fp32_ops or [],
        with_fp32_weights=f"{config.precision.format.number.name}_master",
        remedies=Overrides(),
        moments=moments,
        eps=max((group.get("eps") or 0.0 for group in trainer.optimizer.param_groups), default=0.0),
        compiles=config.compile.mode != "off",
        round_as_eager=config.precision.rounds_as_eager,
        free_bytes=partial(available_bytes, trainer.device),
    )


def _in_format(config: Config, format: str, fp32_modules: list[str], fp32_ops: list[str]) -> Config:
    """Return the config of a run, for one eager process in a format whose loss scale the replay sets."""
    own = config.precision
    precision = own if FORMATS[format].half is not None else Precision()
    if format != own.mode:
        precision = replace(precision, mode=format, fp8_scaling=None)
    precision = replace(precision, fp32_modules=fp32_modules, fp32_ops=fp32_ops or None)
    return replace(
        config,
        precision=precision,
        scaler=StaticScaler(force=True, scale=1.0),
        compile=Compile(),
        parallel=Parallel(),
    )


class _Eager(Trainer[Config]):
    """A trainer of one process whose model is a copy of a prototype, and whose gradients come from elsewhere."""

    def __init__(self, plan: Settled[Config], hardware: Hardware, prototype: nn.Module) -> None:
        self._prototype = prototype
        super().__init__(plan, hardware, World())

    def first_model(self) -> nn.Module:
        return copy.deepcopy(self._prototype).to(self.device)

    @torch.no_grad()
    def stand_before(self, moments: dict[str, dict[str, Any]], number: int, lr: float, fresh: bool) -> None:
        """Make the optimizer and the schedule stand where the run did before the step of this number."""
        self.step = number - 1
        for name, parameter in (self.masters or self.model).named_parameters():
            for key, value in () if fresh else moments.get(name, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    value = torch.empty_like(parameter).copy_(value)
                elif isinstance(value, Tensor):
                    value = value.clone()
                self.optimizer.state[parameter][key] = value
        for group in self.optimizer.param_groups:
            group[LR_FACTOR] *= lr

    def end_step(self, scale: float, correction: float, meter: UpdateMeter | None) -> None:
        """Take the optimizer's step with the gradients that backward left, and count it."""
        self._set_lr()
        self.loss_scale.scale.fill_(scale)
        self.update.meter = meter
        self.update.step(self.step, correction)
        self.update.meter = None
        self.step += 1


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
