"""What is measured of single optimizer steps while a model trains."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mantissa.display import columns, listed
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
from mantissa.watch.hooks import Listener, observing

_SAMPLE = 4096
"""Elements of a parameter whose updates are measured, at most."""
_SMALL = 4096
"""Elements below which a tensor is sooner copied than read by a call of its own."""
_NEAR = 1.0
"""Bits below the largest number of a dtype that are worth a warning."""
_FAR = 40.0
"""Bits to overflow or underflow from which on they say nothing; fp16 has 40 in all."""


class Measured(NamedTuple):
    """What one measured step did, on this rank."""

    step: int
    loss: float
    """Mean over the microbatches; NaN: not known."""
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

    def metrics(self) -> dict[str, float]:
        """Return the measurement for any logger, as numbers by name."""
        numbers = {"loss": self.loss, "skipped_steps": self.skipped}
        numbers |= {f"lost_updates/{group}": counts.lost_share for group, counts in self.lost.items()}
        numbers |= {f"weight_norm/{group}": norm for group, norm in self.weights.items()}
        for name, bits in (("overflow", self.overflow), ("underflow", self.underflow)):
            numbers[f"least_bits_to_{name}"] = min(bits.values(), default=math.nan)
        return {f"precision/{name}": number for name, number in numbers.items()}

    def harms(self, scaled: bool, known: Collection[str]) -> dict[tuple[str, ...], str]:
        """Return what is harmful, as sentences with their cures, by the groups and tensors that each is about.

        Args:
            scaled: whether a scaler raises its scale until gradients overflow, which is no harm.
            known: groups and tensors that are left out.
        """
        harms: dict[tuple[str, ...], str] = {}
        for group, counts in self.lost.items():
            if counts.loses_updates and group not in known:
                share = f"{counts.lost_share:.0%} of the updates of parameter group {group}"
                harms[(group,)] = f"{share} are lost, too small for the weights' dtype: keep fp32 weights."
            elif self.step > 1 and counts.gradients and not counts.moving and f"moves of {group}" not in known:
                # As in the first step of some warm-ups.
                cause = "if that is not meant, look at its learning rate"
                harms[(f"moves of {group}",)] = f"No weight of parameter group {group} moves in this step; {cause}."
        for group, norm in self.weights.items():
            if not math.isfinite(norm) and f"weights of {group}" not in known:
                cause = "but all gradients were: look at the optimizer, such as for an eps of 0"
                harms[(f"weights of {group}",)] = f"Weights of parameter group {group} are not finite, {cause}."
        near = [name for name, bits in self.overflow.items() if bits < _NEAR and name not in known]
        if scaled:
            near = [name for name in near if not name.endswith(".grad")]
        if near:
            cure = "compute there in fp32, or in bf16 in the place of fp16"
            harms[tuple(near)] = f"{listed(near, 'tensor')} within a factor of 2 of their dtype's largest: {cure}."
        return harms


def side_by_side(first: Measured, last: Measured) -> str:
    """Return two measurements as a table: of headroom, the three places in ``last`` that have the least.

    The same one twice is one column.
    """
    rows = [["", f"step {first.step}", f"step {last.step}"]]

    def add(text: str, before: dict[str, float], now: dict[str, float], names: Collection[str]) -> None:
        rows.extend([f"{text}{name}", f"{before.get(name, math.nan):.4g}", f"{now[name]:.4g}"] for name in names)

    def lost(measured: Measured) -> dict[str, float]:
        return {group: counts.lost_share for group, counts in measured.lost.items()}

    add("loss", {"": first.loss}, {"": last.loss}, [""])
    add("lost updates, group ", lost(first), lost(last), last.lost)
    add("weight norm, group ", first.weights, last.weights, last.weights)
    for name in ("overflow", "underflow"):
        before, now = getattr(first, name), getattr(last, name)
        least = sorted(now, key=now.__getitem__)[:3]
        add(f"bits to {name}, ", before, now, [place for place in least if now[place] < _FAR])
    return columns([row[:2] for row in rows] if first is last else rows)


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
        """Largest element and norm of the gradient of each of them, with the loss scale, and norm of the weight."""
        self._counts = torch.empty(0, len(Counts._fields))
        """Row of ``Counts`` of each parameter that ``_updates`` measures."""
        weights = set(map(id, model.parameters()))
        alone = is_elementwise(type(optimizer).__name__)
        self._measurable = alone and all(id(changed) in weights for changed in changed_by(optimizer))  # and no copies

    @property
    def ready(self) -> bool:
        """Whether ``before`` was called, and ``end`` not yet."""
        return bool(self._rows.numel())

    def begin(self) -> None:
        """Prepare for the forward passes of a step."""
        for name, module in self._model.named_modules() if self._hooked else ():
            if next(module.children(), None) is None:
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
                sizes = torch.stack([_largest(part), mean.float()])
                before = self._outputs.get(name, (None, sizes))[1]  # of another pass, or another output
                self._outputs[name] = part.dtype, torch.maximum(sizes, before)

    @torch.no_grad()
    def before(self, half: torch.dtype | None, scale: Tensor | None, factor: Tensor | None) -> None:
        """Measure gradients and weights before the update.

        Args:
            half: the 16-bit dtype that layers compute in; None: there is none.
            scale: what gradients were multiplied by when they were computed, and are no longer; None: by nothing.
            factor: turns gradients into true ones; None: they are.
        """
        named = [(name, weight) for name, weight in self._model.named_parameters() if measurable(weight.grad)]
        self._named = [(name, weight) for name, weight in named if local(weight).numel()]
        if not self._named:  # the optimizer is another model's, as Watch says
            return
        self._half = half
        # Three numbers of each parameter, in one tensor on the device.
        gradients = [local(weight.grad) for _, weight in self._named if weight.grad is not None]
        weights = [local(weight) for _, weight in self._named]
        device = gradients[0].device
        norms = (torch._foreach_norm(tensors, dtype=wide_dtype(tensors)) for tensors in (gradients, weights))
        rows = ([number.to(device).float() for number in row] for row in (map(_largest, gradients), *norms))
        self._rows = torch.stack(list(map(torch.stack, rows)))
        if scale is not None:
            self._rows[:2] *= scale.to(device)
        # The update that the optimizer would make in fp32 is compared with its own, in ``after``.
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
        known = [loss.real.float().to(device) for loss in losses]
        mean = torch.stack(known).mean() if known else torch.full((), math.nan, device=device)
        # All numbers go to the host in one copy, which nobody waits for.
        outputs = [sizes for _, sizes in self._outputs.values()]
        parts = [numbers.to(device).flatten() for numbers in (mean, *outputs, self._rows, self._counts)]
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

        def add(name: str, dtype: torch.dtype, largest: float, rms: float) -> None:
            limits = torch.finfo(dtype)
            if 0 < largest < math.inf and rms > 0:
                overflow[name] = math.log2(limits.max) - math.log2(largest)
                underflow[name] = math.log2(rms) - math.log2(limits.smallest_normal)

        # Headroom of outputs and gradients, and the norm of the weights by group.
        for (name, dtype), (largest, rms) in zip(kinds, outputs.view(-1, 2).tolist(), strict=True):
            add(name, dtype, largest, rms)
        numbered = enumerate(self._optimizer.param_groups)
        groups = {id(weight): str(group.get("name", at)) for at, group in numbered for weight in group["params"]}
        squares: defaultdict[str, float] = defaultdict(float)
        for (name, weight), (largest, norm, size) in zip(named, rows.view(3, -1).T.tolist(), strict=True):
            add(f"{name}.grad", self._half or weight.dtype, largest, norm / math.sqrt(local(weight).numel()))
            squares[groups.get(id(weight), "none")] += size * size
        # Of updates a sample was counted, which stands for the whole parameter.
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
    parts = [part for gradient in gradients if (part := _values(local(gradient))).numel()]
    if not parts:
        return torch.ones((), dtype=torch.bool, device=device)
    if device.type == "cpu":
        small: list[Tensor] = []
        large: list[Tensor] = []
        for part in parts:
            (small if part.numel() < _SMALL and part.dtype == torch.float32 else large).append(part)
        large += [torch._utils._flatten_dense_tensors(small)] if small else []  # one call in the place of many
        if now:
            return all(math.isfinite(part.sum().item()) or finite(part) for part in large)
        norms = [bound.abs() for part in large for bound in torch.aminmax(part)]
    else:
        norms = list(torch._foreach_norm(parts, math.inf, dtype=wide_dtype(parts)))
    return torch.stack([norm.to(device) for norm in norms]).max() < math.inf


def _values(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers, real and in a dense tensor."""
    if tensor.layout != torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, fp32 scalar."""
    low, high = torch.aminmax(tensor)  # six times faster than an infinity norm on a CPU
    return torch.maximum(-low, high).float()
