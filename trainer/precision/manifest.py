"""What a precision is in effect: the manifest, read back from torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mantissa.display import dtype_name
from mantissa.formats import FP32
from mantissa.step.flags import fp32_flags
from mantissa.tensors import changed_by
from trainer.hardware import Hardware
from trainer.precision import scaled
from trainer.precision.modes import SILENT, Precision


def manifest_of(precision: Precision, hardware: Hardware, fp32_modules: list[str]) -> dict[str, Any]:
    """Return what was requested and what is effective, read back from torch and tested on the device.

    ``matmul_dtype`` is the dtype of the result of a matmul of two matrices in the dtype of the weights.
    ``dtypes_in_use`` adds what depends on the model.
    """
    with precision.autocast(hardware.device):
        one = torch.ones(8, 8, device=hardware.device, dtype=precision.format.weights)
        product = (one @ one).dtype
    flags, matmul = fp32_flags("cuda") | fp32_flags("cpu"), torch.backends.cuda.matmul
    return {
        "requested": {"mode": precision.mode, "modules": dict(precision.modules)}
        | ({} if precision.gradients is None else {"gradients": precision.gradients})
        | ({} if precision.fp8_scaling is None else {"fp8_scaling": precision.fp8_scaling})
        | ({} if precision.fp32_ops is None else {"fp32_ops": precision.fp32_ops}),
        "support": hardware.support(precision.mode),
        "effective": {
            "device": str(hardware.device),
            "matmul_dtype": dtype_name(product),
            "fp32_modules": fp32_modules,
            **{f"fp32_in_{name.replace('.', '_')}": value for name, value in flags.items()},
            "fp16_reduced_precision_reduction": bool(matmul.allow_fp16_reduced_precision_reduction),
            "bf16_reduced_precision_reduction": bool(matmul.allow_bf16_reduced_precision_reduction),
        },
        "environment": {name: os.environ[name] for name in SILENT[FP32] if name in os.environ},
    }


def dtypes_in_use(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the manifest's dtypes of the model's weights and of the weights that the optimizer updates.

    Read from their tensors; of several dtypes, the one with most weights comes first.
    """
    return {
        "weights_dtype": _dtypes(model.parameters()),
        "optimizer_dtype": _dtypes(changed_by(optimizer)),
        "scaled_modules": scaled.converted(model),
    }


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    count: Counter[str] = Counter()
    for tensor in tensors:
        count[dtype_name(tensor.dtype)] += tensor.numel()
    return ", ".join(name for name, _ in count.most_common())
