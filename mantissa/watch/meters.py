"""What is measured of single optimizer steps while a model trains."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mantissa.step.updates import Counts, UpdateMeter, is_elementwise
from mantissa.tensors import (
    changed_by,
    finite,
    local,
    measurable,
    numbers_in,
    random_state,
    set_random_state,
    wide_dtype,
)
from mantissa.watch.setup import Listener, observing

_SAMPLE = 4096
"""Elements of a parameter whose updates are measured, at most."""
_SMALL = 4096
"""Elements below which a tensor is sooner copied than read by a call of its own."""


class Measured(NamedTuple):
    """What one measured step did, on this rank."""

    step: int
    loss: float
    """The mean over the microbatches; NaN: not known."""
    skipped: int
    """Steps that the loss scaler has skipped so far."""
    lost: dict[str, Counts]
    """Effects of rounding on updates, by parameter group; empty: not measured."""
    weights: dict[str, float]
    """2-norms by parameter group."""
    overflow: dict[str, float]
    """Bits from the largest number up to the largest of the dtype: of the outputs of each module that has no others
    inside, and of each parameter's gradient (``NAME.grad``), with the loss scale, and after the loop's clipping."""
    underflow: dict[str, float]
    """Bits from the root mean square down to the smallest normal number of the dtype, of the same."""


class Meters:
    """Measures the steps between ``begin`` and ``end``; everything stays on the device until it is read.

    Args:
        model: whose modules are measured.
        optimizer: of its parameters.
        hooked: whether modules may have hooks; where they are compiled, only gradients and weights are measured.
        missed: hears why something cannot be measured.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, hooked: bool, missed: Callable[[Exception], None]
    ) -> None:
        self._model, self._optimizer, self._hooked, self._missed = model, optimizer, hooked, missed
        self._hooks = ExitStack()
        self._outputs: dict[str, tuple[torch.dtype, Tensor]] = {}
        self._updates: UpdateMeter | None = None
        self._named: list[tuple[str, nn.Parameter]] = []
        self._rows = torch.empty(3, 0)
        """Of each of those: the gradient's largest element and its norm, with the loss scale, and the weight's norm."""
        self._counts = torch.empty(0, len(Counts._fields))
        """Of each parameter that ``_updates`` measures: see there."""
        own = set(map(id, model.parameters()))
        alone = is_elementwise(type(optimizer).__name__)
        self._measurable = alone and all(id(each) in own for each in changed_by(optimizer))  # no copies of weights

    @property
    def ready(self) -> bool:
        """Whether ``before`` was called, and ``end`` not yet."""
        return bool(self._rows.numel())

    def begin(self) -> None:
        """Prepare for the forward passes of a step."""
        leaves = ((name, each) for name, each in self._model.named_modules() if next(each.children(), None) is None)
        for name, module in leaves if self._hooked else ():
            self._hooks.callback(module.register_forward_hook(Listener(partial(self._returned, name))).remove)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    @observing
    @torch.no_grad()
    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in numbers_in(output):
            if measurable(tensor) and tensor.numel() and tensor.requires_grad:
                part = local(tensor.detach())
                mean = torch.linalg.vector_norm(part, dtype=wide_dtype([part])) / math.sqrt(part.numel())
                found = torch.stack([_largest(part), mean.float()])
                self._outputs[name] = part.dtype, torch.maximum(found, self._outputs.get(name, (None, found))[1])

    @torch.no_grad()
    def before(self, half: torch.dtype | None, scale: Tensor | None, factor: Tensor | None) -> None:
        """Measure gradients and weights before the update.

        Args:
            half: the 16-bit dtype that layers compute in; None: there is none.
            scale: what gradients were multiplied by when they were computed, and are no longer; None: by nothing.
            factor: turns gradients into true ones; None: they are.
        """
        named = [(name, each) for name, each in self._model.named_parameters() if measurable(each.grad)]
        self._named = [(name, each) for name, each in named if local(each).numel()]
        if not self._named:  # the optimizer is another model's, as Watch says
            return
        self._half = half
        gradients = [local(each.grad) for _, each in self._named if each.grad is not None]
        weights = [local(each) for _, each in self._named]
        device = gradients[0].device
        norms = (torch._foreach_norm(tensors, dtype=wide_dtype(tensors)) for tensors in (gradients, weights))
        rows = ([each.to(device).float() for each in row] for row in (map(_largest, gradients), *norms))
        self._rows = torch.stack(list(map(torch.stack, rows)))
        if scale is not None:
            self._rows[:2] *= scale.to(device)
        if self._measurable:
            self._updates = UpdateMeter(self._model, self._optimizer, half, sample=_SAMPLE)  # layers may be new
            self._updates.before(factor)

    def after(self, step: int, taken: Tensor | bool) -> None:
        """Measure what the update did; ``taken``: whether weights were changed, a bool scalar."""
        if self._updates is not None:
            device = next(self._model.parameters()).device
            generators = random_state(device)  # from which an optimizer may draw
            try:
                self._updates.after(step, torch.as_tensor(taken, device=device))
                self._counts = self._updates.take()[-1].counts
            except Exception as error:  # of any kind: an optimizer that cannot be copied
                self._updates, self._measurable = None, False
                self._missed(error)
            finally:
                set_random_state(generators, device)

    def end(self, step: int, losses: list[Tensor], skipped: int) -> Callable[[], Measured]:
        """Return a function that reads the measurement, once the device is done with it."""
        self.close()
        device = next(self._model.parameters()).device
        mean = torch.stack([each.real.float().to(device) for each in losses] or [torch.tensor(math.nan)]).mean()
        largest = [found for _, found in self._outputs.values()]
        parts = [each.to(device).flatten() for each in (mean, *largest, self._rows, self._counts)]
        kinds = [(name, dtype) for name, (dtype, _) in self._outputs.items()]
        sizes = [1, 2 * len(kinds), self._rows.numel(), self._counts.numel()]
        flat = torch.cat(parts).to("cpu", non_blocking=True)
        named, updates = self._named if self.ready else [], self._updates
        self._outputs, self._rows, self._counts = {}, self._rows[:, :0], self._counts[:0]
        return partial(self._read, step, skipped, flat, sizes, kinds, named, updates)

    def _read(
        self,
        step: int,
        skipped: int,
        flat: Tensor,
        sizes: list[int],
        kinds: list[tuple[str, torch.dtype]],
        named: list[tuple[str, nn.Parameter]],
        updates: UpdateMeter | None,
    ) -> Measured:
        mean, outputs, rows, counts = flat.split(sizes)
        overflow, underflow = {}, {}

        def add(name: str, dtype: torch.dtype, largest: float, mean_square: float) -> None:
            limits = torch.finfo(dtype)
            if 0 < largest < math.inf and mean_square > 0:
                overflow[name] = math.log2(limits.max) - math.log2(largest)
                underflow[name] = math.log2(mean_square) - math.log2(limits.smallest_normal)

        for (name, dtype), found in zip(kinds, outputs.view(-1, 2).tolist(), strict=True):
            add(name, dtype, *found)
        numbered = enumerate(self._optimizer.param_groups)
        groups = {id(each): str(group.get("name", number)) for number, group in numbered for each in group["params"]}
        squares: defaultdict[str, float] = defaultdict(float)
        for (name, each), (largest, norm, size) in zip(named, rows.view(3, -1).T.tolist(), strict=True):
            add(f"{name}.grad", self._half or each.dtype, largest, norm / math.sqrt(local(each).numel()))
            squares[groups.get(id(each), "none")] += size * size
        lost: dict[str, Counts] = {}
        if updates is not None and len(counts):
            whole = counts.view(-1, len(Counts._fields)) * updates.weights()[:, None]
            parameters = dict(self._model.named_parameters())
            for name, row in zip(updates.names, whole.tolist(), strict=True):
                group = groups.get(id(parameters.get(name)), "none")
                lost[group] = Counts(*map(sum, zip(lost.get(group, [0.0] * len(row)), row, strict=True)))
        norms = {group: math.sqrt(square) for group, square in squares.items()}
        return Measured(step, mean.item(), skipped, lost, norms, overflow, underflow)


def are_finite(gradients: list[Tensor], device: torch.device, now: bool) -> Tensor | bool:
    """Return whether all gradients are finite: ``now``, or as a bool scalar that stays on the device.

    On a CPU a sum takes a fifth of the time of a maximum; where it is not finite, that decides.
    """
    parts = [part for each in gradients if (part := _values(local(each))).numel()]
    if not parts:
        return torch.ones((), dtype=torch.bool, device=device)
    if device.type == "cpu":
        small: list[Tensor] = []
        large: list[Tensor] = []
        for each in parts:
            (small if each.numel() < _SMALL and each.dtype == torch.float32 else large).append(each)
        large += [torch._utils._flatten_dense_tensors(small)] if small else []  # one call in the place of many
        if now:
            return all(math.isfinite(each.sum().item()) or finite(each) for each in large)
        norms = [bound.abs() for each in large for bound in torch.aminmax(each)]
    else:
        norms = list(torch._foreach_norm(parts, math.inf, dtype=wide_dtype(parts)))
    return torch.stack([each.to(device) for each in norms]).max() < math.inf


def _values(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers, real and in a dense tensor."""
    if tensor.layout != torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, fp32 scalar."""
    low, high = torch.aminmax(tensor)  # six times faster than an infinity norm on a CPU
    return torch.maximum(-low, high).float()
