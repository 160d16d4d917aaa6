"""What rounding does to the updates of 16-bit weights, of buffers, and of weights that the forward pass changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.doctor.budget import Budget
from mantissa.doctor.finding import LOST, MOMENT, UPDATE, Cure, Examined, Finding
from mantissa.errors import FormatError
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import FORWARD
from mantissa.step.updates import MOST, Counts, UpdateMeter, is_elementwise
from mantissa.tensors import relative_error

_SHOWN = 3
"""Findings of one step, at most."""


def updates(step: Step, budget: Budget) -> Examined:
    """Take the optimizer's step, and return what rounding to 16-bit weights does to its updates.

    Only weights that are kept in 16 bits between steps are judged: masters hold what their copies lose, and stochastic
    rounding loses single updates on purpose.
    """
    if not step.format.only_half:
        return Examined()
    replay = Replay.as_run(step)
    name = type(replay.optimizer).__name__
    if not is_elementwise(name):
        raise FormatError(f"{name} treats elements together")
    try:
        meter = UpdateMeter(replay.model, replay.optimizer, replay.format.half, replay.masters, replay.built.clip)
        replay.built.stand_before(step)
        replay.update(replay.run().correction, meter)
    except Exception as error:  # an optimizer that cannot be copied, or does not treat each element alone
        raise FormatError(f"{name}: {error}") from error
    findings = _judged(meter.results(), step)
    modules = {finding.module for finding in findings}
    more = [f"{len(modules)} modules have such updates; the worst {_SHOWN} are shown"] if len(findings) > _SHOWN else []
    return Examined(findings=tuple(findings[:_SHOWN]), notes=(*_lost_decay(replay), *more))


def _judged(updates: dict[str, Counts], step: Step) -> list[Finding]:
    """Return what is wrong with one step's updates, the worst parameter of each module, the worst modules first."""
    other = step.with_fp32_weights()
    cure = Cure(step.remedies.format(other.format), other)

    def fault(kind: str, parameter: str, detail: str) -> Finding:
        module, detail = parameter.rpartition(".")[0], f"{parameter}: {detail}"
        return Finding(kind, UPDATE, module, step.format.name, detail=detail, candidates=(cure,))

    findings = []
    # The second moment, by which Adam divides, is 0 where the gradient is not.
    for parameter, share in _worst({name: counts.moment_zero_share for name, counts in updates.items()}).items():
        zero = f"the second moment of {share:.0%} of the elements is 0 in {step.format.number.name}"
        findings.append(fault(MOMENT, parameter, f"{zero}, their gradient is not"))
    # Updates are rounded away, and what is left points elsewhere.
    lost = {name: counts.lost_share for name, counts in updates.items() if counts.loses_updates}
    for parameter, share in _worst(lost).items():
        quality = f"effective descent quality {updates[parameter].edq:.2f}"
        findings.append(fault(LOST, parameter, f"{share:.0%} of the updates are rounded away, {quality}"))
    return findings


def _worst(shares: dict[str, float]) -> dict[str, float]:
    """Return of each module the parameter with the largest share, of those above ``MOST``, the largest first."""
    worst: dict[str, str] = {}
    for parameter in sorted(shares, key=shares.__getitem__, reverse=True):
        if shares[parameter] > MOST:
            worst.setdefault(parameter.rpartition(".")[0], parameter)
    return {parameter: shares[parameter] for parameter in worst.values()}


def _lost_decay(replay: Replay) -> Iterator[str]:
    """Yield that weight decay is rounded away, once."""
    number = replay.format.number
    for group in replay.optimizer.param_groups:
        decay = float(group["lr"] * group.get("weight_decay", 0.0))
        rounds = group.get("decoupled_weight_decay") and not group.get("fused")  # fused kernels compute in fp32
        if rounds and 0 < decay < number.unit_roundoff / 2:
            lost = f"lr x weight_decay = {decay:.2g} of a weight is less than half of its spacing in"
            yield f"weight decay changes nothing: {lost} {number.name}; keep weights in fp32"
            return


_STEPS = 8
"""After so many steps the updates are measured: at first a momentum encoder equals its model."""
_LOST = 0.5
"""Relative error from which on an update has lost most of what it should be."""


def state_updates(step: Step, budget: Budget) -> Examined:
    """Return the 16-bit buffers and frozen weights whose updates in the forward pass are lost by rounding."""
    replay = Replay.as_run(step)
    if not any(tensor.dtype.itemsize == 2 for tensor in _state(replay).values()):
        return Examined()
    replay.train(step.following(_STEPS))
    later = replay.after(_STEPS)

    # The same step from there: what it changes as the run takes it, and in the reference.
    low, reference = Replay.as_run(later), Replay.reference(later)
    before = {name: tensor.clone() for name, tensor in _state(low).items()}
    changes = []
    for side in (low, reference):
        side.run()
        changes.append({name: tensor.double() - before[name].double() for name, tensor in _state(side).items()})

    lost: dict[str, dict[str, str]] = {}
    for name, start in before.items():
        real, exact = changes[0][name], changes[1][name]
        if start.dtype.itemsize != 2 or not exact.any() or not relative_error(real, exact) > _LOST:
            continue
        share = ((real == 0) & (exact != 0)).sum().item() / (exact != 0).sum().item()
        lost.setdefault(name.rpartition(".")[0], {})[name] = (
            f"{name} is {dtype_name(start.dtype)}, and the forward pass updates it: {share:.0%} of the elements "
            f"do not move, the error of the update is {relative_error(real, exact):.0%}; keep it in fp32"
        )
    return Examined(
        findings=tuple(
            Finding(LOST, FORWARD, owner, step.format.name, detail="; ".join(of.values()), tensor=", ".join(of))
            for owner, of in lost.items()
        )
    )


def _state(replay: Replay) -> dict[str, Tensor]:
    """Return the buffers and the weights that no optimizer changes, by name."""
    frozen = {name: weight.detach() for name, weight in replay.model.named_parameters() if not weight.requires_grad}
    state = frozen | dict(replay.model.named_buffers())
    return {name: tensor for name, tensor in state.items() if torch.is_floating_point(tensor)}
