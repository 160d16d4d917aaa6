"""Linear layers that multiply numbers of 8 and 4 bits with scales: fp8 and mxfp8 by torchao, nvfp4 by rounding.

Operands are scaled and rounded just before each of the three matmuls of a layer, whose results are bf16; weights stay
fp32. fp8 has a scale for each tensor or row (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), mxfp8 one
for each 32 numbers that are summed (OCP Microscaling Formats Specification 1.0, 2023), nvfp4 see ``nvfp4``. Where the
hardware does not multiply a format, rounded operands are multiplied in wider numbers: what it does to quality is the
same, and its speed and memory are not.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.formats import FP8, MXFP8, NVFP4, Number, scaled_number
from trainer.errors import UserError, first_line
from trainer.precision import nvfp4

Product = Callable[[Tensor, Tensor], Tensor]
"""Of inputs (rows × in, bf16) and a weight (out × in): the outputs (rows × out, bf16), with gradients."""


def convert(model: nn.Module, blocks: list[nn.Module], islands: list[str], number: Number, product: Product) -> None:
    """Let the linear layers in a model's blocks multiply in a format; they and their parameters stay what they are.

    Outside of autocast they multiply as before. Embeddings, norms, the head, and subclasses of nn.Linear do not change.

    Args:
        model: in fp32.
        blocks: its repeated blocks; none: the whole model.
        islands: names of submodules that stay in fp32, with all they contain.
        number: of ``ARITHMETIC``.
        product: of the format.

    Raises:
        UserError: there is no such layer, or one whose sides are not multiples.
    """
    left = {id(module) for name in islands for module in model.get_submodule(name).modules()}
    inside = {id(module) for block in blocks or [model] for module in block.modules()} - left
    layers = {name: each for name, each in model.named_modules() if id(each) in inside and _is_linear(each)}
    for layer in layers.values():
        layer.forward = partial(_forward, layer.forward, product, number)
    multiple = ARITHMETIC[number].multiple
    odd = {name: size for name, layer in layers.items() for size in layer.weight.shape if size % multiple}
    if odd:
        # Layers of all blocks, whose numbers stand between dots, have one pattern.
        patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in odd)
        name, size = next(iter(odd.items()))
        others = shlex.quote(f"precision.fp32_modules=[{','.join([*islands, *patterns])}]")
        raise UserError(
            f"precision={number.name}: a side of {name}.weight is {size}, which must be a multiple of {multiple}",
            *[others] * (len(odd) < len(layers)),
            "precision=bf16",
        )
    if not layers:
        raise UserError(
            f"precision={number.name}: no linear layer in the model's blocks is left for it (convolutions stay in "
            "bf16, precision.fp32_modules in fp32)",
            "precision=bf16",
        )


def _fp8(scaling: str, native: bool) -> Product:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=not native)
    matmuls = Float8Linear(16, 16, bias=False, config=config, device="meta").linear_mm_config
    return lambda x, weight: matmul_with_hp_or_float8_args.apply(x, weight.t(), matmuls, config)


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

    def mxfp8(x: Tensor, weight: Tensor) -> Tensor:
        operands = x.contiguous(), weight.to(x.dtype).contiguous()
        return _to_mxfp8_then_scaled_mm(*operands, kernel, ScaleCalculationMode.RCEIL)

    return mxfp8


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


def converted(model: nn.Module) -> list[str]:
    """Return the names of the layers that multiply so."""
    return [name for name, module in model.named_modules() if scaled_number(module)]


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
        y = product(rows, weight)[:count].reshape(*x.shape[:-1], len(weight))
        return y if layer.bias is None else y + layer.bias.to(y.dtype)
