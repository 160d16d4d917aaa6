"""Fused attention of causal models, without a mask."""

from __future__ import annotations

from typing import Any

_CAUSAL = "sdpa_causal"


def use_causal_kernels(network: Any) -> None:
    """Let a causal model with sdpa's attention call it without a mask: every sample is one text.

    Otherwise transformers checks in every forward pass whether texts are packed into a sample: the host waits for
    the device, and where it cannot read the values (a forecast of memory) a mask of T × T is made.

    Args:
        network: transformers' model.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if network.config._attn_implementation == "sdpa":
        AttentionInterface.register(_CAUSAL, sdpa_attention_forward)  # there is no mask of this name, so none is made
        network.config._attn_implementation = _CAUSAL
