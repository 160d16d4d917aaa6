"""One optimizer step that can be replayed in any format, and that changes nothing of what it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from mantissa.formats import Format
from mantissa.step.batch import Batch, map_tensors
from mantissa.step.memory import available_bytes
from mantissa.step.remedies import Remedies
from mantissa.step.updates import Masters, UpdateMeter

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

    # What it is compared with.

    @property
    def exact_dtype(self) -> torch.dtype:
        """Dtype of what its format is compared with: fp32 for 16 bits and fewer, fp64 for fp32 and tf32."""
        return torch.float32 if self.format.half is not None else torch.float64

    @property
    def unit_roundoff(self) -> float:
        """That of the coarsest numbers that it multiplies."""
        return self.format.number.unit_roundoff

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
