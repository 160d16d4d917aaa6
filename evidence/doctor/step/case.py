"""One optimizer step that can be taken again: what it starts from, and trainers that start there in any precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from trainer.config.schema import Config
from trainer.config.step import Plan
from trainer.data.contract import Batch, Datasets
from trainer.determinism import random_state, set_random_state
from trainer.hardware import Hardware
from trainer.optim.masters import StochasticWeights
from trainer.parallel.compile import Compile
from trainer.parallel.world import World
from trainer.parallel.wrap import Parallel
from trainer.precision.modes import Precision
from trainer.precision.scaler import StaticScaler
from trainer.trainer import Gradients, Trainer


@dataclass
class Case:
    """A step, ready to be taken: its microbatches, and copies of all that it starts from, on the host."""

    config: Config
    """Of the run, resolved."""
    plan: Plan
    hardware: Hardware
    datasets: Datasets
    step: int
    """That is taken, counted from 1."""
    microbatches: list[Batch]
    weights: dict[str, Tensor]
    """By parameter: what the optimizer changes, so fp32 where there are masters."""
    stored: dict[str, Tensor]
    """By parameter: the model's own, in the run's dtype."""
    buffers: dict[str, Tensor]
    generators: dict[str, Tensor]
    scale: float
    """The loss scale of the step."""
    prototype: nn.Module
    """The recipe's model in fp32, without weights of its own that matter, on the host."""
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By parameter: the optimizer's state."""
    others: list[Batch] = field(default_factory=list)
    """Microbatches of the following steps, on which a cure must hold, too."""
    ranks: int = 1
    """Processes that the run's gradients were summed over; the microbatches are those of all."""

    @classmethod
    def of(cls, trainer: Trainer, microbatches: list[Batch]) -> Case:
        """Copy what the next step of a trainer starts from."""
        if isinstance(trainer.masters, StochasticWeights) or trainer.masters is None:
            changed = dict(trainer.model.named_parameters())
        else:
            changed = dict(trainer.masters.named_parameters())
        names = {id(parameter): name for name, parameter in (trainer.masters or trainer.model).named_parameters()}
        generators = random_state(trainer.device)
        prototype = trainer.recipe.build_model(trainer.datasets)
        set_random_state(generators, trainer.device)  # the trainer takes the step, too, with its own dropout
        moments = {
            names[id(parameter)]: {
                key: _copy(each) if isinstance(each, Tensor) else each for key, each in state.items()
            }
            for parameter, state in trainer.optimizer.state.items()
        }
        return cls(
            moments=moments,
            config=trainer.config,
            plan=trainer.plan,
            hardware=trainer.hardware,
            datasets=trainer.datasets,
            step=trainer.step + 1,
            microbatches=microbatches,
            weights={name: _copy(tensor) for name, tensor in changed.items()},
            stored={name: _copy(tensor) for name, tensor in trainer.model.named_parameters()},
            buffers={name: _copy(tensor) for name, tensor in trainer.model.named_buffers()},
            generators=generators,
            scale=trainer.loss_scale.scale.item(),
            prototype=prototype,
        )

    def few(self, samples: int) -> Case:
        """Return the same step with only so many samples of its first microbatch."""
        first = {name: tensor[:samples] for name, tensor in self.microbatches[0].items()}
        return replace(self, microbatches=[first])

    def trainer(
        self, precision: Precision, *, own: bool = False, scale: float = 1.0, compile: Compile | None = None
    ) -> CaseTrainer:
        """Return a trainer that stands before this step, of one process.

        Args:
            precision: of the trainer.
            own: start from the run's stored weights, in its own dtype, rather than from what the optimizer changes.
            scale: the loss scale, which stays as it is.
            compile: None: eager.
        """
        return CaseTrainer(self, precision, own, scale, compile or Compile())


class CaseTrainer(Trainer):
    """A trainer of a case's step: ``gradients`` may be called any number of times, always from the same start."""

    def __init__(self, case: Case, precision: Precision, own: bool, scale: float, compile: Compile) -> None:
        self.case = case
        config = replace(
            case.config,
            precision=precision,
            scaler=StaticScaler(force=True, scale=scale),
            compile=compile,
            parallel=Parallel(),
        )
        super().__init__(config, case.plan, case.hardware, World(), case.datasets)
        self._weights = case.stored if own else case.weights
        self.start()

    def first_model(self) -> nn.Module:
        """Return a copy of the prototype: its weights are replaced anyway."""
        return copy.deepcopy(self.case.prototype).to(self.device)

    @torch.no_grad()
    def start(self) -> None:
        """Restore the weights, the buffers and the generators, and clear the gradients; no tape sees it."""
        with _disable_current_modes():
            self._restore()

    def _restore(self) -> None:
        for tensors, source in (
            (self.model.named_parameters(), self._weights),
            (self.model.named_buffers(), self.case.buffers),
        ):
            for name, tensor in tensors:
                tensor.copy_(source[name])
        if self.masters is not None:
            for name, master in self.masters.held():
                master.copy_(self.case.weights[name])
        for parameter in [*self.model.parameters(), *self.update.parameters]:
            parameter.grad = None
        set_random_state(self.case.generators, self.device)

    @torch.no_grad()
    def continue_training(self) -> None:
        """Make the optimizer and the schedule stand before the step, too, so that ``train_step`` may follow."""
        self.start()
        self.step = self.case.step - 1
        for name, parameter in (self.masters or self.model).named_parameters():
            for key, value in self.case.moments.get(name, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    value = torch.empty_like(parameter).copy_(value)
                elif isinstance(value, Tensor):
                    value = value.clone()
                self.optimizer.state[parameter][key] = value

    def attempt(self, scale: float | None = None) -> Gradients:
        """Take the forward and backward passes of the step, from its start; ``scale`` is a new loss scale."""
        self.start()
        if scale is not None:
            self.loss_scale.scale.fill_(scale)
        with self.around():
            found = self.gradients(self.case.microbatches)
        if self.masters is not None:
            self.masters.take_gradients()
        return found

    def count(self, microbatches: list[Batch]) -> tuple[int, int]:
        """Count the whole step, also where only one rank's part of it is taken."""
        return super().count(self.case.microbatches)

    def around(self) -> AbstractContextManager[Any]:
        """Return what the passes run in; the reference overrides this."""
        return nullcontext()

    def sinks(self, found: Gradients) -> dict[str, Tensor]:
        """Return what a step must not harm: the loss, the gradients (by parameter) and the buffers, by name."""
        changed = self.masters or self.model
        named = {name: p.grad for name, p in changed.named_parameters() if p.grad is not None}
        return {"loss": found.loss} | named | dict(self.model.named_buffers())

    def harmed(self, found: Gradients) -> list[str]:
        """Return the names of the sinks that are not finite, and were before the step."""
        before = self.case.buffers
        return [
            name
            for name, tensor in self.sinks(found).items()
            if not finite(tensor) and (name not in before or finite(before[name]))
        ]


class Reference(CaseTrainer):
    """The same step in a wider format, in which also explicit casts to narrower ones have no effect.

    Args:
        case: the step.
        dtype: ``torch.float32`` or ``torch.float64``.
    """

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        super().__init__(case, Precision(), False, 1.0, Compile())
        self.model.to(dtype)
        self.start()

    @contextmanager
    def _widened(self) -> Iterator[None]:
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with Widened(self.dtype):
                yield
        finally:
            torch.set_default_dtype(default)

    def around(self) -> AbstractContextManager[Any]:
        return self._widened()

    def gradients(self, microbatches: list[Batch]) -> Gradients:
        """See ``Trainer.gradients``; the data is in the reference's dtype, too."""
        return super().gradients([{name: _wide(t, self.dtype) for name, t in batch.items()} for batch in microbatches])


class Widened(TorchFunctionMode):
    """Replaces every narrower floating-point dtype that a call asks for by ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._narrower = {torch.float16, torch.bfloat16} | ({torch.float32} if dtype == torch.float64 else set())

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float):
            return args[0].to(self.dtype) if args[0].dtype != self.dtype else args[0]
        args = tuple(self._of(value) for value in args)
        return function(*args, **{key: self._of(value) for key, value in kwargs.items()})

    def _of(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in self._narrower else value


def finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
