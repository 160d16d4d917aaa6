"""Torch's fused optimizers: whether their results are right here, and what they need before their first step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


def has_fused_kernel(cls: type[torch.optim.Optimizer], device: torch.device) -> bool:
    """Return whether this torch has a fused kernel of an optimizer for a device."""
    name = f"_fused_{cls.__name__.lower()}_"
    key = device.type.upper()
    return hasattr(torch.ops.aten, name) and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


@functools.cache
def fused_is_sound(cls: type[torch.optim.Optimizer], dtype: torch.dtype, device_type: str) -> bool:
    """Test whether torch's fused form of an optimizer updates 16-bit weights on a device like fp32 weights.

    The true gradient of the trial, 2^-30, is 0 in fp16. In torch 2.11 fused SGD does not update some vectors of weights
    on a CPU and overruns its momentum buffer; fused Adagrad computes in 16 bits. On MPS the scale is ignored.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    updated = {}
    with unset_fake_temporarily():  # also while memory is forecast
        for kind, scale in ((torch.float32, 1.0), (dtype, 2.0**20)):
            weight = nn.Parameter(torch.zeros(64, dtype=kind, device=device_type))
            weight.grad = torch.full_like(weight, 2.0**-30 * scale)
            optimizer: Any = cls([weight], lr=2.0**10, fused=True)  # type: ignore[call-arg]
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.step()
            updated[kind] = weight.detach().float()
        return torch.allclose(updated[dtype], updated[torch.float32], rtol=2.0**-6, atol=0.0)


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give fused SGD momentum buffers of zeros, with which its first step is the same as without.

    Torch's own first fused step allocates them without writing, and where that step is skipped for an overflow
    they stay uninitialised: their content is then added to the weights.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
