"""fp8 matmuls by torchao: which linear layers use them, and what these layers require.

Inputs and weights are scaled and rounded to e4m3, gradients to e5m2 (tensorwise) or e4m3 (rowwise), just before each
product, whose result is bf16; weights stay fp32 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError

_MULTIPLE = 16  # the hardware requires it of every dimension of an fp8 matmul


def convert(model: nn.Module, fp32_modules: list[str], scaling: str, emulate: bool = False) -> None:
    """Convert the model's linear layers to fp8 in place; parameters keep their names.

    Not converted: ``fp32_modules``, subclasses of nn.Linear (such as the output layer of a language model, which
    contains a loss), and layers whose dimensions are not multiples of 16.

    Args:
        model: in fp32.
        fp32_modules: names of submodules that stay in fp32, with all they contain.
        scaling: ``tensorwise`` or ``rowwise``, see ``Precision.fp8_scaling``.
        emulate: compute in fp32 with the same rounding, anywhere; for tests.

    Raises:
        UserError: there is no such layer.
    """
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = convertible(model, fp32_modules)
    if not chosen:
        raise UserError(
            f"precision=fp8: this model has no plain nn.Linear whose dimensions are multiples of {_MULTIPLE} (GPT-2 in "
            "transformers has none at all); use recipe=llama, another width, or precision=bf16"
        )
    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    for name in chosen:
        model.get_submodule(name).register_forward_pre_hook(_check_rows)


def convertible(model: nn.Module, fp32_modules: list[str]) -> list[str]:
    """Return the names of the linear layers that can compute in fp8."""
    islands = {id(module) for name in fp32_modules for module in model.get_submodule(name).modules()}
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name  # the model itself cannot be replaced in place
        and id(module) not in islands
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    ]


def converted(model: nn.Module) -> list[str]:
    """Return the names of the layers that do compute in fp8."""
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def _check_rows(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse a microbatch whose number of rows the matmul of the weight's gradient does not support."""
    rows: Tensor = inputs[0]
    count = rows.numel() // rows.shape[-1]
    if torch.is_grad_enabled() and module.training and count % _MULTIPLE:
        raise UserError(
            f"precision=fp8: a linear layer gets {count} rows (samples × tokens of a microbatch), which must be a "
            f"multiple of {_MULTIPLE}; use another micro_batch_size"
        )
