"""Kernels of torch's fused attention: which ones a run may use."""

from __future__ import annotations

import torch


def allow_cudnn(allowed: bool) -> None:
    """Enable or disable cuDNN's attention on CUDA, for this process.

    Not for models that mask: its backward can give NaN gradients of the query beside a mask where the length is 64
    more than a multiple of 128 (pytorch issue 196678, on Hopper, from torch 2.11 on), and no later cuDNN is known to be
    free of it.
    """
    torch.backends.cuda.enable_cudnn_sdp(allowed)


def enabled() -> list[str]:
    """Return the names of the kernels that are enabled."""
    backends = torch.backends.cuda
    flags = {
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
    }
    return [name for name, flag in flags.items() if flag]
