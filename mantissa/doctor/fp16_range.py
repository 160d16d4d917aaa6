"""Which loss scales hold a step's gradients in fp16: exponents of the reference's gradients, which any scale shifts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.display import dtype_name
from mantissa.doctor.budget import Budget
from mantissa.doctor.cures import scale_cures
from mantissa.doctor.finding import SCALE, UNDERFLOW, Examined, Finding
from mantissa.doctor.limits import NOISE
from mantissa.formats import FP16
from mantissa.step.batch import Batch
from mantissa.step.replay import LEAST_SCALE, Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, DtypeRecorder
from mantissa.tensors import numbers_in, relative_error, values

_FP16 = dtype_name(FP16.dtype)
LOWEST, HIGHEST = -75, 30
"""The smallest and the largest exponent, floor(log2(|g|)), that is counted. What is beyond is counted with these."""
_BINS = HIGHEST - LOWEST + 1
_HALF_OF_LEAST = -25
"""Numbers below 2 to that power are rounded to 0 in fp16, whose least number is 2**-24."""
HELD = 2**-11
"""A scale holds a gradient, if at most this share of its norm is rounded to 0: fp16's unit roundoff. The number of
elements says little: healthy GPT-2 loses 11 % of the elements of an attention's bias (the part of the keys, whose
gradient is 0 but for rounding), and 2e-11 of its norm."""
JUDGED = 0.1
"""A layer has lost its gradient, if more than this share of the norm is rounded to 0. Healthy recipes lose 2e-8 at
most, at their first step with a scale of 65536."""

_OF_EPS, _OF_LARGEST = 1e-2, 1e-9
"""Shares of the optimizer's eps, or where it has none, of the step's largest weight gradient: a layer whose weight
gradients are all smaller does not move, so it loses nothing with them."""


@dataclass(eq=False)
class Exponents:
    """The base-2 exponents of one gradient of a layer at scale 1, of all microbatches."""

    module: str
    tensor: str
    """``output``, or the name of a parameter."""
    half: bool = False
    """Whether the run has it in 16 bits."""
    zeros: int = 0
    amax: float = 0.0
    counts: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    """Numbers of elements with each exponent, from ``LOWEST`` on."""
    squares: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    """The sum of the squares of the elements with each exponent."""

    @property
    def name(self) -> str:
        """Name of the tensor in the model."""
        return f"{self.module}.{self.tensor}".lstrip(".")

    def add(self, gradient: Tensor) -> None:
        """Count a gradient; what is not finite is left out."""
        size = values(gradient.detach()).abs().flatten()
        size = size[size.isfinite()]
        there = size[size != 0]
        self.zeros += size.numel() - there.numel()
        if there.numel():
            bins = (torch.frexp(there)[1] - 1).clamp_(LOWEST, HIGHEST).sub_(LOWEST).long()
            self.amax = max(self.amax, there.max().item())
            with _any_order():  # in which CUDA adds weights up
                self.counts += torch.bincount(bins, minlength=_BINS).cpu()
                self.squares += torch.bincount(bins, there.double().square(), _BINS).cpu()

    def lost(self, scale: float) -> float:
        """Return the share of the norm of the elements that become 0 in fp16 at a scale, below half of its least."""
        border = max(0, min(_BINS, _HALF_OF_LEAST - math.frexp(scale)[1] + 1 - LOWEST))
        total = self.squares.sum().item()
        return math.sqrt(self.squares[:border].sum().item() / total) if total else 0.0

    def least_scale(self, share: float = HELD) -> int:
        """Return the exponent of the least scale that loses no more than this share of the norm."""
        exponent = _HALF_OF_LEAST - HIGHEST
        while exponent < _HALF_OF_LEAST - LOWEST and self.lost(2.0**exponent) > share:
            exponent += 1
        return exponent


@contextmanager
def _any_order() -> Iterator[None]:
    """Allow operators whose result is not repeatable, for a measurement."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@dataclass(frozen=True, kw_only=True)
class Range(Examined):
    """What scales hold the gradients of a step, whose rows are ``Exponents``."""

    highest: int | None = None
    """The exponent of the largest scale that is safe; None: there is no gradient in fp16."""
    lowest: int | None = None
    """Exponent of the least scale that holds every layer."""

    @property
    def proposed(self) -> float | None:
        """Scale to begin with: 65536, as torch's scaler, or the nearest that holds all; None: none but tiny ones."""
        if self.highest is None or self.lowest is None or self.lowest > self.highest:
            return None
        scale = 2.0 ** min(self.highest, max(16, self.lowest))
        return scale if scale >= LEAST_SCALE else None

    def text(self) -> str:
        """Return which scales fit, in a line; there is a gradient in fp16."""
        assert self.highest is not None
        assert self.lowest is not None
        if self.lowest <= self.highest:
            return f"scale: 2^{self.lowest} … 2^{self.highest} holds all gradients"
        above = f"above 2^{self.highest} the largest gradients overflow"
        return f"scale: none holds all gradients; {above}, below 2^{self.lowest} the smallest are lost"


def fp16_range(step: Step, budget: Budget) -> Range:
    """Return the range of a step's gradients: those of layers, which are submodules that have parameters themselves.

    A weight gradient that changes by half or more where weights change by one rounding is noise, and is not judged.
    """
    reference = Replay.reference(step)
    few = step.first_samples()
    if not step.format.needs_loss_scale:
        return Range(rows=tuple(_exponents(reference, few)))
    layers = _exponents(reference, step.microbatches)
    half = _in_fp16(Replay.as_run(step))
    for layer in layers:
        layer.half = layer.name in half

    # The largest gradient bounds the scale. Smaller ones than the least exponent, such as those of an attention that is
    # saturated, are 0 for any optimizer.
    held = [layer for layer in layers if layer.half and layer.amax > 2.0**LOWEST]
    if not held:
        return Range(rows=tuple(layers))
    largest = max(held, key=lambda layer: layer.amax)
    highest = math.floor(math.log2(FP16.largest / largest.amax)) - 1

    # A layer is judged if it moves, and its gradient is more than noise.
    sizes = {layer.module: 0.0 for layer in layers}
    for layer in layers:
        sizes[layer.module] = max(sizes[layer.module], layer.amax if layer.tensor != "output" else 0.0)
    least = _OF_EPS * step.eps or _OF_LARGEST * max(sizes.values())
    noise = _noise(reference, few)
    judged = [layer for layer in held if layer.name not in noise and sizes[layer.module] >= least]
    limits = Range(
        rows=tuple(layers), highest=highest, lowest=max((layer.least_scale() for layer in judged), default=0)
    )

    # What the step's scale loses, or the largest that its scaler would find: of each module the worst tensor.
    scale = min(step.scale, 2.0**highest) if step.least_scale else step.scale
    worst: dict[str, Exponents] = {}
    for layer in judged:
        if layer.lost(scale) > JUDGED:
            worst[layer.module] = max(worst.get(layer.module, layer), layer, key=lambda other: other.lost(scale))
    return replace(limits, findings=tuple(_finding(layer, largest, scale, limits, step) for layer in worst.values()))


def _finding(layer: Exponents, largest: Exponents, scale: float, limits: Range, step: Step) -> Finding:
    what = "output gradient" if layer.tensor == "output" else f"{layer.tensor} gradient"
    lost = f"{layer.lost(scale):.0%} of its norm becomes 0"
    detail = f"{what} of at most {layer.amax:.2g}: at a scale of {scale:g}, {lost}"
    needed, highest = layer.least_scale(JUDGED), limits.highest
    assert highest is not None
    if needed > highest:
        place = f"{largest.module} ({largest.tensor}, up to {largest.amax:.2g})"
        detail += f"; it needs 2^{needed}, and above 2^{highest} the gradient of {place} overflows"
        return Finding(SCALE, BACKWARD, layer.module, step.format.name, dtype=_FP16, detail=detail)
    cures = scale_cures(step, limits.proposed)
    return Finding(UNDERFLOW, BACKWARD, layer.module, step.format.name, dtype=_FP16, detail=detail, candidates=cures)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules with trainable parameters of their own, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    }


def _exponents(reference: Replay, microbatches: list[Batch]) -> list[Exponents]:
    """Take the step, or a part of it, in the reference, and count its gradients as the run divides the loss."""
    layers: dict[tuple[str, str], Exponents] = {}
    share = reference.step.share(microbatches)
    replay = reference.of(reference.step.with_microbatches(microbatches))

    def of(module: str, tensor: str) -> Exponents:
        return layers.setdefault((module, tensor), Exponents(module, tensor))

    def count(module: str, tensor: str, gradient: Tensor) -> None:
        of(module, tensor).add(gradient * share)

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_autograd_node() is None:  # else it is recomputed
            of(name, "output")
            for tensor in numbers_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(count, name, "output"))

    with ExitStack() as hooks:
        for name, module in _layers(reference.model).items():
            hooks.callback(module.register_forward_hook(partial(after, name)).remove)
            for part, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    hooks.callback(parameter.register_hook(partial(count, name, part)).remove)
        gradients = replay.run().gradients
    for name, gradient in gradients.items() if len(microbatches) > 1 else ():
        owner, _, part = name.rpartition(".")
        if layer := layers.get((owner, part)):  # the sum over microbatches may be larger than each
            layer.amax = max(layer.amax, gradient.abs().max().item() * share)
    return list(layers.values())


def _in_fp16(low: Replay) -> set[str]:
    """Return the names of the gradients that the run has in fp16, from a forward pass of a few samples."""
    weights = dict(low.model.named_parameters(remove_duplicate=False))
    recorder = DtypeRecorder(low.model, {weight.data_ptr(): name for name, weight in weights.items()})
    low.forward(recorder)
    cast = {weight for (weight, _), dtype in recorder.casts.items() if dtype == _FP16}
    half = {name for name, weight in weights.items() if weight.dtype == torch.float16 or name in cast}
    outputs = [module for module, dtypes in recorder.outputs.items() if dtypes[torch.float16]]
    return half | {Exponents(module, "output").name for module in outputs}


def _noise(reference: Replay, few: list[Batch]) -> set[str]:
    """Return the weights whose gradients are noise: they change where weights change by one rounding of fp16."""
    replay = reference.of(reference.step.with_microbatches(few))
    exact = replay.true_gradients()
    replay.perturb(FP16.unit_roundoff, 0)
    other = replay.true_gradients()
    return {name for name, gradient in exact.items() if not relative_error(other[name], gradient) < NOISE}
