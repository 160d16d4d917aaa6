"""Which dtype each operation uses: the ``precision`` config group and its fp32 islands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mantissa.errors import FormatError, UsageError
from mantissa.formats import BF16, FORMATS, FP8, FP32, FP64, TF32, Format
from mantissa.step import operators
from mantissa.step.flags import set_flags
from mantissa.step.islands import cast_inputs, keep_fp32, with_fp32_statistics
from mantissa.step.step import Widened
from mantissa.tensors import in_dtype
from trainer.errors import UserError, check_choice
from trainer.hardware import NATIVE, UNAVAILABLE, Hardware
from trainer.precision import kernels, scaled
from trainer.precision.names import matching

# CUDA's libraries and oneDNN read these before torch's flags, and torch's flags do not show their effect.
_FPMATH = {"BF16", "F16", "TF32", "ANY"}
SILENT = {
    FP32: {"NVIDIA_TF32_OVERRIDE": {"1"}, "ONEDNN_DEFAULT_FPMATH_MODE": _FPMATH, "DNNL_DEFAULT_FPMATH_MODE": _FPMATH},
    TF32: {"NVIDIA_TF32_OVERRIDE": {"0"}},
}
"""Environment variables with which a format is another one, each with the values that make it so."""
_PRODUCTS = ("linear", "addmm", "mm")  # of linear layers, and inside of scaled ones
AUTO = "auto"
"""The mode that is another one once it is known what trains, see ``automatic``."""
SCALINGS = ("tensorwise", "rowwise")
"""Of fp8: one scale for a tensor (fastest), or one for each row (more exact)."""


@dataclass
class Precision:
    """The ``precision`` config group.

    ``fp32`` is IEEE single precision in every backend, ``tf32`` lets matmuls and convolutions round
    their inputs to TF32, ``bf16`` and ``fp16`` are fp32 weights under torch.autocast of that type. Without autocast:
    ``*_pure`` has weights, gradients and optimizer state in 16 bits, ``*_master`` 16-bit weights and gradients of which
    the optimizer holds fp32 copies, and ``bf16_sr`` 16-bit weights that are rounded at random
    (``trainer.optim.masters``). ``fp8``, ``mxfp8`` and ``nvfp4`` are bf16 whose linear layers multiply in these
    (``trainer.precision.scaled``).
    """

    mode: str = "fp32"
    """Set by ``precision=…``."""
    modules: dict[str, str] = field(default_factory=dict)
    """Formats of modules, with all they contain, by name pattern: ``{lm_head:fp32}``; of linear layers also
    ``{h.0:bf16,h.1:fp8}``. The last pattern that matches decides."""
    gradients: str | None = None
    """``bf16``: the two matmuls of a scaled layer's backward pass are in bf16; null: in the layer's own format."""
    then: str | None = None
    """The mode from step ``until`` on."""
    until: int | float | None = None
    """Steps in the first mode, or their share of all steps: ``0.8``."""
    fp8_scaling: str | None = None
    """Scales of fp8: ``tensorwise``, or ``rowwise`` (one per row: more accurate, slower); null: tensorwise."""
    fp32_ops: list[str] | None = None
    """Operators to run in fp32: ``[softmax]`` or ``[layer_norm,mean]``."""
    kernels: str = "auto"
    """How a CPU multiplies 16-bit operands: ``native`` kernels or ``fp32`` arithmetic; auto: native if the CPU has
    instructions for it."""

    def __post_init__(self) -> None:
        check_choice("precision", self.mode, FORMATS)
        check_choice("precision.kernels", self.kernels, kernels.KERNELS)
        for key, default in (("modules", "{}"), ("fp32_ops", "null"), ("kernels", kernels.AUTO)):
            if self.half is None and getattr(self, key) not in (None, {}, kernels.AUTO):
                raise UserError(
                    f"precision.{key} has no effect with precision={self.mode}, which has no 16-bit dtype",
                    shlex.quote(f"precision.{key}={default}"),
                    "precision=bf16",
                )
        self.fp32_ops = self.fp32_ops or None
        if self.format.number is FP8:
            self.fp8_scaling = self.fp8_scaling or SCALINGS[0]
            check_choice("precision.fp8_scaling", self.fp8_scaling, SCALINGS)
        elif self.fp8_scaling is not None:
            raise UserError(
                f"precision.fp8_scaling has no effect with precision={self.mode}", "", mistake="precision.fp8_scaling"
            )

    def check_operators(self) -> None:
        """Check the names in ``fp32_ops``.

        Raises:
            UserError: torch has no such operator, or it is inside of the linear layers of a scaled format.
        """
        try:
            operators.check_operators(self.fp32_ops or ())
        except UsageError as error:
            raise UserError(f"precision.{error}") from error
        for name in self.fp32_ops or ():
            if self.format.number.scaled and name in _PRODUCTS:
                others = [each for each in self.fp32_ops or () if each not in _PRODUCTS]
                raise UserError(
                    f"precision.fp32_ops: {name} would not reach the linear layers in {self.mode} "
                    "(precision.modules names layers)",
                    f"precision.fp32_ops=[{','.join(others)}]" if others else "",
                    mistake="precision.fp32_ops",
                )

    def check(self, hardware: Hardware) -> None:
        """Check that the hardware, the installed packages and the environment allow this mode.

        Raises:
            UserError: the mode is not available here, or a variable such as NVIDIA_TF32_OVERRIDE lowers fp32.
        """
        number = self.format.number
        if hardware.support(self.mode) == UNAVAILABLE and number is FP64:
            raise UserError(
                f"precision={self.mode} is not available on {hardware.name}: {hardware.kind.words} has no fp64",
                "precision=fp32",
                "device=cpu",
            )
        if hardware.support(self.mode) == UNAVAILABLE:
            capability = ".".join(map(str, number.capability or ()))
            raise UserError(
                f"precision={self.mode} is not available on {hardware.name} ({hardware.kind.name}); {self.mode} "
                f"needs an NVIDIA GPU of compute capability {capability} or later",
                "precision=fp32",
                f"precision={hardware.half.name}",
            )
        if self.half is BF16.dtype and hardware.half is not BF16:
            raise UserError(
                f"precision={self.mode} computes in bf16, for which {hardware.name} has no instructions (compute "
                "capability 8.0 and later have): torch emulates them, and does not compile such a model",
                "precision=fp16",
                "precision=fp32",
            )
        if number.scaled and scaled.ARITHMETIC[number].by_torchao and not _has_torchao():
            raise UserError(
                f"precision={self.mode} needs torchao 0.18 or later, which is not installed "
                '(pip install "torchao>=0.18", the extra torchao)',
                "precision=bf16",
            )
        for variable, values in SILENT.get(number, {}).items():
            if os.environ.get(variable, "").upper() in values:
                does = "lowers fp32" if number is FP32 else "disables TF32"
                raise UserError(
                    f"the environment variable {variable}={os.environ[variable]} {does} silently; "
                    f"unset it for precision={self.mode} (unset {variable})"
                )

    def apply(self) -> None:
        """Set every backend's fp32 mode for this process, and let products of 16-bit numbers be rounded once."""
        set_flags(self.format.number)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a fresh autocast context for one forward pass and its loss.

        Fresh, because a long-lived context caches low-precision copies of the weights, and the next forward
        would not see the optimizer's update.
        """
        dtype = self.format.autocast
        autocast = self.widened() if dtype is None else torch.autocast(device.type, dtype=dtype)
        if not self.fp32_ops:
            return autocast
        return operators.OperatorPolicy(device.type, self.fp32_ops, self.format.half_weights).beside(autocast)

    def widened(self) -> AbstractContextManager[Any]:
        """Return a context in which code that asks for narrower numbers gets those of the mode: in fp64 alone."""
        return nullcontext() if self.format.wide is None else Widened(self.format.wide)

    def loss_divisor(self, targets: int) -> tuple[int, float]:
        """Return the divisor of the summed loss before backward, and the factor that its gradients then still need.

        Gradients of 16-bit logits are multiplied by one over that number in 16 bits, which rounds all of them alike,
        by up to 0.4 % in bf16; a power of two multiplies exactly. Here it is the next one from ``targets``
        up, so that no gradient is larger than that of the mean. The factor, from 1 to 2, is applied in fp32 when the
        loss scale is undone.
        """
        if self.half is None:
            return targets, 1.0
        power = 1 << (targets - 1).bit_length()
        return power, power / targets

    @property
    def format(self) -> Format:
        """The row of the table of formats."""
        return FORMATS[self.mode]

    @property
    def rounds_as_eager(self) -> bool:
        """Whether a compiled model has to round wherever the eager one does: fp8 by rows is NaN behind a fused RMS norm
        (pytorch issue 150859).
        """
        return self.fp8_scaling == SCALINGS[1]

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit dtype that layers compute in, by autocast or by their weights; None in fp32 and tf32."""
        return self.format.half

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The dtype in which weights are read from files, before ``convert``."""
        return self.format.wide or torch.float32

    def convert(
        self,
        model: nn.Module,
        device: torch.device,
        blocks_of: Callable[[Any], list[nn.Module]] = lambda model: [],
        fp32_of: Callable[[Any], list[str]] = lambda model: [],
    ) -> list[str]:
        """Convert the model's weights to the dtype of this mode; return the names of the submodules that stay in fp32.

        In a scaled format the weights stay fp32, and linear layers in its repeated blocks are changed (in all of it
        where ``blocks_of``, the recipe's ``blocks``, returns none). Beside those of ``modules`` the recipe's own,
        ``fp32_of``, stay in fp32.

        With 16-bit weights, the inputs and buffers of the model are 16-bit too, except two kinds of buffers: running
        statistics of normalisation, whose small updates would be lost in 16 bits, and buffers that are not saved with
        the model, such as rotary frequencies, which transformers also keeps in fp32.

        Raises:
            UserError: see ``keep_fp32`` and ``scaled.convert``; or such a submodule shares a weight with one in 16
                bits; or no weight is left for 16 bits.
        """
        kept = self.keep_fp32(model, device, fp32_of(model) if self.half is not None else ())
        self.convert_layers(model, device, blocks_of(model), kept)
        if (wide := self.format.wide) is not None:
            for module in model.modules():  # not by ``Module.to``, which cannot swap the fake tensors of a forecast
                for parameter in module.parameters(recurse=False):
                    parameter.data = in_dtype(parameter.data, wide)
                held = {name: each for name, each in module._buffers.items() if each is not None}
                module._buffers.update({name: in_dtype(each, wide) for name, each in held.items()})
        dtype = self.format.half_weights
        if dtype is None:
            return kept
        islands = {id(module) for name in kept for module in model.get_submodule(name).modules()}
        shared = {id(parameter) for name in kept for parameter in model.get_submodule(name).parameters()}
        for module_name, module in model.named_modules():
            if id(module) in islands:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in shared:
                    both = _typed({**self.modules, module_name: FP32.name})
                    raise UserError(
                        f"precision.modules: {', '.join(kept)} shares a weight with {module_name}.{name}, which "
                        f"precision={self.mode} makes 16-bit",
                        *[both] * bool(module_name),
                        "",
                        mistake="precision.modules",
                    )
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            if isinstance(module, _NormBase) and module.track_running_stats:
                module.forward = with_fp32_statistics(module)
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = buffer.to(dtype)
        if kept and all(parameter.dtype != dtype for parameter in model.parameters()):
            raise UserError(
                f"precision.modules leaves nothing in 16 bits of {self.mode}",
                "precision=fp32",
                "",
                mistake="precision.modules",
            )
        cast_inputs(model, dtype)
        return kept

    def keep_fp32(self, model: nn.Module, device: torch.device, more: Iterable[str] = ()) -> list[str]:
        """Make the submodules that ``modules`` has in fp32, and ``more``, compute in fp32; return their names.

        Their floating-point inputs are cast to fp32 and their forward runs with autocast off. In a model of 16-bit
        weights their results are cast back to that dtype, except scalars, such as a loss.

        Raises:
            UserError: a pattern that matches no submodule, or one that is never called.
        """
        kept = {*more, *(name for name, mode in self.chosen(model) if mode == FP32.name)}
        try:
            keep_fp32(model, kept, device.type, self.format.half_weights)
        except FormatError as error:
            raise UserError(f"precision.modules: {error}") from None
        return sorted(kept)

    def chosen(self, model: nn.Module) -> list[tuple[str, str]]:
        """Return the submodules that ``modules`` matches, and the mode of each; the last one decides.

        Raises:
            UserError: a pattern that matches no submodule.
        """
        names = [name for name, _ in model.named_modules() if name]
        found = (
            (matching("precision.modules", pattern, names, "submodule"), each) for pattern, each in self.modules.items()
        )
        return [(name, mode) for matched, mode in found for name in sorted(matched)]

    def convert_layers(self, model: nn.Module, device: torch.device, blocks: list[nn.Module], kept: list[str]) -> None:
        """Let linear layers multiply in scaled formats, and those that did in an earlier one in these, or no longer.

        Raises:
            UserError: see ``scaled.convert``.
        """
        numbers = scaled.layers_of(model, blocks, kept, self.format.number, self.chosen(model))
        products = {
            number: scaled.product_of(number, str(self.fp8_scaling or SCALINGS[0]), self.gradients, device)
            for number in dict.fromkeys(numbers.values())
        }
        scaled.convert(model, numbers, products)

    def at(self, step: int) -> Precision:
        """Return the precision of optimizer step ``step``, counted from 1, once ``until`` is a step."""
        if self.then is None or self.until is None or step <= self.until:
            return self
        return replace(self, mode=self.then, then=None, until=None)


def _typed(modules: Mapping[str, str]) -> str:
    """Return the override of ``modules``, as it is typed in a shell."""
    return shlex.quote(f"precision.modules={{{','.join(f'{name}:{mode}' for name, mode in modules.items())}}}")


def automatic(hardware: Hardware) -> tuple[str, str]:
    """Return the mode that ``precision=auto`` is on a device, and why: by an NVIDIA GPU's compute capability alone."""
    if hardware.capability is None:
        return FP32.name, f"on {hardware.kind.words}; 16 bits are chosen on NVIDIA GPUs alone"
    of = f"compute capability {'.'.join(map(str, hardware.capability))}"
    if hardware.support(hardware.half.name) != NATIVE:
        return FP32.name, f"{of} has no 16-bit instructions"
    return hardware.half.name, f"{of} has {hardware.half.name} instructions"


def _has_torchao() -> bool:
    return find_spec("torchao") is not None and tuple(map(int, version("torchao").split(".")[:2])) >= (0, 18)


def allow_cudnn_attention(allowed: bool) -> None:
    """Enable or disable cuDNN's attention on CUDA, for this process.

    Not for models that mask: its backward can give NaN gradients of the query beside a mask where the length is 64
    more than a multiple of 128 (pytorch issue 196678, on Hopper, from torch 2.11 on), and no later cuDNN is known to be
    free of it.
    """
    torch.backends.cuda.enable_cudnn_sdp(allowed)
