"""The sum of the ranks' gradients in 16 bits, as DDP exchanges them, computed in one process."""

from __future__ import annotations

import torch

from mantissa.display import dtype_name
from mantissa.finding import EXCHANGE, OVERFLOW, Finding
from mantissa.step import Replay
from mantissa.tensors import finite


def overflow_of_sum(passes: Replay, ranks: int) -> list[Finding]:
    """Return the parameters whose 16-bit gradients are finite on every rank, and whose sum over the ranks is not.

    The microbatches, as many as ranks or more, go to the ranks in rotation, as in training.
    """
    weights = dict(passes.model.named_parameters())
    by_rank = []
    for rank in range(ranks):
        found = passes.run(passes.microbatches[rank::ranks])
        # Masters' sums are rounded to the weights' dtype before they are exchanged.
        by_rank.append({name: each.to(weights[name].dtype, copy=True) for name, each in found.gradients.items()})
    findings = []
    for name in by_rank[0]:
        parts = torch.stack([gradients[name] for gradients in by_rank])
        total = parts.sum(0)
        if total.dtype.itemsize == 2 and finite(parts) and not finite(total):
            wide, largest = parts.double().sum(0).abs().max().item(), torch.finfo(total.dtype).max
            detail = f"the gradient of {name} is finite on every rank; their sum is {wide:.6g} > {largest:.6g}"
            place = (OVERFLOW, EXCHANGE, name.rpartition(".")[0], f"sum of {ranks} ranks")
            findings.append(Finding(*place, "all_reduce", dtype_name(total.dtype), tuple(total.shape), detail))
    return findings
