"""A mode in which all numbers have a wider dtype, whatever the code asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.tensors import tensors


class Widened(TorchDispatchMode):
    """Replaces every narrower floating-point dtype that an operator asks for by ``dtype``, backward as well.

    So are torch's default dtype, and tensors of narrower ones that an operator only reads, such as a batch.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._before: list[torch.dtype] = []
        narrower = [torch.float16, torch.bfloat16, *([torch.float32] if dtype == torch.float64 else [])]
        self._wider = dict.fromkeys(narrower, dtype)
        if dtype == torch.float64:
            self._wider[torch.complex64] = torch.complex128

    def __enter__(self) -> Widened:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._before.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and any(each.dtype in self._wider for each in tensors((args, kwargs))):
            reads = {each.name: each.alias_info is None for each in func._schema.arguments}  # no views, not in place
            args = [self._cast(value) if each else value for each, value in zip(reads.values(), args, strict=False)]
            kwargs = {name: self._cast(value) if reads[name] else value for name, value in kwargs.items()}
        args, kwargs = [*map(self._of, args)], {key: self._of(value) for key, value in kwargs.items()}
        if func.overloadpacket.__name__.startswith("_fused_"):
            names = [argument.name for argument in func._schema.arguments]
            args = [_as_read(*each) for each in zip(names, args, strict=False)]
            kwargs = {name: _as_read(name, value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _of(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value

    def _cast(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._cast, value))
        return value.to(self._wider.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value


def _as_read(name: str, value: Any) -> Any:
    """Return an argument of a fused optimizer in the dtype in which torch reads it, whatever that of the weights is.

    CUDA's kernels take the first bits of an fp64 step number for an fp32 one, which is then 0.
    """
    if name == "state_steps":
        return [step.float() for step in value]
    return value.float() if name in ("grad_scale", "found_inf") and value is not None else value
