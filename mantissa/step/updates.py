"""What rounding does to the updates of an optimizer, measured on a sample of every parameter.

The sources: Zamirai et al., "Revisiting BFloat16 Training", 2020 (lost updates); Yu et al., "Collage: Light-Weight
Low-Precision Strategy for LLM Training", 2024 (effective descent quality).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mantissa.tensors import local, measurable

SAMPLE = 65536
"""Elements of a parameter that are measured, at most."""
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""Where torch's optimizers keep averages or sums of squared gradients."""
MOST, _QUALITY = 0.5, 0.9
"""A fault are updates of which more are lost, and whose effective descent quality is less."""


class Masters(Protocol):
    """The fp32 weights that an optimizer changes in the place of 16-bit ones."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return what the optimizer changes, named as in the model."""

    def persistent_weights(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return those that are kept between steps."""

    def take_gradients(self) -> None:
        """Move the gradients that backward left with the model's weights to the masters."""


class Counts(NamedTuple):
    """What is measured of one parameter in one step: numbers of sampled elements, and two sums; fp32."""

    moving: Any
    """Elements whose intended update is not 0."""
    lost: Any
    """Elements whose intended update is not 0, and whose weight did not change."""
    product: Any
    """The sum of intended update × real update."""
    square: Any
    """The sum of squared intended updates."""
    gradients: Any
    """Elements whose gradient is not 0."""
    moment_zero: Any
    """Elements whose gradient is not 0, and whose 16-bit second moment is 0 after the step."""
    in_half: Any
    """Elements whose gradient was computed in 16 bits."""
    flushed: Any
    """Those of them whose gradient, with the loss scale, is 0 or subnormal in the 16-bit format."""

    @property
    def lost_share(self) -> float:
        """The fraction of the elements with an intended update that did not change; NaN: there are none."""
        return ratio(self.lost, self.moving)

    @property
    def edq(self) -> float:
        """Effective descent quality: ⟨intended, real⟩ / ‖intended‖². 1: as in fp32; 0: nothing arrives."""
        return ratio(self.product, self.square)

    @property
    def loses_updates(self) -> bool:
        """Whether most updates are lost, and what arrives of the others does not make up for it."""
        return self.lost_share > MOST and self.edq < _QUALITY

    @property
    def moment_zero_share(self) -> float:
        """The fraction of the elements with a gradient whose 16-bit second moment is exactly 0 after the step."""
        return ratio(self.moment_zero, self.gradients)


class Measurement(NamedTuple):
    """One measured step; the tensors stay on the device. Zeros if the step was skipped."""

    step: int
    """Counted from 1."""
    counts: Tensor
    """A row for each parameter, with the columns of ``Counts``."""
    peak: Tensor
    """Largest absolute gradient in fp16, with the loss scale, fp32 scalar; 0 in other formats."""


class _Tracked(NamedTuple):
    name: str
    parameter: nn.Parameter
    """Tensor that the optimizer updates: the model's weight, or its master."""
    weight: Tensor
    """Tensor that keeps it after the step."""
    in_half: bool


class _Sample(NamedTuple):
    """The sampled elements before the step, and what the optimizer has for them."""

    weight: Tensor
    gradient: Tensor
    """Gradient as backward left it, with the loss scale, fp32."""
    state: dict[str, Any]
    group: dict[str, Any]
    rows: Tensor | None
    """Indices of the rows that a sparse gradient has, which are sampled alone."""


class UpdateMeter:
    """Measures the updates of the steps that ``before`` and ``after`` are called around.

    The intended update is that of the same optimizer, run once on fp32 copies of the sample: weights, state and true
    gradients. The real one is the change of the weight that is kept between steps: with masters theirs (to the model's
    own weights updates come later, but are not lost), with stochastic rounding the model's.

    Args:
        model: in training.
        optimizer: that treats every element of a parameter alone, see ``is_elementwise``.
        half: the 16-bit dtype that layers compute in; None: there is none.
        masters: of the model's weights; None: the optimizer changes the model's own.
        clip: ``apply(gradients, norm)`` clips true gradients of this total norm in place; None: they are not clipped.
        sample: elements of a parameter that are measured, at most.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        half: torch.dtype | None,
        masters: Masters | None = None,
        clip: Any = None,
        sample: int = SAMPLE,
    ) -> None:
        self._optimizer = optimizer
        self._half = half
        self._clip = clip
        self._size = sample
        weights = dict(model.named_parameters())
        held = dict(masters.persistent_weights()) if masters else {}
        self.stochastic = masters is not None and not held
        """Whether weights are rounded at random: single updates then are lost on purpose."""
        by_weights = any(weight.dtype == half for weight in weights.values())  # else autocast, for all of them
        self._tracked = [
            _Tracked(name, parameter, held.get(name, weights[name]), weights[name].dtype == half or not by_weights)
            for name, parameter in (masters or model).named_parameters()
            if parameter.requires_grad
        ]
        self.names = [tracked.name for tracked in self._tracked]
        self.dtypes = [tracked.weight.dtype for tracked in self._tracked]
        self._measured: list[Measurement] = []

    def take(self) -> list[Measurement]:
        """Return the measurements since the last call. Nothing is copied to the host."""
        measured, self._measured = self._measured, []
        return measured

    def results(self) -> dict[str, Counts]:
        """Return what rounding did in the last measured step, by parameter, on this rank; empty if it was skipped."""
        rows = [Counts(*row) for row in self.take()[-1].counts.tolist()]
        return dict(zip(self.names, rows, strict=True)) if any(map(any, rows)) else {}

    def weights(self) -> Tensor:
        """Return for each parameter how many elements one sampled element stands for, fp32, on the host."""
        parts = [local(tracked.weight.detach()) for tracked in self._tracked]
        return torch.tensor([part.numel() / max(1, len(self._elements(part))) for part in parts])

    @torch.no_grad()
    def before(self, factor: Tensor | None = None) -> None:
        """Sample what the optimizer is about to change, before gradients are unscaled and clipped.

        Args:
            factor: turns gradients, as they are now, into true ones, fp32 scalar; None: they are.
        """
        copies = [dict(group) for group in self._optimizer.param_groups]  # some optimizers count in it
        groups = {parameter: group for group in copies for parameter in group["params"]}
        self._samples = [
            (tracked, self._sample(tracked, gradient, groups[tracked.parameter]))
            for tracked in self._tracked
            if (gradient := tracked.parameter.grad) is not None
            and (measurable(gradient) or gradient.layout == torch.sparse_coo)
            and tracked.parameter in groups
        ]
        self._factor = factor
        self._largest = self._peak()

    @torch.no_grad()
    def after(self, step: int, taken: Tensor, norm: Tensor | None = None) -> None:
        """Compare the weights with those that were sampled before the update, and keep the measurement.

        Args:
            step: counted from 1.
            taken: whether the weights were changed, a bool scalar on the device.
            norm: of the true gradients before they were clipped, fp32 scalar; needed where there is a ``clip``.
        """
        zeros = torch.zeros(len(Counts._fields), device=self._largest.device)
        intended = self._intended(norm)
        rows = {
            tracked.name: self._count(tracked, sample, change)
            for (tracked, sample), change in zip(self._samples, intended, strict=True)
        }
        self._samples.clear()
        counts = torch.where(taken, torch.stack([rows.get(name, zeros) for name in self.names]), zeros)
        self._measured.append(Measurement(step, counts, torch.where(taken, self._largest, zeros[0])))

    def _peak(self) -> Tensor:
        every = [tracked.parameter.grad for tracked in self._tracked]
        gradients = [local(gradient) for gradient in every if measurable(gradient)]
        gradients = [gradient for gradient in gradients if gradient.numel()]
        if self._half is not torch.float16 or not gradients:
            return torch.zeros((), device=self._tracked[0].weight.device)
        norms = torch._foreach_norm(gradients, math.inf)
        return torch.stack([norm.float() for norm in norms]).max()

    def _sample(self, tracked: _Tracked, gradient: Tensor, group: dict[str, Any]) -> _Sample:
        state, rows, shape = self._optimizer.state.get(tracked.parameter, {}), None, tracked.weight.shape
        if gradient.layout == torch.sparse_coo:
            gradient = gradient.coalesce()
            rows, gradient = gradient.indices(), gradient.values()
        return _Sample(
            self._elements(tracked.weight, rows).clone(),
            self._elements(gradient).to(torch.float32, copy=True),
            {key: self._sampled_state(key, value, shape, rows) for key, value in state.items()},
            group,
            rows,
        )

    def _intended(self, norm: Tensor | None) -> list[Tensor]:
        """Return the updates of the samples that the optimizer makes in fp32 of true gradients."""
        if not self._samples:  # as where all gradients are sparse
            return []

        # fp32 copies of the samples with true gradients, clipped as the step clips, in the optimizer's groups.
        copies: list[nn.Parameter] = []
        groups: dict[int, dict[str, Any]] = {}
        for _, sample in self._samples:
            copy = nn.Parameter(sample.weight.to(torch.float32, copy=True))
            gradient = sample.gradient.clone() if self._factor is None else sample.gradient * self._factor
            copy.grad = gradient if sample.rows is None else gradient.to_sparse()
            groups.setdefault(id(sample.group), sample.group | {"params": []})["params"].append(copy)
            copies.append(copy)
        if self._clip is not None:
            self._clip.apply([copy.grad for copy in copies], norm)

        # The same optimizer, with the state that it has, takes one step with them.
        replica = type(self._optimizer)(list(groups.values()))  # type: ignore[call-arg]
        pairs = [(copy, sample) for copy, (_, sample) in zip(copies, self._samples, strict=True)]
        replica.state.update({copy: sample.state for copy, sample in pairs if sample.state})
        replica.step()
        return [copy.detach() - sample.weight for copy, sample in pairs]

    def _count(self, tracked: _Tracked, sample: _Sample, intended: Tensor) -> Tensor:
        after = self._elements(tracked.weight, sample.rows)
        changed, moving = after != sample.weight, intended != 0
        real = after.float() - sample.weight.float()
        nothing = intended.new_zeros(())

        # Second moments that became 0 though there is a gradient, and gradients that 16 bits hold badly.
        has_gradient = sample.gradient != 0
        state = self._optimizer.state.get(tracked.parameter, {})
        moments = [state[key] for key in _SECOND_MOMENTS if key in state and state[key].dtype.itemsize <= 2]
        moment_zero = ((self._elements(moments[0], sample.rows) == 0) & has_gradient).sum() if moments else nothing
        in_half = flushed = nothing
        if self._half is not None and tracked.in_half:
            in_half = torch.full_like(nothing, len(intended))
            flushed = (sample.gradient.abs() < torch.finfo(self._half).smallest_normal).sum()
        counts = Counts(
            moving.sum(),
            (moving & ~changed).sum(),
            torch.dot(intended, real),
            torch.dot(intended, intended),
            has_gradient.sum(),
            moment_zero,
            in_half,
            flushed,
        )
        return torch.stack([count.float() for count in counts])

    def _elements(self, tensor: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return some elements of this rank's part of a tensor, at even distances, 1-D.

        The distance has no factor in common with the size, so that the sample is not taken from a few columns only.
        """
        part = local(tensor.detach()) if rows is None else tensor.detach()[tuple(rows)]
        flat = part.reshape(-1)  # copies only what is not contiguous, as in channels_last
        distance = math.ceil(len(flat) / self._size)
        while distance > 1 and math.gcd(distance, len(flat)) > 1:
            distance += 1
        return flat[:: max(1, distance)]

    def _sampled_state(self, key: str, value: Any, shape: torch.Size, rows: Tensor | None) -> Any:
        """Return the sampled elements of a tensor of the parameter's shape in fp32, a copy of anything else."""
        if not isinstance(value, Tensor):
            return value
        if key != "step" and value.shape == shape:
            return self._elements(value, rows).to(torch.float32, copy=True)
        return value.clone()


def is_elementwise(name: str) -> bool:
    """Return whether an optimizer treats every element of a parameter alone, by the name of its class.

    Not so Adafactor, which keeps sums of rows and columns, Muon, which makes a whole matrix orthogonal, and LAMB, which
    scales an update by norms.
    """
    return name not in ("Adafactor", "Muon", "Lamb")


def ratio(part: float, whole: float) -> float:
    """Return a fraction; NaN of nothing."""
    return part / whole if whole else math.nan
