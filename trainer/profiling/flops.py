"""The floating-point operations of a model's training step, counted by torch's formulas."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from mantissa.tensors import tensors

_ATTENTION = "_scaled_dot_product_"
_LOSS_IN_CHUNKS = "_linear_cross_entropy_batch_chunked"
_FACTORS = {"addmm": (1, 2), "baddbmm": (1, 2)}
"""The places of a matmul's two factors among an operator's arguments, where they are not the first two."""
_KNOWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "torch_nn"}
"""The namespaces of operators without a formula that multiply no matrices; others are of custom kernels."""
_WITHOUT_FORMULA = (
    *("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "addbmm"),
    *("_addmm_activation", "_trilinear", "_cdist_forward"),
)
_FAMILIES_WITHOUT_FORMULA = ("_fft_", "fft_", "linalg_", "_linalg_", "_triton")


class ModelFlops(TorchDispatchMode):
    """Counts the model FLOPs of a training step, forward and backward, while it sees the forward pass alone.

    A matmul of 2mnk FLOP has two matmuls of the same size in the backward pass, one for the gradient
    of each factor, if that factor needs one. Attention has two matmuls, both of whose factors need gradients. So
    nothing that is recomputed counts: not the blocks of activation checkpointing, nor the scores in attention's
    backward pass, nor logits of a loss in chunks. Only matmuls and convolutions count, and attention counts as if it
    were not causal (Chowdhery et al., "PaLM", 2022, appendix B).

    The formulas are those of ``torch.utils.flop_counter``; a custom operator needs one too
    (``torch.utils.flop_counter.register_flop_formula``).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        """FLOP so far."""
        self.unknown: set[str] = set()
        """Operators that compute an unknown number."""
        # What autograd does not mark itself: inside of a torch.autograd.Function, and where gradients are off.
        self._depends = WeakTensorKeyDictionary()

    def facts(self, unit: str, units: int) -> dict[str, Any]:
        """Return the model FLOP of one unit, ``per_unit``, or why it is ``unknown``, as JSON types.

        Args:
            unit: what is counted, such as ``tokens``.
            units: of the forward pass.
        """
        unknown = None
        if self.unknown:
            unknown = f"torch has no FLOP formula for {', '.join(sorted(self.unknown))}"
        elif not self.total or not units:
            unknown = f"no matmuls in a forward pass over {units} {unit}"
        return {"per_unit": None if unknown else self.total / units, "unit": unit, "unknown": unknown}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count it."""
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        name = str(getattr(packet, "__name__", packet))
        formula = _formula(packet, name)
        if formula is None and isinstance(func, torch._ops.OpOverload) and func is not torch.ops.prim.device.default:
            with self:  # in inference mode composite operators arrive here
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        result = func(*args, **kwargs)
        needing = any(map(self._needs, tensors((args, kwargs))))
        if formula is not None:
            self._add(name, formula, args, kwargs, result, needing)
        elif _is_unknown(func, name, result):
            self.unknown.add(str(packet))
        if needing and name != "detach":
            for made in tensors(result):
                if made.is_floating_point():
                    self._depends[made] = True
        return result

    def _add(
        self, name: str, formula: Callable[..., int], args: Any, kwargs: dict[str, Any], result: Any, needing: bool
    ) -> None:
        try:
            forward = formula(*args, **kwargs, out_val=result)
        except (AssertionError, ValueError, TypeError, AttributeError):  # shapes that the formula does not know
            self.unknown.add(name)
            return
        factors = [args[place] for place in _FACTORS.get(name, (0, 1)) if place < len(args)]
        if name in _MATMULS or _LOSS_IN_CHUNKS in name:
            backward = sum(map(self._needs, factors))
        else:
            backward = 2 * needing
        self.total += int(forward) * (1 + backward)

    def _needs(self, tensor: Tensor) -> bool:
        """Return whether backward computes a gradient of this tensor."""
        if tensor.requires_grad or tensor in self._depends:
            return True
        if not is_traceable_wrapper_subclass(tensor):
            return False
        return any(self._needs(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def _linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOP of ``x @ weight.t()``."""
    return 2 * x.numel() * weight.shape[0]


def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOP of attention's two matmuls, of tensors of batch × heads × tokens × width."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


_MATMULS = {
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "_convolution", "cudnn_convolution"),
    *("convolution_overrideable", "_slow_conv2d_forward", "linear"),
}
"""Operators whose factors may need a gradient or not."""


def _formula(packet: Any, name: str) -> Callable[..., int] | None:
    if name.startswith(_ATTENTION) and not name.endswith("_backward"):
        return attention  # torch 2.11's own refuses groups of queries
    if _LOSS_IN_CHUNKS in name or packet is torch.ops.aten.linear:
        return _linear  # torch lacks them
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return formula


def _is_unknown(func: Any, name: str, result: Any) -> bool:
    """Return whether an operator without a formula may multiply matrices."""
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator: what is in it cannot be seen
        return True
    if not any(made.is_floating_point() or made.is_complex() for made in tensors(result)):
        return False
    if func.namespace not in _KNOWN:
        return True
    return name in _WITHOUT_FORMULA or name.startswith(_FAMILIES_WITHOUT_FORMULA)
