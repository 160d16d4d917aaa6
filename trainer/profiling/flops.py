"""The floating-point operations of a model's training step, counted by torch's formulas."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from mantissa.tensors import tensors

_LOSS_IN_CHUNKS = "_linear_cross_entropy_batch_chunked"
_FACTORS = {"addmm": (1, 2), "baddbmm": (1, 2)}
"""The places of a matmul's two factors among an operator's arguments, where they are not the first two."""
_KNOWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "torch_nn"}
"""Namespaces of operators without a formula that multiply no matrices, but for these; others are of custom kernels."""
_WITHOUT_FORMULA = re.compile(
    r".*(rnn|grouped_mm)|_?fft_|_?linalg_|_triton|_trilinear|_cdist|_int_mm|addbmm|_addmm_act"
)


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
        self.forward = 0
        """Those of the forward pass alone."""
        self.unknown: set[str] = set()
        """Operators that compute an unknown number."""
        # What autograd does not mark itself: inside of a torch.autograd.Function, and where gradients are off.
        self._depends = WeakTensorKeyDictionary()

    def per_unit(self, unit: str, units: int) -> tuple[float | None, str | None]:
        """Return the model FLOP of one unit, or None and why it is not known.

        Args:
            unit: what is counted, such as ``tokens``.
            units: of the forward pass.
        """
        if self.unknown:
            return None, f"torch has no FLOP formula for {', '.join(sorted(self.unknown))}"
        if not self.total or not units:
            return None, f"no matmuls in a forward pass over {units} {unit}"
        return self.total / units, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        name = str(getattr(packet, "__name__", packet))
        needing = any(map(self._needs, tensors((args, kwargs))))
        if formula := _formula(packet, name):
            try:
                forward = int(formula(*args, **kwargs, out_val=result))
            except (AssertionError, ValueError, TypeError, AttributeError):  # shapes that the formula does not know
                self.unknown.add(name)
            else:
                self.forward += forward
                factors = tensors([args[place] for place in _FACTORS.get(name, (0, 1)) if place < len(args)])
                self.total += forward * (1 + (2 * needing if "attention" in name else sum(map(self._needs, factors))))
        elif _is_unknown(func, name, result):
            self.unknown.add(str(packet))
        if needing and name != "detach":
            for made in tensors(result):
                if made.is_floating_point():
                    self._depends[made] = True
        return result

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


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOP of attention's two matmuls, of tensors of batch × heads × tokens × width."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _formula(packet: Any, name: str) -> Callable[..., int] | None:
    if name.startswith("_scaled_dot_product_") and not name.endswith("_backward"):
        return _attention  # torch 2.11's own refuses groups of queries
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
    return func.namespace not in _KNOWN or bool(_WITHOUT_FORMULA.match(name))
