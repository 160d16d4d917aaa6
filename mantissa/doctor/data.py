"""What a format rounds away of the data of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.display import dtype_name, listed
from mantissa.doctor.budget import Budget
from mantissa.doctor.cause import standardize
from mantissa.doctor.cures import module_cure
from mantissa.doctor.finding import INPUT, Examined, Finding
from mantissa.step.batch import batch_key
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import Op, Trace

_SIGNAL = 0.1
"""Share of the variation of an input over the samples that a format may round away."""
_ROWS = 8
"""Samples from which on each column of a table can be judged alone."""
_LOST_DATA = 0.5
"""Rounding away this share of what varies in the data is a fault, whatever the gradients say."""


def data(step: Step, budget: Budget) -> Examined:
    """Find data that the format cannot tell apart, and the module that should have it in fp32."""
    finding = rounded_data(step, _LOST_DATA)
    if finding is not None:
        return Examined(findings=(finding,))
    columns = rounded_data(step, _LOST_DATA, columns=True)  # a column alone may be noise
    return Examined(notes=(columns.detail,) if columns else ())


def rounded_data(step: Step, share: float = _SIGNAL, columns: bool = False) -> Finding | None:
    """Return where a tensor of the batch is rounded by more than a share of what varies in it over the samples.

    With ``columns`` those of a table are judged, each alone.
    """
    replay = Replay.as_run(step)
    batch = step.microbatches[0]
    judged = {
        name: tensor
        for name, tensor in batch.items()
        if tensor.is_floating_point()
        and tensor.layout == torch.strided
        and (tensor.ndim == 2 and len(tensor) >= _ROWS if columns else tensor.ndim)
    }
    findings: list[Finding] = []

    def note(op: Op) -> None:
        if not op.casts_to_half or findings or op.args[0].layout != torch.strided:
            return
        given = op.args[0].flatten()
        for name, tensor in judged.items():
            if not torch.equal(tensor.flatten(), given):  # a loss is given copies of the tensors
                continue
            lost = _lost(tensor, op.result.reshape(tensor.shape), columns)
            if (lost > share).any():
                numbers = (lost > share).nonzero().flatten().tolist()
                where = listed(list(map(str, numbers)), "column") if columns else "it"
                key = batch_key(name)
                part = f"{lost.max().clamp(max=1):.0%} of what varies in {where}"
                detail = f"rounding {key} to {dtype_name(op.result.dtype)} loses {part}: subtract the mean before"
                site, named = op.site(op.result), {"detail": detail, "tensor": key}
                cures = standardize(step, name), *([module_cure(step, [site.module])] if site.module else [])
                findings.append(Finding.at(site, INPUT, step.format.name, **named, candidates=cures))

    with Trace(replay.model, note):
        replay.loss(batch)
    return next(iter(findings), None)


def _lost(tensor: Tensor, rounded: Tensor, columns: bool) -> Tensor:
    """Return which share of what varies over the samples is rounded away, of each column or of all."""
    exact = tensor.detach().double()
    error = rounded.double() - exact
    varies, lost, size = (
        torch.linalg.vector_norm(part, dim=0 if columns else None)
        for part in (exact - exact.mean(0), error - error.mean(0), exact)
    )
    return (lost / varies.clamp(min=1e-12 * size)).nan_to_num(0.0)  # a constant has nothing to lose


def rounded_away(step: Step) -> str:
    """Return what to add to a detail where data is rounded away."""
    finding = rounded_data(step)
    return f"; {finding.detail}" if finding else ""
