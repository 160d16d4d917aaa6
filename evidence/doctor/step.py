"""A step of the trainer, as the doctor takes it again: the trainer's own code, in any format and in one process."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.errors import FormatError
from mantissa.formats import FORMATS
from mantissa.generators import random_state, set_random_state
from mantissa.ledger import MemoryLedger
from mantissa.loop import LEAST_SCALE
from mantissa.step import Batch, Remedies, Replay, Step, map_tensors
from trainer.config.schema import Config
from trainer.config.step import Plan
from trainer.data.contract import Datasets
from trainer.data.loader import DataOrder, to_device
from trainer.errors import UserError
from trainer.hardware import UNAVAILABLE, Hardware, available_bytes
from trainer.optim.groups import LR_FACTOR
from trainer.optim.masters import StochasticWeights
from trainer.parallel.activation import ActivationCheckpointing
from trainer.parallel.compile import Compile
from trainer.parallel.single import Parallel
from trainer.parallel.world import World
from trainer.precision.modes import Precision
from trainer.precision.scaler import StaticScaler
from trainer.trainer import Trainer


class Overrides(Remedies):
    """What to set on the command line."""

    deterministic = "deterministic=true"
    eager = "compile=off"
    fresh_state = "a new run with init_from= this one, whose optimizer begins anew"

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


@dataclass(kw_only=True)
class TrainerStep(Step):
    """The next step of a trainer."""

    remedies = Overrides()
    config: Config
    """Of the run, resolved."""
    plan: Plan
    hardware: Hardware
    datasets: Datasets
    generators: dict[str, Tensor]
    prototype: nn.Module
    """The recipe's model in fp32 on the host; its weights do not matter."""

    @classmethod
    def of(cls, trainer: Trainer) -> TrainerStep:
        """Copy what the next step of a trainer starts from."""
        config, masters = trainer.config, trainer.masters
        (microbatches,) = steps_of(trainer, trainer.step, 1)  # data may draw from the generators, before the step does
        kept = trainer.model if masters is None or isinstance(masters, StochasticWeights) else masters
        names = {id(parameter): name for name, parameter in (masters or trainer.model).named_parameters()}
        generators = random_state(trainer.device)
        prototype = trainer.recipe.build_model(trainer.datasets)
        set_random_state(generators, trainer.device)  # the trainer takes the step, too, with its own dropout
        return cls(
            number=trainer.step + 1,
            format=config.precision.format,
            fp32_modules=config.precision.fp32_modules,
            fp32_ops=config.precision.fp32_ops or [],
            compiles=config.compile.mode != "off",
            round_as_eager=config.precision.rounds_as_eager,
            device=trainer.device,
            microbatches=microbatches,
            weights={name: _copy(tensor) for name, tensor in kept.named_parameters()},
            stored={name: _copy(tensor) for name, tensor in trainer.model.named_parameters()},
            buffers={name: _copy(tensor) for name, tensor in trainer.model.named_buffers()},
            scale=trainer.loss_scale.scale.item(),
            least_scale=config.scaler.floor if trainer.loss_scale.recovers else 0.0,
            config=config,
            plan=trainer.plan,
            hardware=trainer.hardware,
            datasets=trainer.datasets,
            generators=generators,
            prototype=prototype,
            eps=max((group.get("eps") or 0.0 for group in trainer.optimizer.param_groups), default=0.0),
            moments={
                names[id(parameter)]: {key: _copy(each) for key, each in state.items()}
                for parameter, state in trainer.optimizer.state.items()
            },
        )

    def replay(
        self,
        format: str,
        *,
        as_run: bool = False,
        fp32_modules: list[str] | None = None,
        fp32_ops: list[str] | None = None,
        recompute: bool = True,
    ) -> TrainerReplay:
        precision = self.config.precision
        if FORMATS[format].half is None:
            precision = Precision(mode=format)
        elif format != precision.mode:
            precision = replace(precision, mode=format, fp8_scaling=None)
        if fp32_modules is not None:
            precision = replace(precision, fp32_modules=fp32_modules)
        if fp32_ops is not None:
            precision = replace(precision, fp32_ops=fp32_ops)
        config = replace(
            self.config,
            precision=precision,
            scaler=StaticScaler(force=True, scale=self.scale if as_run else 1.0),
            compile=Compile(),
            parallel=Parallel(),
            activation_checkpointing=self.config.activation_checkpointing if recompute else ActivationCheckpointing(),
        )
        try:
            return TrainerReplay(self, config, as_run)
        except UserError as error:
            raise FormatError(str(error)) from error

    def restore_generators(self) -> None:
        set_random_state(self.generators, self.device)

    def following(self, count: int) -> list[list[Batch]]:
        return list(steps_of(self, self.number - 1, count))

    def share(self, microbatches: list[Batch]) -> float:
        count = self.config.recipe.count_targets
        whole, part = (max(1, sum(map(count, batches))) for batches in (self.microbatches, microbatches))
        return part / self.config.precision.normaliser(whole)[0]

    def available(self, format: str) -> bool:
        return self.hardware.support(format) != UNAVAILABLE

    def free_bytes(self) -> int:
        return available_bytes(self.device)

    @property
    def with_fp32_weights(self) -> str:
        return f"{self.format.number.name}_master"


class TrainerReplay(Replay):
    """The passes of a trainer of its own, which stands before the step."""

    step: TrainerStep

    def __init__(self, step: TrainerStep, config: Config, as_run: bool) -> None:
        self.trainer = _Eager(step, config)
        mode, kept = config.precision.mode, self.trainer.fp32_modules
        super().__init__(step, mode, self.trainer.model, self.trainer.masters, kept, as_run)

    @property
    def scale(self) -> float:
        return self.trainer.loss_scale.scale.item()

    @scale.setter
    def scale(self, value: float) -> None:
        self.trainer.loss_scale.scale.fill_(value)

    def gradients(self, microbatches: list[Batch]) -> tuple[Tensor, float]:
        self.trainer.counted = self.microbatches
        found = self.trainer.gradients(microbatches)
        return found.loss, found.correction

    def loss(self, batch: Batch) -> Tensor:
        with self.autocast():
            return self.trainer.recipe.loss(self.model, to_device(batch, self.step.device)).loss_sum

    def autocast(self) -> AbstractContextManager[Any]:
        return self.trainer.config.precision.autocast(self.step.device)

    def blocks(self) -> list[nn.Module]:
        return list(self.trainer.recipe.blocks(self.model))

    def compiled(self) -> list[nn.Module]:
        return list(self.trainer.config.parallel.compiled(self.model, self.blocks()))

    @torch.no_grad()
    def _continue(self, moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the optimizer and the schedule stand before the step, too."""
        self.start()
        self.trainer.step = self.step.number - 1
        for name, parameter in (self.masters or self.model).named_parameters():
            for key, value in moments.get(name, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    value = torch.empty_like(parameter).copy_(value)
                elif isinstance(value, Tensor):
                    value = value.clone()
                self.trainer.optimizer.state[parameter][key] = value

    def train(self, steps: Iterable[list[Batch]], lr: float = 1.0, fresh: bool = False) -> list[float]:
        with self.around():
            return self._train(steps, lr, fresh)

    def _train(self, steps: Iterable[list[Batch]], lr: float, fresh: bool) -> list[float]:
        self._continue({} if fresh else self.step.moments)
        for group in self.trainer.optimizer.param_groups:
            group[LR_FACTOR] *= lr
        losses = []
        for microbatches in steps:
            microbatches = [map_tensors(batch, self.widened) for batch in microbatches]
            self.trainer.counted = microbatches
            generators = random_state(self.trainer.device)
            record = self.trainer.train_step(microbatches)
            while bool(record.skipped) and self.scale > LEAST_SCALE:  # as a dynamic scaler would
                self.scale *= 0.5
                self.trainer.step -= 1
                set_random_state(generators, self.trainer.device)  # the same dropout as in fp32, which skips nothing
                record = self.trainer.train_step(microbatches)
            losses.append(record.loss.item())
        return losses

    def peak_bytes(self) -> int:
        with MemoryLedger(self.model, self.trainer.optimizer) as recording:
            self.run()
        return recording.report().peak_bytes


class _Eager(Trainer[Config]):
    """A trainer of one process whose model is a copy of a prototype, and whose losses have a given divisor."""

    def __init__(self, step: TrainerStep, config: Config) -> None:
        self._prototype = step.prototype
        self.counted = step.microbatches
        """The whole step, of which also a part may be taken."""
        super().__init__(config, step.plan, step.hardware, World(), step.datasets)

    def first_model(self) -> nn.Module:
        return copy.deepcopy(self._prototype).to(self.device)

    def count(self, microbatches: list[Batch]) -> tuple[int, int]:
        return super().count(self.counted)


def steps_of(run: Trainer | TrainerStep, first: int, count: int) -> Generator[list[Batch], None, None]:
    """Yield the microbatches of ``count`` steps of a run, from index ``first`` on, also of those after its last."""
    order = DataOrder(len(run.datasets.train), run.config.seed)
    return run.config.loader.steps(run.datasets.train, order, run.plan.batching, first, count, run.hardware)


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
