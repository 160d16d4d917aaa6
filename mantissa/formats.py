"""The precision formats: one table of all modes, and the numbers that each of them computes with.

Nothing else knows a mode by its name. A new mode is a row of ``FORMATS``; it needs a class only where its layers or its
optimizer do something that no other mode does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Number:
    """A floating-point format that matrix units multiply in."""

    name: str
    dtype: torch.dtype
    """Dtype in which torch holds the operands; tf32's and scaled ones are converted inside the operator."""
    unit_roundoff: float
    """Largest relative error of rounding to nearest: 2 ** -(bits of the significand, the implicit one included)."""
    largest: float
    smallest: float
    """The smallest positive number, a subnormal one."""
    capability: tuple[int, int] | None = (0, 0)
    """CUDA compute capability from which an NVIDIA GPU multiplies it natively; None: nothing does, here."""
    one_major: bool = False
    """Whether the kernels are for GPUs of that major version alone."""
    only_nvidia: bool = False
    """Whether nothing else can: elsewhere it is not emulated, but not available."""
    scaled: bool = False
    """Whether numbers share scales, and only linear layers multiply it (``trainer.precision.scaled``)."""
    instructions: frozenset[str] = frozenset()
    """Features of CPUs, each of which multiplies it natively, by the names of ``torch.cpu.get_capabilities``."""


_BF16_CPU = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
_FP16_CPU = frozenset({"amx_fp16", "avx512_fp16", "fp16", "fp16_arith"})
FP64 = Number("fp64", torch.float64, 2.0**-53, (2 - 2.0**-52) * 2.0**1023, 2.0**-1074)
FP32 = Number("fp32", torch.float32, 2.0**-24, (2 - 2.0**-23) * 2.0**127, 2.0**-149)
TF32 = Number("tf32", torch.float32, 2.0**-11, (2 - 2.0**-10) * 2.0**127, 2.0**-136, (8, 0), only_nvidia=True)
BF16 = Number("bf16", torch.bfloat16, 2.0**-8, (2 - 2.0**-7) * 2.0**127, 2.0**-133, (8, 0), instructions=_BF16_CPU)
FP16 = Number("fp16", torch.float16, 2.0**-11, 65504.0, 2.0**-24, (7, 0), instructions=_FP16_CPU)
FP8 = Number("fp8", torch.bfloat16, 2.0**-4, 448.0, 2.0**-9, (8, 9), scaled=True)
"""e4m3fn, of weights and activations; what is not a linear layer computes in bf16."""
MXFP8 = Number("mxfp8", torch.bfloat16, 2.0**-4, 448 * 2.0**127, 2.0**-136, (10, 0), True, scaled=True)
"""e4m3fn, where 32 numbers share a scale, a power of two (OCP Microscaling Formats Specification 1.0, 2023). torchao's
kernels that quantize are compiled for 10.x, and not for GeForce and workstation GPUs of Blackwell, 12.0."""
NVFP4 = Number("nvfp4", torch.bfloat16, 2.0**-2, 6 * 448 * 2.0**127, 2.0**-159, None, scaled=True)
"""e2m1, where 16 numbers share a scale in e4m3, and all of a tensor one in fp32 (arXiv 2509.25149)."""
NUMBERS = {number.name: number for number in (FP64, FP32, TF32, BF16, FP16, FP8, MXFP8, NVFP4)}
_OF_TORCHAO = {"Float8": FP8, "MXFP8": MXFP8, "MXTensor": MXFP8, "NVFP4": NVFP4}
"""What the names of its classes say, those of modules and of the tensors that weights are."""


def scaled_number(module: nn.Module) -> Number | None:
    """Return the scaled numbers that a module multiplies, of torchao's or as ``trainer.precision.scaled`` makes it."""
    kinds = [type(module).__name__, *(type(weight.data).__name__ for weight in module.parameters(recurse=False))]
    bound = getattr(vars(module).get("forward"), "args", ())  # of a partial
    given = [argument for argument in bound if isinstance(argument, Number)]
    return next(iter([*given, *(_OF_TORCHAO[part] for kind in kinds for part in _OF_TORCHAO if part in kind)]), None)


NEAREST, STOCHASTIC = "nearest", "stochastic"


@dataclass(frozen=True)
class Format:
    """A mode of training: what matmuls compute in, and what the weights and their updates are held in."""

    name: str
    """Name as typed: ``precision=bf16_master``."""
    number: Number
    """Numbers that matmuls and convolutions multiply."""
    autocast: torch.dtype | None = None
    """The dtype of torch.autocast around forward and loss; None: autocast is off."""
    weights: torch.dtype = torch.float32
    """The dtype of the model's weights and of their gradients."""
    masters: bool = False
    """Whether the optimizer updates fp32 copies of 16-bit weights, and gradients accumulate in fp32."""
    rounding: str = NEAREST
    """Rounding of an updated weight to 16 bits: ``nearest`` or ``stochastic``, which accumulates in fp32, too."""

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit dtype that layers compute in, by autocast or by their weights; None in fp64, fp32 and tf32."""
        return self.autocast or self.half_weights

    @property
    def half_weights(self) -> torch.dtype | None:
        """The dtype of the weights where it is a 16-bit one; None: they are fp32, or fp64."""
        return self.weights if self.weights.itemsize == 2 else None

    @property
    def wide(self) -> torch.dtype | None:
        """The dtype that every narrower one in a step becomes: fp64, of a reference; None: none does."""
        return self.weights if self.weights == torch.float64 else None

    @property
    def only_half(self) -> bool:
        """Whether weights are kept in 16 bits alone, and rounded to nearest, so that small updates are lost."""
        return self.half_weights is not None and not self.accumulates_in_fp32

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients underflow without a loss scale: where they have the exponents of fp16."""
        return self.number is FP16

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether gradients of 16-bit weights are summed over microbatches in fp32."""
        return self.masters or self.rounding == STOCHASTIC


FORMATS = {
    row.name: row
    for row in (
        Format("fp64", FP64, weights=torch.float64),
        Format("fp32", FP32),
        Format("tf32", TF32),
        Format("bf16", BF16, autocast=torch.bfloat16),
        Format("fp16", FP16, autocast=torch.float16),
        Format("bf16_pure", BF16, weights=torch.bfloat16),
        Format("bf16_sr", BF16, weights=torch.bfloat16, rounding=STOCHASTIC),
        Format("bf16_master", BF16, weights=torch.bfloat16, masters=True),
        Format("fp16_pure", FP16, weights=torch.float16),
        Format("fp16_master", FP16, weights=torch.float16, masters=True),
        Format("fp8", FP8, autocast=torch.bfloat16),
        Format("mxfp8", MXFP8, autocast=torch.bfloat16),
        Format("nvfp4", NVFP4, autocast=torch.bfloat16),
    )
}


def computing_in(autocast: torch.dtype | None, weights: torch.dtype) -> str:
    """Return the name of the first mode with such an autocast and such weights, by nothing else than torch's own."""
    return next(name for name, row in FORMATS.items() if (row.autocast, row.weights) == (autocast, weights))


def plain(number: Number) -> Format:
    """Return the mode that only multiplies these numbers: its weights are in fp32."""
    return FORMATS[number.name]


def with_masters(number: Number) -> Format:
    """Return the mode with 16-bit weights of these numbers and fp32 masters."""
    return FORMATS[f"{number.name}_master"]


BASIC = tuple(name for name, row in FORMATS.items() if row.weights == torch.float32 and not row.number.scaled)
"""The modes that need only torch and change only the dtype of matmuls and convolutions."""
