"""Linear layers that multiply numbers of 8 and 4 bits with scales: fp8 and mxfp8 by torchao, nvfp4 by rounding.

Operands are scaled and rounded just before each of the three matmuls of a layer, whose results are bf16; weights stay
fp32. fp8 has a scale for each tensor or row (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), mxfp8 one
for each 32 numbers that are summed (OCP Microscaling Formats Specification 1.0, 2023), nvfp4 see ``nvfp4``. Where the
hardware does not multiply a format, rounded operands are multiplied in wider numbers: what it does to quality is the
same, and its speed and memory are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.formats import BF16, FORMATS, FP8, MXFP8, NVFP4, Number, scaled_number
from trainer.errors import UserError, first_line
from trainer.hardware import NATIVE, detect
from trainer.precision import nvfp4
from trainer.precision.statistics import DGRAD, INPUT, OPERANDS, WEIGHT, WGRAD, add, amax, sampled

Product = Callable[..., Tensor]
"""Of inputs (rows × in, bf16) and a weight (out × in): the outputs (rows × out, bf16), with gradients. A third argument
is the table that gets their ``statistics``."""


def layers_of(
    model: nn.Module, blocks: list[nn.Module], islands: list[str], number: Number, chosen: list[tuple[str, str]]
) -> dict[str, Number]:
    """Return the linear layers that multiply scaled numbers, by name, and the numbers of each.

    Embeddings, norms and subclasses of nn.Linear are none; the head is one only where it is chosen.

    Args:
        model: all of it.
        blocks: its repeated blocks, which have ``number`` where that is scaled; none: the whole model.
        islands: names of submodules that stay in fp32, with all they contain.
        number: of the mode.
        chosen: submodules with a mode of their own, with all they contain; the last one decides.
    """
    numbers: dict[int, Number] = {}
    for block in blocks or [model]:
        numbers |= dict.fromkeys(map(id, block.modules()), number)
    for name, mode in chosen:
        numbers |= dict.fromkeys(map(id, model.get_submodule(name).modules()), FORMATS[mode].number)
    left = {id(module) for name in islands for module in model.get_submodule(name).modules()}
    layers = {
        name: numbers.get(id(each), BF16)
        for name, each in model.named_modules()
        if _is_linear(each) and id(each) not in left
    }
    return {name: number for name, number in layers.items() if number.scaled}


def has_linear(model: nn.Module, name: str) -> bool:
    """Return whether there is a linear layer in a submodule."""
    return any(map(_is_linear, model.get_submodule(name).modules()))


def odd_sides(model: nn.Module, numbers: Mapping[str, Number]) -> dict[str, int]:
    """Return the layers with a side that is no multiple of what their numbers need, and that side."""
    sides = {name: (model.get_submodule(name).weight.shape, number) for name, number in numbers.items()}
    return {
        name: side
        for name, (shape, number) in sides.items()
        for side in shape  # type: ignore[union-attr]
        if side % ARITHMETIC[number].multiple
    }


def convert(model: nn.Module, numbers: Mapping[str, Number], products: Mapping[Number, Product]) -> None:
    """Let linear layers multiply in scaled formats, and all others as torch does; they stay what they are.

    Outside of autocast they multiply as before.

    Args:
        model: with fp32 weights; it may have been converted before.
        numbers: of the layers, by name.
        products: of the numbers.
    """
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), partial) and forward.func is _forward:
            module.forward = forward.args[0]
    for name, number in numbers.items():
        layer: Any = model.get_submodule(name)
        layer.forward = partial(_forward, layer.forward, products[number], number)
        layer.statistics = vars(layer).get("statistics")


def product_of(number: Number, scaling: str, gradients: str | None, device: torch.device) -> Product:
    """Return the product of a format on a device.

    Args:
        number: of ``ARITHMETIC``.
        scaling: of fp8.
        gradients: ``bf16``: both matmuls of the backward pass are in bf16; None: in the format.
        device: which may lack the format.
    """
    native = detect(str(device)).support(number.name) == NATIVE
    product = ARITHMETIC[number].product(scaling, native)
    return product if gradients is None else partial(_with_bf16_gradients, product)


class _Bf16Gradients(torch.autograd.Function):
    """The product of a format, of which the backward pass sees nothing: its matmuls are of operands in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product, *tables: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, *tables)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = upstream, ctx.saved_tensors
        of_x = torch.mm(gradient, weight.to(x.dtype)) if ctx.needs_input_grad[0] else None
        of_weight = torch.mm(gradient.t(), x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, *[None] * (len(ctx.needs_input_grad) - 2)


def _with_bf16_gradients(product: Product, x: Tensor, weight: Tensor, *tables: Tensor) -> Tensor:
    result: Tensor = _Bf16Gradients.apply(x, weight, product, *tables)
    return result


def _fp8(scaling: str, native: bool) -> Product:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=not native)
    matmuls = Float8Linear(16, 16, bias=False, config=config, device="meta").linear_mm_config
    casts = (
        *(config.cast_config_input, config.cast_config_weight),
        *(config.cast_config_grad_output, config.cast_config_grad_output_for_grad_weight),
    )
    block = _ROW if scaling == "rowwise" else _TENSOR
    formats = tuple((cast.target_dtype, block, config.round_scales_to_power_of_2) for cast in casts)

    def fp8(x: Tensor, weight: Tensor, table: Tensor | None = None) -> Tensor:
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), matmuls, config)
        return y if table is None else _Observed.apply(y, x, weight, table, formats)

    return fp8


def _mxfp8(scaling: str, native: bool) -> Product:
    try:
        from torchao.prototype.moe_training.mxfp8_linear import (
            KernelPreference,
            ScaleCalculationMode,
            _to_mxfp8_then_scaled_mm,
        )
    except ValueError as error:  # torchao 0.18 beside Triton 3.9, which refuses one of its kernels where there is a GPU
        problem = f"precision=mxfp8: torchao {version('torchao')} and triton {version('triton')} do not fit each other"
        raise UserError(f"{problem} ({first_line(error)}); install another torchao", "precision=fp8") from error

    kernel = KernelPreference.AUTO if native else KernelPreference.EMULATED
    formats = ((torch.float8_e4m3fn, ARITHMETIC[MXFP8].multiple, True),) * len(OPERANDS)

    def mxfp8(x: Tensor, weight: Tensor, table: Tensor | None = None) -> Tensor:
        operands = x.contiguous(), weight.to(x.dtype).contiguous()
        y = _to_mxfp8_then_scaled_mm(*operands, kernel, ScaleCalculationMode.RCEIL)
        return y if table is None else _Observed.apply(y, *operands, table, formats)

    return mxfp8


_TENSOR, _ROW = 0, 1
"""How many numbers share a scale of torchao's: those of a tensor, those of a row, else so many as lie in a block."""


class _Observed(torch.autograd.Function):
    """The result of a product of torchao's, whose operands are rounded once more where they are measured."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, table: Tensor, formats: Any) -> Tensor:
        _observe(x, *formats[INPUT], table, INPUT)
        _observe(weight, *formats[WEIGHT], table, WEIGHT)
        ctx.table, ctx.formats = table, formats
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = upstream
        _observe(gradient, *ctx.formats[DGRAD], ctx.table, DGRAD)
        _observe(gradient.t(), *ctx.formats[WGRAD], ctx.table, WGRAD)
        return gradient, None, None, None, None


@torch.library.custom_op("mantissa::observe_torchao", mutates_args=["table"])
def _observe(values: Tensor, dtype: torch.dtype, block: int, powers_of_two: bool, table: Tensor, operand: int) -> None:
    """Add the statistics of an operand to a table, rounded by torchao's functions along its rows."""
    peak, sample = amax(values), sampled(values).float().contiguous()
    if block in (_TENSOR, _ROW):
        from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

        shared = peak if block == _TENSOR else sample.abs().amax(1, keepdim=True)
        scale = amax_to_scale(shared, dtype, powers_of_two)
        elements, unit = to_fp8_saturated(sample * scale, dtype), 1 / scale
    else:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import get_fp_scale, to_mx

        scale, elements = to_mx(sample, dtype, block, ScaleCalculationMode.RCEIL)
        unit = get_fp_scale(scale).repeat_interleave(block, -1)
    add(table, operand, peak, sample, elements.float() * unit, torch.finfo(dtype).max * unit)


class Arithmetic(NamedTuple):
    """How the layers of a format multiply."""

    multiple: int
    """What the sides of a product's factors are multiples of: blocks have no rest, and hardware requires it."""
    product: Callable[[str, bool], Product]
    """Takes the scaling of fp8, ``tensorwise`` or ``rowwise``, and whether the hardware multiplies the format; else
    rounded operands are multiplied in bf16 or fp32."""
    by_torchao: bool = False


ARITHMETIC = {
    FP8: Arithmetic(16, _fp8, by_torchao=True),
    MXFP8: Arithmetic(32, _mxfp8, by_torchao=True),
    NVFP4: Arithmetic(nvfp4.BLOCK, lambda scaling, native: nvfp4.product),
}
"""A row for each scaled number format."""


def converted(model: nn.Module) -> dict[str, str]:
    """Return the layers that multiply so, and the format of each, by name."""
    numbers = {name: scaled_number(module) for name, module in model.named_modules()}
    return {name: number.name for name, number in numbers.items() if number}


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that may multiply so, by name."""
    return {name: module for name, module in model.named_modules() if _is_linear(module)}


def _is_linear(module: nn.Module) -> bool:
    """Return whether it is a linear layer; transformers' Conv1D is one, whose weight is in × out."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _forward(plain: Callable[[Tensor], Tensor], product: Product, number: Number, x: Tensor) -> Tensor:
    """Call a layer: a partial of the layer's own method, so that a copy of the layer has its own."""
    if not torch.is_autocast_enabled(x.device.type):
        return plain(x)
    layer: Any = plain.__self__  # type: ignore[attr-defined]
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
    with torch.autocast(x.device.type, enabled=False):
        rows = x.to(number.dtype).reshape(-1, x.shape[-1])
        count, multiple = len(rows), ARITHMETIC[number].multiple
        # Backward sums over rows, to which zeros add nothing; of no rows there is no largest number.
        more = -count % multiple * torch.is_grad_enabled() if count else multiple
        if more:
            rows = F.pad(rows, (0, 0, 0, more))
        tables = () if layer.statistics is None or not torch.is_grad_enabled() else (layer.statistics,)
        y = product(rows, weight, *tables)[:count].reshape(*x.shape[:-1], len(weight))
        return y if layer.bias is None else y + layer.bias.to(y.dtype)
