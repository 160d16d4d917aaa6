"""Which kernels of torch's fused attention a forward pass takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from mantissa import display


class KernelsTaken(TorchFunctionMode):
    """Records the kernel that torch chooses for each kind of call to ``scaled_dot_product_attention``.

    The choice depends on lengths, head width, dtype, mask, dropout and torch's flags, hardly on the number of samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[tuple[str, Any], ...]] = Counter()

    def rows(self) -> list[dict[str, Any]]:
        """Return the kernel, what its choice depends on, and the number of calls, for each kind of call."""
        return [dict(call) | {"calls": count} for call, count in self.calls.items()]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.calls[_call(*args, **kwargs)] += 1
        return function(*args, **kwargs)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> tuple[tuple[str, Any], ...]:
    device = query.device.type
    masked = attn_mask is not None
    if torch.is_autocast_enabled(device):  # as attention itself would do
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    chosen = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return (
        ("kernel", SDPBackend(chosen).name.removesuffix("_ATTENTION").lower()),
        ("dtype", display.dtype_name(query.dtype)),
        ("heads", query.shape[-3]),
        ("length", query.shape[-2]),
        ("head_width", query.shape[-1]),
        ("mask", masked),
        ("causal", is_causal),
        ("dropout", dropout_p),
    )
