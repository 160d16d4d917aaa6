"""One optimizer step that can be replayed in any format, and that changes nothing of what it came from."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mantissa.formats import FORMATS, Format
from mantissa.tensors import finite, in_dtype

Batch = dict[str, Tensor]
"""The rows of every tensor are the samples."""


def batch_key(tensor: str) -> str:
    """Return how code names a tensor of a batch: ``batch['x']``."""
    return f"batch{tensor}" if tensor.startswith("[") else f"batch['{tensor}']"


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch of the same kind with changed tensors."""
    result = copy.copy(batch)
    result.update({name: change(tensor) for name, tensor in batch.items()})
    return result


class Remedies:
    """What to set, said as a loop of one's own is written; see the subclass in the words of another program."""

    deterministic = "torch.use_deterministic_algorithms(True)"
    eager = "no torch.compile"
    fresh_state = "optimizer.state.clear() before this step"

    def modules(self, names: Sequence[str]) -> str:
        """Return how these submodules come to compute in fp32."""
        return f"mantissa.keep_fp32(model, {list(names)})"

    def operators(self, names: Sequence[str]) -> str:
        """Return how these operators come to compute in fp32."""
        return f"with mantissa.fp32_ops({list(names)}): … around forward and loss"

    def format(self, name: str) -> str:
        """Return how another format is chosen."""
        half = FORMATS[name].autocast
        return "fp32 weights" + (f" under torch.autocast(device, dtype={half})" if half else ", without autocast")

    def scale(self, value: float) -> str:
        """Return how the loss scale begins with a value."""
        return f"torch.amp.GradScaler(init_scale={value:.10g})"

    def rate(self, factor: float) -> str:
        """Return how the learning rate is multiplied."""
        return f"a learning rate of {factor:g} times the present one"


class Masters(Protocol):
    """The fp32 weights that an optimizer changes in the place of 16-bit ones."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return what the optimizer changes, named as in the model."""

    def held(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return those that are kept between steps."""

    def take_gradients(self) -> None:
        """Move the gradients that backward left with the model's weights to the masters."""


@dataclass(kw_only=True)
class Step(ABC):
    """What a step starts from. Subclasses know how a model is built in a format, and how its loss is computed.

    The tensors are copies on the host, so that the step can be taken any number of times.
    """

    remedies: ClassVar[Remedies] = Remedies()
    sums_loss: ClassVar[bool] = True
    """Whether the loss is a sum, which has to be in fp32."""
    number: int
    """Of the step, counted from 1."""
    format: Format
    """Of the run."""
    fp32_modules: list[str]
    """Of the run: name patterns of submodules that compute in fp32."""
    fp32_ops: list[str]
    """Of the run: names of operators that compute in fp32."""
    compiles: bool
    """Whether the run compiles its model."""
    round_as_eager: bool = False
    """See ``mantissa.compile.compile_in_place``."""
    device: torch.device
    microbatches: list[Batch]
    weights: dict[str, Tensor]
    """By parameter: what the optimizer changes, so fp32 where there are masters."""
    stored: dict[str, Tensor]
    """By parameter: the model's own, in the run's dtype."""
    buffers: dict[str, Tensor]
    scale: float
    """The loss scale of the step."""
    least_scale: float = 0.0
    """To which the run's scaler backs off; 0: its scale stays as it is."""
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By parameter: the optimizer's state."""
    different: int | None = None
    """How many of the following steps differ; None: all of them."""
    optimized: frozenset[str] = frozenset()
    """The parameters that an optimizer is known to have."""
    eps: float = 0.0
    """Which the optimizer adds where it divides by the size of gradients; 0: it does not, or it is not known."""
    ranks: int = 1
    """Processes that the run's gradients were summed over; the microbatches are those of all."""

    @abstractmethod
    def replay(
        self,
        format: str,
        *,
        as_run: bool = False,
        fp32_modules: list[str] | None = None,
        fp32_ops: list[str] | None = None,
        recompute: bool = True,
    ) -> Replay:
        """Return the eager passes of this step in a format, in one process.

        Args:
            format: its name. fp32 modules and operators are the run's, where the format has 16 bits.
            as_run: start from the stored weights and the loss scale, rather than from what the optimizer changes and
                a scale of 1. The scale stays as it is.
            fp32_modules: in the place of the run's.
            fp32_ops: likewise.
            recompute: whether activations are recomputed where the run does so.

        Raises:
            FormatError: the model cannot.
        """

    @abstractmethod
    def restore_generators(self) -> None:
        """Give all random generators the state from which the step starts."""

    @abstractmethod
    def following(self, count: int) -> list[list[Batch]]:
        """Return the microbatches of this step and of those after it, ``count`` steps in all."""

    def after(self, passes: Replay, count: int) -> Step:
        """Return the step that follows ``count`` steps, which these passes have trained, from their weights."""
        kept = passes.masters or passes.model
        stored = {name: tensor.detach().to("cpu", copy=True) for name, tensor in passes.model.named_parameters()}
        return replace(
            self,
            number=self.number + count,
            microbatches=self.following(count + 1)[-1],
            weights={
                name: in_dtype(each.detach().cpu(), torch.float32).clone() for name, each in kept.named_parameters()
            },
            stored=stored,
            buffers={name: each.detach().to("cpu", copy=True) for name, each in passes.model.named_buffers()},
            scale=passes.scale,
        )

    @abstractmethod
    def share(self, microbatches: list[Batch]) -> float:
        """Return what the run multiplies the gradients of the mean over these microbatches by, before a loss scale."""

    @abstractmethod
    def available(self, format: str) -> bool:
        """Return whether the machine computes in a format, if only by emulation."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how much memory is left."""

    @property
    def scales(self) -> list[float]:
        """The step's loss scale, and those that a dynamic scaler would back off to, the largest first."""
        scales = [self.scale]
        while self.least_scale and scales[-1] / 2 >= self.least_scale:
            scales.append(scales[-1] / 2)
        return scales

    @property
    @abstractmethod
    def with_fp32_weights(self) -> str:
        """The name of a format with the run's numbers in which updates of fp32 weights are kept."""

    def as_run(
        self, fp32_modules: list[str] | None = None, fp32_ops: list[str] | None = None, recompute: bool = True
    ) -> Replay:
        """Return the passes as the run takes them, eager; the arguments are those of ``replay``."""
        lists = {"fp32_modules": fp32_modules, "fp32_ops": fp32_ops}
        return self.replay(self.format.name, as_run=True, recompute=recompute, **lists)

    def reference(self, dtype: torch.dtype = torch.float32, recompute: bool = True) -> Replay:
        """Return the passes in fp32 or fp64, in which explicit casts to narrower formats have no effect either."""
        passes = self.replay("fp32", recompute=recompute)
        passes.widen(dtype)
        return passes

    def first_samples(self) -> list[Batch]:
        """Return two samples of the first microbatch: rounding is alike in all, and batch norm cannot take one."""
        return [map_tensors(self.microbatches[0], lambda tensor: tensor[:2])]


@dataclass
class ReplayResult:
    """What the passes of a step leave. The buffers are the model's own, and change with the next attempt."""

    loss: Tensor
    """Of the whole step, fp32 scalar."""
    correction: float
    """The factor that the gradients still need besides the inverse of the loss scale."""
    gradients: dict[str, Tensor]
    """By parameter: what the optimizer is given, masters' own where there are some."""
    buffers: dict[str, Tensor]
    before: dict[str, Tensor]
    """The buffers that the step started from."""

    @property
    def outputs(self) -> dict[str, Tensor]:
        """What a step must not harm: the loss, the gradients and the buffers, by name."""
        return {"loss": self.loss} | self.gradients | self.buffers

    @cached_property
    def nonfinite(self) -> list[str]:
        """The names of the sinks that are not finite, and were before the step.

        Kept once read: read it before the next attempt, which changes the buffers. It is not computed with the attempt,
        because a mode that records the step's operators would record these, too.
        """
        return [
            name
            for name, tensor in self.outputs.items()
            if not finite(tensor) and (name not in self.before or finite(self.before[name]))
        ]


class Replay(ABC):
    """The forward and backward passes of a step in one format: taken any number of times, from the same start.

    Args:
        step: that is taken.
        model: in the format, in training.
        masters: of the model's weights; None: the optimizer changes the model's own.
        fp32_modules: names of the submodules that compute in fp32.
        as_run: whether the model starts from the run's stored weights.
    """

    def __init__(
        self, step: Step, format: str, model: nn.Module, masters: Masters | None, fp32_modules: list[str], as_run: bool
    ) -> None:
        self.step = step
        self.format = FORMATS[format]
        self.model = model
        self.masters = masters
        self.fp32_modules = fp32_modules
        self.weights = step.stored if as_run else step.weights
        """What the model starts from; may be replaced."""
        self.microbatches = step.microbatches
        """What ``run`` takes, and by whose targets a loss is divided; may be replaced."""
        self.loss_factor = 1.0
        """What the loss of a loop is multiplied by."""
        self.updates: AbstractContextManager[Any] | None = None
        """In which the optimizer steps, where it is one of a loop of its own; None: in what the passes run in."""
        self._wide: torch.dtype | None = None
        self.start()

    scale: float
    """The loss scale, which may be set."""

    @abstractmethod
    def gradients(self, microbatches: list[Batch]) -> tuple[Tensor, float]:
        """Add up the gradients of microbatches, of the loss times ``scale``, and change nothing but buffers.

        Returns:
            ``loss`` and ``correction`` of an attempt.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the summed loss of one microbatch in the format, a scalar in the dtype in which it was summed."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the format around forward and loss."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Return the repeated parts of the model, in order."""

    @abstractmethod
    def compiled(self) -> list[nn.Module]:
        """Return the modules that the run compiles."""

    @abstractmethod
    def train(self, steps: Iterable[list[Batch]], lr: float = 1.0, fresh: bool = False) -> list[float]:
        """Train some steps from this one's start, as the run does; one that is skipped is taken at half the scale.

        Args:
            steps: the microbatches of each.
            lr: multiplies the learning rates.
            fresh: whether the optimizer begins without what it kept of earlier steps.

        Returns:
            The loss of each.
        """

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the memory that an attempt takes at its peak."""

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
                for name, master in self.masters.held():
                    master.copy_(self.step.weights[name])
                for _, master in self.masters.named_parameters():
                    master.grad = None
            self.step.restore_generators()

    def widen(self, dtype: torch.dtype) -> None:
        """Compute in a wider dtype from now on, in which explicit casts to narrower ones have no effect."""
        self._wide = dtype
        self.model._apply(lambda tensor: in_dtype(tensor, dtype))

    def run(self, microbatches: list[Batch] | None = None) -> ReplayResult:
        """Take the passes of the step, from its start.

        Args:
            microbatches: a part of the step, whose loss is divided as that of the whole; None: all of them.
        """
        self.start()
        part = self.microbatches if microbatches is None else microbatches
        with self.around():
            loss, correction = self.gradients([map_tensors(batch, self.widened) for batch in part])
        if self.masters is not None:
            self.masters.take_gradients()
        changed = (self.masters or self.model).named_parameters()
        gradients = {name: parameter.grad for name, parameter in changed if parameter.grad is not None}
        return ReplayResult(loss, correction, gradients, dict(self.model.named_buffers()), self.step.buffers)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return what the passes run in: the redirection of casts, where they are a wider reference."""
        if self._wide is None:
            yield
            return
        default = torch.get_default_dtype()
        torch.set_default_dtype(self._wide)
        try:
            with Widened(self._wide):
                yield
        finally:
            torch.set_default_dtype(default)

    def widened(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a batch as these passes take it."""
        return tensor.to(self._wide) if self._wide and tensor.is_floating_point() else tensor

    def run_with_backoff(self, scales: Sequence[float] = ()) -> ReplayResult:
        """Take the passes with one loss scale after another until all is finite; return the last, whose scale stays.

        Args:
            scales: to try; empty: those of the step.
        """
        for scale in scales or self.step.scales:
            self.scale = scale
            found = self.run()
            if not found.nonfinite or "loss" in found.nonfinite:  # no scale mends a forward pass
                break
        return found


class Widened(TorchDispatchMode):
    """Replaces every narrower floating-point dtype that an operator asks for by ``dtype``, backward as well."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        narrower = [torch.float16, torch.bfloat16, *([torch.float32] if dtype == torch.float64 else [])]
        self._wider = dict.fromkeys(narrower, dtype)
        if dtype == torch.float64:
            self._wider[torch.complex64] = torch.complex128

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(self._of, args), **{key: self._of(value) for key, value in (kwargs or {}).items()})

    def _of(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value
