"""What is measured of single optimizer steps while a model trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mantissa.setup import Listener, changed_by
from mantissa.tensors import finite, numbers_in
from mantissa.updates import Counts, UpdateMeter, is_elementwise, local, measurable

_SAMPLE = 4096
"""Elements of a parameter whose updates are measured, at most."""


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
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, hooked: bool) -> None:
        self._model, self._optimizer, self._hooked = model, optimizer, hooked
        self._hooks: list[Any] = []
        self._outputs: dict[str, tuple[torch.dtype, list[Tensor]]] = {}
        self._updates: UpdateMeter | None = None
        self._parts: list[Tensor] = []
        self._named: list[tuple[str, nn.Parameter]] = []
        own = set(map(id, model.parameters()))
        alone = is_elementwise(type(optimizer).__name__)
        self._measurable = alone and all(id(each) in own for each in changed_by(optimizer))  # no copies of weights

    @property
    def ready(self) -> bool:
        """Whether ``before`` was called, and ``end`` not yet."""
        return bool(self._parts)

    def begin(self) -> None:
        """Prepare for the forward passes of a step."""
        leaves = ((name, each) for name, each in self._model.named_modules() if next(each.children(), None) is None)
        for name, module in leaves if self._hooked else ():
            self._hooks.append(module.register_forward_hook(Listener(partial(self._returned, name))))

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in numbers_in(output):
            if tensor.numel() and tensor.requires_grad:
                part = local(tensor.detach())
                mean = torch.linalg.vector_norm(part, dtype=torch.float32) / math.sqrt(part.numel())
                self._outputs.setdefault(name, (part.dtype, []))[1].append(torch.stack([_largest(part), mean]))

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
        norms = [list(torch._foreach_norm(tensors, dtype=torch.float32)) for tensors in (gradients, weights)]
        rows = [torch.stack([each.to(device) for each in row]) for row in (list(map(_largest, gradients)), *norms)]
        self._parts = [
            torch.ones(1, device=device) if scale is None else scale.reshape(1).to(device, torch.float32, copy=True),
            *rows,
        ]
        if self._measurable:
            self._updates = self._updates or UpdateMeter(self._model, self._optimizer, half, sample=_SAMPLE)
            self._updates.before(factor)

    def after(self, step: int, taken: Tensor) -> None:
        """Measure what the update did; ``taken``: whether weights were changed, a bool scalar."""
        if self._updates is not None:
            try:
                self._updates.after(step, taken)
                self._parts.append(self._updates.take()[-1].counts.flatten())
            except TypeError:  # an optimizer that cannot be copied
                self._updates, self._measurable = None, False

    def end(self, step: int, losses: list[Tensor], skipped: int) -> Callable[[], Measured]:
        """Return a function that reads the measurement, once the device is done with it."""
        self.close()
        outputs, self._outputs = self._outputs, {}
        parts, self._parts = self._parts, []
        device = next(self._model.parameters()).device
        mean = torch.stack([each.float().to(device) for each in losses]).mean() if losses else torch.tensor(math.nan)
        largest = [torch.stack(found).amax(0) for _, found in outputs.values()]
        flat = torch.cat([each.to(device).flatten() for each in (mean, *largest, *parts)]).to("cpu", non_blocking=True)
        kinds = [(name, dtype) for name, (dtype, _) in outputs.items()]
        return partial(self._read, step, skipped, flat, kinds, self._named)

    def _read(
        self,
        step: int,
        skipped: int,
        flat: Tensor,
        outputs: list[tuple[str, torch.dtype]],
        named: list[tuple[str, nn.Parameter]],
    ) -> Measured:
        values = iter(flat.tolist())
        loss = next(values)
        overflow, underflow = {}, {}

        def add(name: str, dtype: torch.dtype, largest: float, mean_square: float) -> None:
            limits = torch.finfo(dtype)
            if 0 < largest < math.inf and mean_square > 0:
                overflow[name] = math.log2(limits.max) - math.log2(largest)
                underflow[name] = math.log2(mean_square) - math.log2(limits.smallest_normal)

        for name, dtype in outputs:
            add(name, dtype, next(values), next(values))
        scale = next(values, 1.0)
        largest, norms, weights = ([next(values, 0.0) for _ in named] for _ in range(3))
        for (name, each), high, norm in zip(named, largest, norms, strict=True):
            dtype = self._half or each.dtype
            add(f"{name}.grad", dtype, high * scale, norm * scale / math.sqrt(local(each).numel()))
        squares: dict[str, float] = {}
        for (_, each), norm in zip(named, weights, strict=True):
            group = self._group(each)
            squares[group] = squares.get(group, 0.0) + norm * norm
        lost: dict[str, Counts] = {}
        if self._updates is not None:
            weight = self._updates.weights().tolist()
            parameters = dict(self._model.named_parameters())
            for name, times in zip(self._updates.names, weight, strict=True):
                row = [next(values, 0.0) * times for _ in Counts._fields]
                group = self._group(parameters[name])
                lost[group] = Counts(*map(sum, zip(lost.get(group, [0.0] * len(row)), row, strict=True)))
        return Measured(step, loss, skipped, lost, {g: math.sqrt(s) for g, s in squares.items()}, overflow, underflow)

    def _group(self, parameter: nn.Parameter) -> str:
        """Return the name of the optimizer's group that a parameter is in, or its number."""
        for number, group in enumerate(self._optimizer.param_groups):
            if any(each is parameter for each in group["params"]):
                return str(group.get("name", number))
        return "none"


def are_finite(gradients: list[Tensor], device: torch.device, exact: bool) -> Tensor:
    """Return whether all gradients are finite, a bool scalar on the device.

    On a CPU a maximum takes 13 times as long as a sum of squares; where that overflows, ``exact`` looks again.
    """
    parts = [local(each) for each in gradients]
    parts = [each for each in parts if each.numel() and each.layout == torch.strided]
    parts = [torch.view_as_real(each) if each.is_complex() else each for each in parts]
    if not parts:
        return torch.ones((), dtype=torch.bool, device=device)
    on_cpu = device.type == "cpu"
    norms = torch._foreach_norm(parts, 2.0 if on_cpu else math.inf, dtype=torch.float32)
    found = torch.stack([each.to(device) for each in norms]).max() < math.inf
    return torch.tensor(all(map(finite, parts))) if on_cpu and exact and not found else found


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, fp32 scalar."""
    low, high = torch.aminmax(tensor)  # six times faster than an infinity norm on a CPU
    return torch.maximum(-low, high).float()
