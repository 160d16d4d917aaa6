"""The sum of the ranks' gradients in 16 bits, as DDP exchanges them, computed in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.finding import EXCHANGE, OVERFLOW, Finding
from mantissa.step import Passes, finite


def overflow_of_sum(passes: Passes, ranks: int) -> list[Finding]:
    """Return the parameters whose gradients are finite on every rank, and whose sum over the ranks is not.

    The microbatches go to the ranks in rotation, as in training. Only 16-bit gradients are looked at.
    """
    gradients: dict[str, list[Tensor]] = {}
    for rank in range(ranks):
        passes.start()
        own = passes.microbatches[rank::ranks]
        if not own:
            return []
        passes.gradients(own)
        for name, gradient in _in_weights_dtype(passes).items():
            if gradient.dtype.itemsize == 2:
                gradients.setdefault(name, []).append(gradient)
    found = []
    for name, parts in gradients.items():
        total = torch.stack(parts).sum(0)
        if all(map(finite, parts)) and not finite(total):
            wide = torch.stack(parts).double().sum(0).abs().max().item()
            detail = (
                f"the gradient of {name} is finite on every rank; their sum is {wide:.6g} > "
                f"{torch.finfo(total.dtype).max:.6g}"
            )
            place = (OVERFLOW, EXCHANGE, name.rpartition(".")[0], f"sum of {ranks} ranks")
            found.append(Finding(*place, "all_reduce", dtype_name(total.dtype), tuple(total.shape), detail))
    return found


def _in_weights_dtype(passes: Passes) -> dict[str, Tensor]:
    """Return a rank's gradients as they are exchanged: masters' sums are rounded to the weights' dtype first."""
    weights = dict(passes.model.named_parameters())
    if passes.masters is not None:
        passes.masters.take_gradients()
    changed = (passes.masters or passes.model).named_parameters()
    return {name: p.grad.to(weights[name].dtype, copy=True) for name, p in changed if p.grad is not None}
