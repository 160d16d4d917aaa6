"""The sum of the ranks' gradients in 16 bits, as DDP exchanges them, computed in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from evidence.doctor.step.case import CaseTrainer, finite
from evidence.doctor.step.finding import EXCHANGE, OVERFLOW, Finding
from mantissa.display import dtype_name


def overflow_of_sum(trainer: CaseTrainer, ranks: int) -> list[Finding]:
    """Return the parameters whose gradients are finite on every rank, and whose sum over the ranks is not.

    The microbatches go to the ranks in rotation, as in training. Only 16-bit gradients are looked at.
    """
    case = trainer.case
    gradients: dict[str, list[Tensor]] = {}
    for rank in range(ranks):
        trainer.start()
        own = case.microbatches[rank::ranks]
        if not own:
            return []
        trainer.gradients(own)
        for name, gradient in _in_weights_dtype(trainer).items():
            if gradient.dtype.itemsize == 2:
                gradients.setdefault(name, []).append(gradient)
    found = []
    for name, parts in gradients.items():
        total = torch.stack(parts).sum(0)
        if all(map(finite, parts)) and not finite(total):
            wide = torch.stack(parts).double().sum(0).abs().max().item()
            found.append(
                Finding(
                    OVERFLOW,
                    EXCHANGE,
                    name.rpartition(".")[0],
                    f"sum of {ranks} ranks",
                    "all_reduce",
                    dtype_name(total.dtype),
                    tuple(total.shape),
                    f"the gradient of {name} is finite on every rank; their sum is {wide:.6g} > "
                    f"{torch.finfo(total.dtype).max:.6g}",
                )
            )
    return found


def _in_weights_dtype(trainer: CaseTrainer) -> dict[str, Tensor]:
    """Return a rank's gradients as they are exchanged: masters' sums are rounded to the weights' dtype first."""
    if trainer.masters is None:
        return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    weights = dict(trainer.model.named_parameters())
    trainer.masters.take_gradients()
    return {
        name: master.grad.to(weights[name].dtype)
        for name, master in trainer.masters.named_parameters()
        if master.grad is not None
    }
