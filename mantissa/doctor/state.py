"""What a forward pass updates by itself, such as running statistics and momentum encoders, and what 16 bits lose."""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.finding import FORWARD, LOST, Examined, Finding
from mantissa.step import Replay, Step
from mantissa.tensors import relative_error

_STEPS = 8
"""After so many steps the updates are measured: at first a momentum encoder equals its model."""
_LOST = 0.5
"""Relative error from which on an update has lost most of what it should be."""


def state_updates(step: Step) -> Examined:
    """Return the 16-bit buffers and frozen weights whose updates in the forward pass are lost by rounding."""
    own = step.as_run()
    if not any(tensor.dtype.itemsize == 2 for tensor in _state(own).values()):
        return Examined()
    own.train(step.following(_STEPS))
    later = step.after(own, _STEPS)
    low, reference = later.as_run(), later.reference()
    before = {name: tensor.clone() for name, tensor in _state(low).items()}
    changes = []
    for passes in (low, reference):
        passes.run()
        changes.append({name: tensor.double() - before[name].double() for name, tensor in _state(passes).items()})
    findings: dict[str, Finding] = {}
    for name, start in before.items():
        exact, real = changes[1][name], changes[0][name]
        if start.dtype.itemsize != 2 or not exact.any() or not relative_error(real, exact) > _LOST:
            continue
        share = ((real == 0) & (exact != 0)).sum().item() / (exact != 0).sum().item()
        detail = (
            f"{name} is {dtype_name(start.dtype)}, and the forward pass updates it: {share:.0%} of the elements "
            f"do not move, the error of the update is {relative_error(real, exact):.0%}; keep it in fp32"
        )
        owner = name.rpartition(".")[0]
        findings.setdefault(owner, Finding(LOST, FORWARD, owner, step.format.name, detail=detail, tensor=name))
    return Examined(findings=list(findings.values()))


def _state(passes: Replay) -> dict[str, Tensor]:
    """Return the buffers and the weights that no optimizer changes, by name."""
    frozen = {name: each.detach() for name, each in passes.model.named_parameters() if not each.requires_grad}
    found = frozen | dict(passes.model.named_buffers())
    return {name: each for name, each in found.items() if torch.is_floating_point(each)}
