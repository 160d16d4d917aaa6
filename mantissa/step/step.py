"""One optimizer step that can be replayed in any format, and that changes nothing of what it came from."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mantissa.errors import UsageError
from mantissa.formats import FP32, TF32, Format, plain
from mantissa.step.flags import flags_of
from mantissa.step.memory import available_bytes
from mantissa.step.trace import Op, Trace, user_line
from mantissa.step.updates import Masters, UpdateMeter
from mantissa.tensors import (
    finite,
    in_dtype,
    moments,
    perturbed,
    random_state,
    set_random_state,
    tensors,
    unregistered,
)

Batch = dict[str, Tensor]
"""Tensors by name, whose rows are the samples."""
Gradients = dict[str, Tensor]
"""True gradients of a step by parameter, fp64 and dense, and its loss by an empty name."""
LEAST_SCALE = 2.0**-10
"""Loss scale below which a skipped step is not tried again."""
_FAST_FP64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (9, 4), (9, 5)}
"""Compute capabilities of GPUs with half as many units for fp64 as for fp32, by their data sheets: P100, V100, A100,
H100, B200; MI300, MI350. Others have 1/32 or 1/64."""
_FEW = 5e9
"""Multiplications up to which a step is examined with all its samples, and not with two of them."""
_CHANGES = (
    "format",
    "written_in",
    "fp32_modules",
    "fp32_ops",
    "uncast",
    "unhooked",
    "loss_factor",
    "lr_factor",
    "compiles",
)
"""Fields of a step that say what is changed about it."""
_STATE = (int, float, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Types of what a module may keep from one forward pass to the next, besides tensors."""


def batch_key(tensor: str) -> str:
    """Return how code names a tensor of a batch: ``batch['x']``."""
    return f"batch{tensor}" if tensor.startswith("[") else f"batch['{tensor}']"


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch of the same kind with changed tensors."""
    result = copy.copy(batch)
    result.update({name: change(tensor) for name, tensor in batch.items()})
    return result


class Remedies:
    """What to set, in the words of plain torch; a subclass says it in those of another program."""

    deterministic = "torch.use_deterministic_algorithms(True)"
    eager = "no torch.compile"
    fresh_state = "a new optimizer before this step"
    time_budget = "time_budget_s={0:.0f}, or --time-budget {0:.0f}s"

    def modules(self, names: Sequence[str]) -> str:
        """Return how these submodules come to compute in fp32."""
        return f"mantissa.keep_fp32(model, {list(names)})"

    def operators(self, names: Sequence[str]) -> str:
        """Return how these operators come to compute in fp32."""
        return f"with mantissa.fp32_ops({list(names)}): … around forward and loss"

    def format(self, format: Format) -> str:
        """Return how another format is chosen."""
        half = format.autocast
        return "fp32 weights" + (f" under torch.autocast(device, dtype={half})" if half else ", without autocast")

    def scale(self, value: float) -> str:
        """Return how the loss scale begins with a value."""
        return f"torch.amp.GradScaler(init_scale={value:.10g})"

    def rate(self, factor: float) -> str:
        """Return how the learning rate is multiplied."""
        return f"a learning rate of {factor:g} times the present one"


class Built(Protocol):
    """A model in a format, and how it trains; it holds no state of a step, which a replay gives it."""

    model: nn.Module
    """The model in training, whose weights do not matter."""
    optimizer: torch.optim.Optimizer
    fp32_modules: list[str]
    """Names of the submodules that compute in fp32."""

    @property
    def masters(self) -> Masters | None:
        """Masters of the model's weights; None: the optimizer changes the model's own."""
        ...

    @property
    def clip(self) -> Any:
        """See ``UpdateMeter``."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a microbatch, a scalar in the dtype in which it was computed; called in ``autocast``."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the format around forward and loss."""
        ...

    def stand_before(self, step: Step) -> None:
        """Make the optimizer stand before a step: with its moments, its number and its factor of learning rates."""

    def end_step(self, scale: float, correction: float, meter: UpdateMeter | None) -> None:
        """Change the weights by gradients as backward left them.

        Args:
            scale: the loss scale that they have.
            correction: factor that they need besides its inverse.
            meter: measures the update; None: nothing does.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Step(Protocol):
    """What a step starts from, and how its model is built, in whatever loop it is.

    It can be taken any number of times: its tensors are copies, and nothing changes it. A step that differs in one
    thing, such as a cure, is another one, which a method returns.
    """

    number: int
    """Number of the step, from 1."""
    format: Format
    """Format that it is taken in."""
    written_in: Format
    """Format of the loop that it comes from, in which its model is; another one, where that of the step was changed."""
    device: torch.device

    # What it starts from.
    microbatches: list[Batch]
    weights: dict[str, Tensor]
    """Weights that the optimizer changes, by parameter; fp32 where there are masters."""
    stored: dict[str, Tensor]
    """The model's own weights by parameter, in the run's dtype."""
    buffers: dict[str, Tensor]
    generators: dict[str, Tensor]
    """State of all random generators."""
    moments: dict[str, dict[str, Any]]
    """Optimizer's state by parameter; empty: it begins anew."""
    scale: float
    """Loss scale of the step."""
    least_scale: float = 0.0
    """Scale down to which the run's scaler backs off; 0: its scale stays as it is."""

    # What is changed about it.
    fp32_modules: list[str] = field(default_factory=list)
    """Name patterns of the submodules that compute in fp32."""
    fp32_ops: list[str] = field(default_factory=list)
    """Names of the operators that compute in fp32."""
    uncast: tuple[str, ...] = ()
    """Lines of code that ask for 16 bits, and get fp32."""
    unhooked: bool = False
    """Whether the weights have none of their hooks."""
    loss_factor: float = 1.0
    """Factor of the loss."""
    lr_factor: float = 1.0
    """Factor of the learning rates."""

    # What is known of its loop.
    remedies: Remedies = field(default_factory=Remedies)
    sums_loss: bool = False
    """Whether the loss is a sum, which has to be in fp32."""
    eps: float = 0.0
    """Number that the optimizer adds where it divides by the size of gradients; 0: it does not, or it is not known."""
    optimized: frozenset[str] = frozenset()
    """Names of the parameters that an optimizer is known to have."""
    different: int | None = None
    """Number of the following steps that differ; None: all of them."""
    compiles: bool = False
    """Whether the run compiles its model."""
    round_as_eager: bool = False
    """See ``mantissa.step.compile.compile_in_place``."""
    changes_batches: bool = False
    """Whether the loss may change tensors of a batch in place."""
    cuts: bool = True
    """Whether the loss takes a batch of fewer samples."""
    originals: frozenset[int] = frozenset()
    """Ids of the parameters of the model that was copied, to which no gradient may go."""

    # What a subclass says: a person's loop, or the trainer.

    def build(self, format: Format, as_run: bool) -> Built:
        """Build the model and its optimizer in a format.

        Args:
            format: the format.
            as_run: whether dtypes that a user set stay.

        Raises:
            FormatError: the model cannot.
        """
        ...

    def batches(self, first: int, count: int) -> list[list[Batch]]:
        """Return the microbatches of some steps, from the number of the first one."""
        ...

    def count(self, microbatches: list[Batch]) -> int:
        """Return what the sum of the losses of microbatches is divided by: their number, or that of their targets."""
        ...

    def loss_divisor(self, count: int, format: Format) -> tuple[float, float]:
        """Return the divisor of the loss before backward in a format, and the factor that gradients then still need.

        Args:
            count: what ``count`` returns for the whole step.
            format: the format.
        """
        ...

    def with_fp32_weights(self) -> Step:
        """Return this step with updates of fp32 weights, in a format with the same numbers."""
        ...

    # How it is taken.

    def replay(self, format: Format) -> Replay:
        """Return a replay in a format, on fp32 weights, eager and in one process, with a loss scale of 1.

        Modules and operators that compute in fp32 do so where the format has 16 bits.

        Raises:
            FormatError: the model cannot.
        """
        step = self if format.half is not None else replace(self, fp32_modules=[], fp32_ops=[])
        return Replay(self, format, step.build(format, as_run=False))

    def as_run(self) -> Replay:
        """Return a replay as the run takes the step, eager: with its stored weights and its loss scale."""
        return Replay(self, self.format, self.build(self.format, as_run=True), as_run=True)

    def reference(self, dtype: torch.dtype = torch.float32) -> Replay:
        """Return a replay in fp32 or fp64, in which explicit casts to narrower formats have no effect either."""
        exact, step = plain(FP32), replace(self, fp32_modules=[], fp32_ops=[])
        return Replay(self, exact, step.build(exact, as_run=False), wide=dtype)

    @property
    def exact_dtype(self) -> torch.dtype:
        """Dtype of what its format is compared with: fp32 for 16 bits and fewer, fp64 for fp32 and tf32."""
        return torch.float32 if self.format.half is not None else torch.float64

    @property
    def unit_roundoff(self) -> float:
        """That of the coarsest numbers that it multiplies."""
        return self.format.number.unit_roundoff

    def exact(self) -> Replay:
        """Return the replay that its format is compared with."""
        return self.reference(self.exact_dtype)

    # Other steps.

    def in_format(self, format: Format) -> Self:
        """Return this step in another format."""
        return replace(self, format=format)

    def in_fp32(self, modules: Sequence[str] = (), operators: Sequence[str] = ()) -> Self:
        """Return this step with more submodules and operators that compute in fp32."""
        return replace(self, fp32_modules=[*self.fp32_modules, *modules], fp32_ops=[*self.fp32_ops, *operators])

    def without_casts(self, line: str) -> Self:
        """Return this step with fp32 where a line of code asks for 16 bits: of a pass, a hook, or the optimizer."""
        return replace(self, uncast=(*self.uncast, line))

    def without_hooks(self) -> Self:
        """Return this step without the hooks of its weights, which see gradients that have the loss scale."""
        return replace(self, unhooked=True)

    def at_scale(self, scale: float) -> Self:
        """Return this step at another loss scale."""
        return replace(self, scale=scale)

    def at_rate(self, factor: float) -> Self:
        """Return this step with learning rates times a factor."""
        return replace(self, lr_factor=self.lr_factor * factor)

    def with_loss_times(self, factor: float) -> Self:
        """Return this step with its loss times a factor."""
        return replace(self, loss_factor=self.loss_factor * factor)

    def with_fresh_state(self) -> Self:
        """Return this step with an optimizer that has kept nothing of earlier steps."""
        return replace(self, moments={})

    def with_microbatches(self, microbatches: Iterable[Batch]) -> Self:
        """Return this step on other microbatches; those of the steps after it stay."""
        return replace(self, microbatches=list(microbatches))

    def with_values(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return this step from changed weights and buffers."""

        def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(tensor) for name, tensor in tensors.items()}

        weights, stored, buffers = map(changed, (self.weights, self.stored, self.buffers))
        return replace(self, weights=weights, stored=stored, buffers=buffers)

    def changed_as(self, other: Self, base: Self) -> Self:
        """Return this step, of the same loop as another one, changed as ``other`` was made of that, ``base``.

        Values of weights and the data of one step are no such changes.
        """
        if self is base:
            return other
        fields = {name: getattr(other, name) for name in _CHANGES if getattr(other, name) != getattr(base, name)}
        changed = replace(self, **fields)
        if other.stored is other.weights:
            changed = replace(changed, stored=self.weights)
        if base.moments and not other.moments:
            changed = changed.with_fresh_state()
        return changed if other.scale == base.scale else changed.at_scale(other.scale)

    def following(self, count: int) -> list[list[Batch]]:
        """Return the microbatches of this step and of those after it, ``count`` steps in all."""
        return [self.microbatches, *self.batches(self.number + 1, count - 1)]

    def after(self, replay: Replay, count: int) -> Self:
        """Return the step that follows ``count`` steps, which a replay has trained, from their weights."""
        kept = replay.masters or replay.model
        return replace(
            self,
            number=self.number + count,
            microbatches=self.following(count + 1)[-1],
            weights={
                name: in_dtype(weight.detach().cpu(), torch.float32).clone() for name, weight in kept.named_parameters()
            },
            stored={name: tensor.detach().to("cpu", copy=True) for name, tensor in replay.model.named_parameters()},
            buffers={name: buffer.detach().to("cpu", copy=True) for name, buffer in replay.model.named_buffers()},
            scale=replay.scale,
        )

    # What is known of it.

    def share(self, microbatches: list[Batch]) -> float:
        """Return what the run multiplies the gradients of the mean over these microbatches by, before a loss scale."""
        return self.count(microbatches) / self.loss_divisor(self.count(self.microbatches), self.format)[0]

    def free_bytes(self) -> int:
        """Return how much memory is left."""
        return available_bytes(self.device)

    def available(self, format: Format) -> bool:
        """Return whether the machine computes in a format, if only by emulation."""
        if not format.number.only_nvidia:
            return True
        capability = format.number.capability or ()
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= capability

    @property
    def fp64_slowdown(self) -> int:
        """How many times as long fp64 takes as fp32, at most about."""
        fast = self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) in _FAST_FP64
        return 2 if fast else 64

    @property
    def scales(self) -> list[float]:
        """The step's loss scale, and those that a dynamic scaler would back off to, the largest first."""
        scales = [self.scale]
        while self.least_scale and scales[-1] / 2 >= self.least_scale:
            scales.append(scales[-1] / 2)
        return scales

    @property
    def multiplications(self) -> int:
        """Weights times numbers in the microbatches: a bound of what a forward pass multiplies.

        It decides how much is examined, and no clock: the verdict must not depend on how busy the machine is.
        """
        numbers = sum(tensor.numel() for batch in self.microbatches for tensor in batch.values())
        return numbers * sum(weight.numel() for weight in self.weights.values())

    def first_samples(self) -> list[Batch]:
        """Return two samples of the first microbatch: rounding is alike in all, and batch norm cannot take one.

        All of them, where the step is small, or where rows of tensors are not the samples, which cannot be cut.
        """
        first = self.microbatches[0]
        if not self.cuts or self.multiplications <= _FEW or len({tensor.shape[:1] for tensor in first.values()}) != 1:
            return [first]
        return [map_tensors(first, lambda tensor: tensor[:2])]


@dataclass
class ReplayResult:
    """What a replay of a step leaves. The buffers are the model's own, and change with the next run."""

    loss: Tensor
    """Loss of the whole step, fp32 scalar."""
    correction: float
    """Factor that the gradients still need besides the inverse of the loss scale."""
    gradients: dict[str, Tensor]
    """Gradients that the optimizer is given, by parameter; masters' own where there are some."""
    buffers: dict[str, Tensor]
    before: dict[str, Tensor]
    """Buffers that the step started from."""

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Loss, gradients and buffers by name: all that must be finite."""
        return {"loss": self.loss} | self.gradients | self.buffers

    @cached_property
    def nonfinite(self) -> list[str]:
        """The names of the outputs that are not finite, and were before the step.

        Kept once read: read it before the next run, which changes the buffers. It is not computed with the result,
        because a mode that records the step's operators would record these, too.
        """
        return [
            name
            for name, tensor in self.outputs.items()
            if not finite(tensor) and (name not in self.before or finite(self.before[name]))
        ]


class Replay:
    """The forward and backward passes of a step in one format: taken any number of times, from the same start.

    Args:
        step: that is taken.
        format: in which.
        built: the model in it.
        as_run: whether it starts from the run's stored weights and loss scale.
        wide: the dtype of a reference, which every narrower one becomes; None: it is none.
    """

    def __init__(
        self, step: Step, format: Format, built: Built, as_run: bool = False, wide: torch.dtype | None = None
    ) -> None:
        self.format, self.built = format, built
        self.model, self.masters, self.optimizer = built.model, built.masters, built.optimizer
        self.fp32_modules = built.fp32_modules
        self.changed = False
        """Whether the loss has changed a batch that it was given."""
        self.own_autocast: torch.dtype | None = None
        """Dtype of the autocast that the loss, or the model, enters itself; None: none."""
        wide = wide or format.wide
        self._as_run, self._wide, self._in_loss = as_run, wide, False
        if wide is not None:
            cast_training(self.model, self.optimizer, wide)
        for parameter in self.model.parameters() if step.unhooked else ():
            (parameter._backward_hooks or {}).clear()
            (parameter._post_accumulate_grad_hooks or {}).clear()
        self._states = _states(self.model)
        self._parameters = set(map(id, self.model.parameters()))
        self._take(step)
        self.scale = step.scale if as_run else 1.0
        """Loss scale, which may be set."""
        self.start()

    def _take(self, step: Step) -> None:
        """Start from what a step starts from."""
        self.step = step
        self.weights = step.stored if self._as_run else step.weights
        """Weights that the model starts from."""

    def of(self, step: Step) -> Replay:
        """Return a replay in the same model, at the same scale, of a step that starts from other tensors."""
        other = copy.copy(self)
        other._take(step)
        return other

    @torch.no_grad()
    def start(self) -> None:
        """Restore the weights, the buffers and the generators, and clear the gradients; no mode of torch sees it."""
        with _disable_current_modes():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name])
                parameter.grad = None
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.step.buffers[name])
            if self.masters is not None:
                for name, master in self.masters.persistent_weights():
                    master.copy_(self.step.weights[name])
                for _, master in self.masters.named_parameters():
                    master.grad = None
            self.restore_generators()
            _restore(self._states)

    def keep_attributes(self) -> None:
        """Let every run start from the attributes that the model's modules have now."""
        self._states = _states(self.model)

    def restore_generators(self) -> None:
        """Give all random generators the state from which the step starts."""
        set_random_state(self.step.generators, self.step.device)

    def run(self, microbatches: list[Batch] | None = None) -> ReplayResult:
        """Take the passes of the step, from its start.

        Args:
            microbatches: a part of the step, whose loss is divided as that of the whole; None: all of them.
        """
        # Forward and backward.
        self.start()
        whole = self.step.microbatches
        with self.around():
            loss, correction = self.gradients(whole if microbatches is None else microbatches, whole)

        # What they leave.
        if self.masters is not None:
            self.masters.take_gradients()
        changed = (self.masters or self.model).named_parameters()
        gradients = {name: parameter.grad for name, parameter in changed if parameter.grad is not None}
        return ReplayResult(loss, correction, gradients, dict(self.model.named_buffers()), self.step.buffers)

    def run_with_backoff(self, scales: Sequence[float] = ()) -> ReplayResult:
        """Run with one loss scale after another until all is finite; return the last result, whose scale stays.

        Args:
            scales: to try; empty: those of the step.
        """
        for scale in scales or self.step.scales:
            self.scale = scale
            result = self.run()
            if not result.nonfinite or "loss" in result.nonfinite:  # no scale cures a forward pass
                break
        return result

    def gradients(self, microbatches: list[Batch], whole: list[Batch]) -> tuple[Tensor, float]:
        """Add up the gradients of microbatches, of the loss times ``scale``, and change nothing but buffers.

        Args:
            microbatches: those that are taken.
            whole: all of the step, by whose number the loss is divided.

        Returns:
            ``loss`` and ``correction`` of a result.
        """
        divisor, correction = self.step.loss_divisor(self.step.count(whole), self.format)
        total: Tensor | None = None
        for batch in microbatches:
            share = self.loss(batch) * self.step.loss_factor / divisor
            if share.requires_grad:
                self._backward(share * self.scale)
            total = share.detach() if total is None else total + share.detach()
        assert total is not None
        total = total if correction == 1 else total * correction
        return total.float() if total.itemsize < 4 else total, correction

    def _backward(self, loss: Tensor) -> None:
        """Give the model its gradients, and leave those of other leaves as they are, such as a discriminator's."""
        others = [leaf for leaf in leaves(loss) if id(leaf) not in self._parameters]
        if any(id(leaf) in self.step.originals for leaf in others):
            raise UsageError(
                "a gradient goes to the model that was given, and not to its copy: let the loss use the model that it "
                "is called with, and no forward keep a method of the model from before it was replaced"
            )
        if others and (hidden := unregistered(self.model, self.optimizer, set(others).__contains__)):
            raise UsageError(hidden)
        kept = [other.grad for other in others]
        for other in others:
            other.grad = None
        try:
            loss.backward()
        finally:
            for other, gradient in zip(others, kept, strict=True):
                other.grad = gradient

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of one microbatch in the format, a scalar in the dtype in which it was computed."""
        wide, changes = self._wide, self.step.changes_batches

        def copied(tensor: Tensor) -> Tensor:
            """Return a tensor in no fewer bits than a reference has, and a copy where the loss may change it."""
            widens = tensor.is_floating_point() and wide is not None and tensor.itemsize <= wide.itemsize
            given = tensor.to(wide) if widens else tensor
            return tensor.clone() if given is tensor and changes else given

        # Autocast of the format is no autocast that the loss enters itself.
        batch = map_tensors(batch, copied)
        self._in_loss = False
        with self.built.autocast():
            self._in_loss = True
            loss = self.built.loss(batch)
            self._in_loss = False
        self.changed |= changes and any(tensor._version for tensor in batch.values())
        return loss

    def _uncast(self, op: Op) -> Any:
        if op.asks_for_half and str(user_line() or "") in self.step.uncast:
            op.kwargs = op.kwargs | {"dtype": torch.float32}
        return op.run()

    def train(self, steps: Iterable[list[Batch]]) -> list[float]:
        """Train some steps from this one's start, as the run does; one that is skipped is taken at half the scale.

        Args:
            steps: the microbatches of each.

        Returns:
            The loss of each; NaN where it would be skipped for ever.
        """
        self.start()
        self.built.stand_before(self.step)
        return [self._train_step(microbatches) for microbatches in steps]

    def _train_step(self, microbatches: list[Batch]) -> float:
        scaled, masters = self.format.needs_loss_scale, self.masters.named_parameters() if self.masters else ()
        generators, states = (random_state(self.step.device), _states(self.model)) if scaled else ({}, [])
        changed = [*self.model.parameters(), *(master for _, master in masters)]
        while True:
            for weight in changed:
                weight.grad = None

            # As ``run``, but from the weights of the step before. (Masters take their gradients in the update.)
            with self.around():
                loss, correction = self.gradients(microbatches, microbatches)
            if not scaled or all(finite(weight.grad) for weight in changed if weight.grad is not None):
                break
            if self.scale <= LEAST_SCALE or not self.step.least_scale:
                return math.nan

            # Again at half the scale, as a dynamic scaler would, with the same dropout.
            self.scale /= 2
            set_random_state(generators, self.step.device)
            _restore(states)
        self.update(correction)
        return loss.item()

    def update(self, correction: float, meter: UpdateMeter | None = None) -> None:
        """Change the weights by the gradients of the last passes; a meter measures how."""
        with self.around():
            self.built.end_step(self.scale, correction, meter)

    def true_gradients(self, microbatches: list[Batch] | None = None) -> Gradients:
        """Run, and return the gradients without a loss scale; for ``microbatches`` see ``run``."""
        result = self.run(microbatches)
        factor = result.correction / self.scale
        gradients = {
            name: in_dtype(gradient.to_dense() if gradient.is_sparse else gradient, torch.float64) * factor
            for name, gradient in result.gradients.items()
        }
        return gradients | {"": result.loss.double()}

    def forward(self, *modes: AbstractContextManager[Any]) -> Tensor:
        """Return the loss of a few samples, from the start of the step, in some modes."""
        self.start()
        with ExitStack() as contexts:
            for mode in (*modes, self.around(), torch.enable_grad()):
                contexts.enter_context(mode)
            return self.loss(self.step.first_samples()[0])

    def perturb(self, unit: float, seed: int, steps: Iterable[list[Batch]] = ()) -> Iterator[list[Batch]]:
        """Start from weights changed by ±``unit``, relative to their size, and return steps with inputs changed so."""
        generator, dtype = torch.Generator().manual_seed(seed), self._wide or torch.float32
        self.weights = {
            name: perturbed(in_dtype(weight, dtype), unit, generator) for name, weight in self.step.weights.items()
        }
        change = partial(perturbed, unit=unit, generator=generator, data=True)
        return ([map_tensors(batch, change) for batch in microbatches] for microbatches in steps)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return what passes and updates run in: casts of the code left out, or all redirected in a wider reference.

        Autocast that the code enters itself is noted, and is that of the format, and so are torch's flags of fp32
        products. Only the step as the run takes it has what the run has.
        """
        enter, half, kind = torch.autocast.__enter__, self.format.half, self.step.device.type
        as_written = self._as_run and self.format is self.step.written_in

        def enter_other(autocast: Any) -> Any:
            if not autocast._enabled or autocast.device != kind:
                return enter(autocast)
            if self._in_loss:
                self.own_autocast = self.own_autocast or autocast.fast_dtype
            if as_written:
                return enter(autocast)
            with patch.multiple(autocast, _enabled=half is not None, fast_dtype=half or autocast.fast_dtype):
                return enter(autocast)

        with ExitStack() as contexts:
            if not as_written or self.format.number is TF32:  # which the flags alone make what it is
                contexts.enter_context(flags_of(self.format.number))
            contexts.enter_context(patch.object(torch.autocast, "__enter__", enter_other))
            if self.step.uncast:
                contexts.enter_context(Trace(None, run=self._uncast))
            if self._wide is not None:
                contexts.enter_context(Widened(self._wide))
            yield


class Widened(TorchDispatchMode):
    """Replaces every narrower floating-point dtype that an operator asks for by ``dtype``, backward as well.

    So are torch's default dtype, and tensors of narrower ones that an operator only reads, such as a batch.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._before: list[torch.dtype] = []
        narrower = [torch.float16, torch.bfloat16, *([torch.float32] if dtype == torch.float64 else [])]
        self._wider = dict.fromkeys(narrower, dtype)
        if dtype == torch.float64:
            self._wider[torch.complex64] = torch.complex128

    def __enter__(self) -> Widened:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._before.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and any(each.dtype in self._wider for each in tensors((args, kwargs))):
            reads = {each.name: each.alias_info is None for each in func._schema.arguments}  # no views, not in place
            args = [self._cast(value) if each else value for each, value in zip(reads.values(), args, strict=False)]
            kwargs = {name: self._cast(value) if reads[name] else value for name, value in kwargs.items()}
        args, kwargs = [*map(self._of, args)], {key: self._of(value) for key, value in kwargs.items()}
        if func.overloadpacket.__name__.startswith("_fused_"):
            names = [argument.name for argument in func._schema.arguments]
            args = [_as_read(*each) for each in zip(names, args, strict=False)]
            kwargs = {name: _as_read(name, value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _of(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value

    def _cast(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._cast, value))
        return value.to(self._wider.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value


def _as_read(name: str, value: Any) -> Any:
    """Return an argument of a fused optimizer in the dtype in which torch reads it, whatever that of the weights is.

    CUDA's kernels take the first bits of an fp64 step number for an fp32 one, which is then 0.
    """
    if name == "state_steps":
        return [step.float() for step in value]
    return value.float() if name in ("grad_scale", "found_inf") and value is not None else value


def cast_training(model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype) -> None:
    """Cast weights, buffers and the optimizer's state, as ``model.to(dtype)`` before training does."""
    model._apply(lambda tensor: in_dtype(tensor, dtype))
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        state.update({key: value.to(dtype) for key, value in moments(state, parameter).items()})


def _states(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return what a forward pass may change besides buffers: numbers, tensors and generators that modules keep."""
    return [
        (
            module,
            {
                name: copy.deepcopy(value)
                for name, value in vars(module).items()
                if isinstance(value, _STATE) or (isinstance(value, Tensor) and not value.requires_grad)
            },
        )
        for module in model.modules()
    ]


def _restore(states: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, state in states:
        vars(module).update(copy.deepcopy(state))


def leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors in which a backward pass leaves gradients."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]
