"""fp32 islands: modules of a 16-bit model that compute in fp32. Inputs are cast to fp32, results are cast back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from mantissa.display import dtype_name, shortened
from mantissa.errors import FormatError, UsageError, names_in, nearest

entered = False
"""Whether the program is inside of an island. Of the whole process, as autocast's own state is."""


def _fp32_forward(
    forward: Callable[..., Any], device_type: str, result: torch.dtype | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a forward with inputs in fp32 and autocast off; the outermost island casts results, but scalars, back.

    Raises:
        FormatError: the weights were cast after ``keep_fp32``, as by ``model.bfloat16()``.
    """
    global entered
    module = getattr(forward, "__self__", None)
    for weight in module._parameters.values() if isinstance(module, nn.Module) else ():
        if weight is not None and weight.is_floating_point() and weight.dtype.itemsize == 2:
            raise FormatError(
                f"a {type(module).__name__} of keep_fp32 has weights in {dtype_name(weight.dtype)} now;"
                " cast the model first, then call keep_fp32; with FSDP2, shard this module apart, in fp32"
            )
    outermost = not entered
    entered = True
    try:
        with torch.autocast(device_type, enabled=False):
            output = forward(*cast(args, torch.float32), **cast(kwargs, torch.float32))
    finally:
        entered = not outermost
    return cast(output, result, scalars=False) if outermost and result else output


def keep_fp32(
    model: nn.Module, names: str | Iterable[str], device_type: str = "", half_weights: torch.dtype | None = None
) -> None:
    """Make submodules compute in fp32, with their weights and all that they contain.

    Args:
        model: changed in place, before its optimizer is made where it has 16-bit weights.
        names: of the submodules, or of one.
        device_type: of the autocast that is turned off in them; empty: the model's, whose weights say the next, too.
        half_weights: the dtype of the model's other weights, to which the results are cast back; None: fp32.

    Raises:
        FormatError: torch's attention is named in part; it uses the weights of its projections, and calls none of them.
            Of other modules that are never called, the code that uses their weights computes as before.
        UsageError: the model has no such submodule.
    """
    names, known = names_in("names", names), [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in set(names) - set(known):
        has = shortened(known[1:]) or "none"
        raise UsageError(f"the model has no submodule {name!r}{nearest(name, known)}; it has {has}")
    if not device_type:
        device_type = next(model.parameters()).device.type
        dtypes = (weight.dtype for weight in model.parameters())
        half_weights = next((dtype for dtype in dtypes if dtype.itemsize == 2), half_weights)

    # A container may never be called, only its children. So they are converted with it.
    inside = {id(module): module for name in names for module in model.get_submodule(name).modules()}

    # torch's attention reads the weights of its projections, and calls none of them.
    for name in names:
        parent = name.rpartition(".")[0]
        attention = model.get_submodule(parent)
        if isinstance(attention, nn.MultiheadAttention) and id(attention) not in inside:
            raise FormatError(
                f"{name} is never called: torch's attention uses its weights directly; name the whole module: {parent}"
            )

    for module in inside.values():
        # Not a closure, so that in a copy of the module it is the copy's own forward.
        forward = functools.partial(_fp32_forward, module.forward, device_type, half_weights)
        module.forward = functools.update_wrapper(forward, module.forward)
        module.float()


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model cast the floating-point tensors that it is given."""
    model.register_forward_pre_hook(lambda _, args, kwargs: (cast(args, dtype), cast(kwargs, dtype)), with_kwargs=True)


def with_fp32_statistics(norm: nn.Module) -> Callable[..., Any]:
    """Return a forward for batch norm (or similar) with 16-bit weights and inputs and fp32 running statistics.

    Torch's kernels take 16-bit inputs with weights and statistics that are both fp32, or both 16-bit.
    """
    forward = norm.forward

    @functools.wraps(forward)
    def mixed_forward(*args: Any, **kwargs: Any) -> Any:
        half = {name: parameter for name, parameter in norm._parameters.items() if parameter is not None}
        try:
            norm._parameters.update({name: parameter.float() for name, parameter in half.items()})  # type: ignore[misc]
            return forward(*args, **kwargs)
        finally:
            norm._parameters.update(half)

    return mixed_forward


def cast(value: Any, dtype: torch.dtype, scalars: bool = True) -> Any:
    """Cast the floating-point tensors in nested tuples, lists, dicts and dataclasses, which keep their types.

    Args:
        value: tensors, and whatever else a forward takes or returns.
        dtype: of the result's floating-point tensors.
        scalars: whether tensors without dimensions are cast too.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and (scalars or value.ndim) else value
    if is_dataclass(value) and not isinstance(value, type):  # transformers' outputs are, besides being dicts
        given = {item.name: getattr(value, item.name) for item in fields(value) if item.init}
        return replace(value, **cast(given, dtype, scalars))
    if isinstance(value, dict):
        result = {key: cast(item, dtype, scalars) for key, item in value.items()}
        if type(value) is dict:  # torch.compile does not trace its copy
            return result
        other = copy.copy(value)
        other.update(result)
        return other
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype, scalars) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast(item, dtype, scalars) for item in value)
    return value
