"""What rounding does to the updates of an optimizer, measured on a sample of every parameter.

The sources: Zamirai et al., "Revisiting BFloat16 Training", 2020 (lost updates); Yu et al., "Collage: Light-Weight
Low-Precision Strategy for LLM Training", 2024 (effective descent quality).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mantissa.finding import LOST, MOMENT, UPDATE, Examined, Finding
from mantissa.formats import Format
from mantissa.step import Masters

SAMPLE = 65536
"""Elements of a parameter that are measured, at most."""
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""Where torch's optimizers keep averages or sums of squared gradients."""
_MOST, _QUALITY = 0.5, 0.9
"""A fault are updates of which more are lost, and whose effective descent quality is less."""
_SHOWN = 3


class Update(Protocol):
    """The end of an optimizer step, from scaled gradients to changed weights."""

    optimizer: torch.optim.Optimizer
    masters: Any
    """See ``mantissa.step.Masters``; None: the optimizer changes the model's own weights."""
    loss_scale: Any
    """``inverse(correction)`` returns the factor that makes gradients true ones; None: they are."""
    clip: Any
    """``apply(gradients, norm)`` clips true gradients of this total norm in place."""

    def step(self, steps_done: int = 0, correction: float = 1.0) -> Any:
        """Take the step; return ``skipped`` (bool) and ``grad_norm`` (of the true gradients), scalars on the device."""


class Counts(NamedTuple):
    """What is measured of one parameter in one step: numbers of sampled elements, and two sums; fp32."""

    moving: Any
    """Whose intended update is not 0."""
    lost: Any
    """Whose intended update is not 0, and whose weight did not change."""
    product: Any
    """The sum of intended update × real update."""
    square: Any
    """The sum of squared intended updates."""
    gradients: Any
    """Whose gradient is not 0."""
    moment_zero: Any
    """Whose gradient is not 0, and whose 16-bit second moment is 0 after the step."""
    in_half: Any
    """Whose gradient was computed in 16 bits."""
    flushed: Any
    """Of these: 0 or subnormal in the 16-bit format, with the loss scale."""

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
        return self.lost_share > _MOST and self.edq < _QUALITY

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
    """With fp16 the largest absolute gradient as backward left it, with the loss scale, fp32 scalar."""


class _Tracked(NamedTuple):
    name: str
    parameter: nn.Parameter
    """What the optimizer updates: the model's weight, or its master."""
    weight: Tensor
    """What is kept of it after the step."""
    in_half: bool


class _Sample(NamedTuple):
    """The sampled elements before the step, and what the optimizer has for them."""

    weight: Tensor
    gradient: Tensor
    """As backward left it, with the loss scale, fp32."""
    state: dict[str, Any]
    group: dict[str, Any]


class UpdateMeter:
    """Measures the updates of the steps that are taken while it is entered.

    The intended update is that of the same optimizer, run once on fp32 copies of the sample: weights, state and true
    gradients. The real one is the change of the weight that is kept between steps: with masters theirs (to the model's
    own weights updates come later, but are not lost), with stochastic rounding the model's.

    The optimizer's own step hooks would see neither the gradients before they are unscaled nor the weights after
    they are rounded, so while it is entered the meter takes the place of ``update.step``.

    Args:
        model: in training.
        update: its update, whose optimizer treats every element of a parameter alone.
        half: the 16-bit dtype that layers compute in; None: there is none.
    """

    def __init__(self, model: nn.Module, update: Update, half: torch.dtype | None) -> None:
        self._update = update
        self._half = half
        masters: Masters | None = update.masters
        own = dict(model.named_parameters())
        held = dict(masters.held()) if masters else {}
        self.stochastic = masters is not None and not held
        """Whether weights are rounded at random: single updates then are lost on purpose."""
        by_weights = any(weight.dtype == half for weight in own.values())  # else autocast, for all of them
        self._tracked = [
            _Tracked(name, parameter, held.get(name, own[name]), own[name].dtype == half or not by_weights)
            for name, parameter in (masters or model).named_parameters()
            if parameter.requires_grad
        ]
        self.names = [each.name for each in self._tracked]
        self.dtypes = [each.weight.dtype for each in self._tracked]
        self._measured: list[Measurement] = []

    def __enter__(self) -> UpdateMeter:
        self._update.step = self._step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._update.step  # its class's own again

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
        parts = [_local(each.weight.detach()) for each in self._tracked]
        return torch.tensor([part.numel() / max(1, len(_elements(part))) for part in parts])

    @torch.no_grad()
    def _step(self, steps_done: int = 0, correction: float = 1.0) -> Any:
        update = self._update
        if update.masters is not None:
            update.masters.take_gradients()
        factor = update.loss_scale.inverse(correction)
        groups = {parameter: group for group in update.optimizer.param_groups for parameter in group["params"]}
        tracked = [each for each in self._tracked if each.parameter.grad is not None]
        samples = {each.name: self._sample(each, groups[each.parameter]) for each in tracked}
        peak = self._peak()
        result = type(update).step(update, steps_done, correction)
        zeros = torch.zeros(len(Counts._fields), device=peak.device)
        rows = {}
        for each in tracked:
            sample = samples.pop(each.name)
            rows[each.name] = self._count(each, sample, self._intended(sample, factor, result.grad_norm))
        taken = ~result.skipped
        counts = torch.where(taken, torch.stack([rows.get(name, zeros) for name in self.names]), zeros)
        self._measured.append(Measurement(steps_done + 1, counts, torch.where(taken, peak, zeros[0])))
        return result

    def _peak(self) -> Tensor:
        gradients = [_local(each.parameter.grad) for each in self._tracked if each.parameter.grad is not None]
        if self._half is not torch.float16:
            return torch.zeros((), device=gradients[0].device)
        norms = torch._foreach_norm([gradient for gradient in gradients if gradient.numel()], math.inf)
        return torch.stack([norm.float() for norm in norms]).max()

    def _sample(self, tracked: _Tracked, group: dict[str, Any]) -> _Sample:
        state = self._update.optimizer.state.get(tracked.parameter, {})
        return _Sample(
            _elements(tracked.weight).clone(),
            _elements(tracked.parameter.grad).to(torch.float32, copy=True),
            {key: _sampled_state(key, value, tracked.weight.shape) for key, value in state.items()},
            dict(group),  # some optimizers count in it
        )

    def _intended(self, sample: _Sample, factor: Tensor | None, norm: Tensor) -> Tensor:
        """Return the update that the optimizer makes in fp32; ``factor`` makes gradients true ones of this ``norm``."""
        copy = nn.Parameter(sample.weight.to(torch.float32, copy=True))
        copy.grad = sample.gradient.clone() if factor is None else sample.gradient * factor
        self._update.clip.apply([copy.grad], norm)
        replica = type(self._update.optimizer)([sample.group | {"params": [copy]}])  # type: ignore[call-arg]
        if sample.state:
            replica.state[copy] = sample.state
        replica.step()
        return copy.detach() - sample.weight

    def _count(self, tracked: _Tracked, sample: _Sample, intended: Tensor) -> Tensor:
        after = _elements(tracked.weight)
        changed, moving = after != sample.weight, intended != 0
        real = after.float() - sample.weight.float()
        nothing = intended.new_zeros(())
        has_gradient = sample.gradient != 0
        state = self._update.optimizer.state.get(tracked.parameter, {})
        moments = [state[key] for key in _SECOND_MOMENTS if key in state and state[key].dtype.itemsize <= 2]
        moment_zero = ((_elements(moments[0]) == 0) & has_gradient).sum() if moments else nothing
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


def ratio(part: float, whole: float) -> float:
    """Return a fraction; NaN of nothing."""
    return part / whole if whole else math.nan


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy; the tensor itself where it is not sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _elements(tensor: Tensor | None) -> Tensor:
    """Return up to ``SAMPLE`` elements of this rank's part of a tensor, at even distances, 1-D.

    The distance has no factor in common with the size, so that the sample is not taken from a few columns only.
    """
    assert tensor is not None
    flat = _local(tensor.detach()).reshape(-1)  # copies only what is not contiguous, as in channels_last
    distance = math.ceil(len(flat) / SAMPLE)
    while distance > 1 and math.gcd(distance, len(flat)) > 1:
        distance += 1
    return flat[:: max(1, distance)]


def _sampled_state(key: str, value: Any, shape: torch.Size) -> Any:
    """Return the sampled elements of a tensor of the parameter's shape in fp32, a copy of anything else."""
    if not isinstance(value, Tensor):
        return value
    if key != "step" and value.shape == shape:
        return _elements(value).to(torch.float32, copy=True)
    return value.clone()


def judge(updates: dict[str, Counts], format: Format) -> Examined:
    """Return what is wrong with one step's updates, the worst modules first.

    Only weights that are kept in 16 bits between steps are judged: masters hold what their copies lose, and stochastic
    rounding loses single updates on purpose.
    """
    if not format.only_half:
        return Examined()
    name = format.number.name

    def finding(kind: str, parameter: str, detail: str) -> Finding:
        return Finding(kind, UPDATE, parameter.rpartition(".")[0], format.name, detail=f"{parameter}: {detail}")

    found = [
        finding(
            MOMENT, parameter, f"the second moment of {share:.0%} of the elements is 0 in {name}, their gradient is not"
        )
        for parameter, share in _worst({each: counts.moment_zero_share for each, counts in updates.items()}).items()
    ]
    lost = {parameter: counts.lost_share for parameter, counts in updates.items() if counts.loses_updates}
    for parameter, share in _worst(lost).items():
        quality = updates[parameter].edq
        detail = f"{share:.0%} of the updates are rounded away, effective descent quality {quality:.2f}"
        found.append(finding(LOST, parameter, detail))
    modules = {each.module for each in found}
    notes = [f"{len(modules)} modules have such updates; the worst {_SHOWN} are shown"] if len(found) > _SHOWN else []
    return Examined(findings=found[:_SHOWN], notes=notes)


def _worst(shares: dict[str, float]) -> dict[str, float]:
    """Return of each module the parameter with the largest share, of those above ``_MOST``, the largest first."""
    found: dict[str, str] = {}
    for parameter in sorted(shares, key=shares.__getitem__, reverse=True):
        if shares[parameter] > _MOST:
            found.setdefault(parameter.rpartition(".")[0], parameter)
    return {parameter: shares[parameter] for parameter in found.values()}
