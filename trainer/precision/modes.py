"""Which dtype each operation uses: the ``precision`` config group and its fp32 islands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mantissa.display import dtype_name
from mantissa.errors import FormatError, UsageError
from mantissa.formats import BF16, FORMATS, FP8, FP32, FP64, TF32, Format
from mantissa.names import format_name
from mantissa.step import operators
from mantissa.step.flags import set_flags
from mantissa.step.islands import cast_inputs, keep_fp32, with_fp32_statistics
from mantissa.step.widened import Widened
from mantissa.tensors import in_dtype
from trainer.errors import UserError, check_choice, no_effect
from trainer.hardware import NATIVE, UNAVAILABLE, Hardware
from trainer.precision import kernels, scaled
from trainer.precision.modules import BY_MODULE, OPTION, check_beside, check_names, islands_of, named, scaled_layers
from trainer.precision.names import typed

# CUDA's libraries and oneDNN read these before torch's flags, and torch's flags do not show their effect.
_FPMATH = {"BF16", "F16", "TF32", "ANY"}
SILENT = {
    FP32: {"NVIDIA_TF32_OVERRIDE": {"1"}, "ONEDNN_DEFAULT_FPMATH_MODE": _FPMATH, "DNNL_DEFAULT_FPMATH_MODE": _FPMATH},
    TF32: {"NVIDIA_TF32_OVERRIDE": {"0"}},
}
"""Environment variables with which a format is another one, each with the values that make it so."""
_CHANGE = "precision.then precision.until"  # without them a run has one mode
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
    ``{h.0:bf16,h.1:fp8}``, where the mode is one of these. The last pattern that matches decides."""
    gradients: str | None = None
    """``bf16``: the two matmuls of a scaled layer's backward pass are in bf16; null: in the layer's own format."""
    then: str | None = None
    """Another mode with fp32 weights, for all steps after ``until``; null: there is none."""
    until: int | float | None = None
    """The last step in the first mode; below 1, a share of the run's steps, such as ``0.8``."""
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
        check_names(self.modules)
        self._check_change()
        halves = any(FORMATS[mode].half for mode in self.modes)
        for key in ("modules", "fp32_ops", "kernels"):
            if not halves and getattr(self, key) not in (None, {}, kernels.AUTO):
                why = f"precision={self.mode} has no 16-bit dtype"
                raise no_effect(f"precision.{key}", why, f"precision={BF16.name}")
        for mode in self.modes:
            check_beside(self.modules, mode, *[f"precision={BF16.name}"] * (mode == self.mode))
        self._check_gradients()
        self.fp32_ops = self.fp32_ops or None
        if FP8.name in self.formats:
            self.fp8_scaling = self.fp8_scaling or SCALINGS[0]
            check_choice("precision.fp8_scaling", self.fp8_scaling, SCALINGS)
        elif self.fp8_scaling is not None:
            raise no_effect("precision.fp8_scaling", f"precision={self.mode} has no fp8")

    def _check_gradients(self) -> None:
        if self.gradients is not None and self.gradients != BF16.name:
            raise UserError(
                f"precision.gradients={self.gradients} must be bf16, or null, which is each layer's own format",
                f"precision.gradients={BF16.name}",
            )
        if self.gradients is not None and not self.scaled:
            raise no_effect("precision.gradients", f"no layer is scaled in precision={self.mode}")

    def _check_change(self) -> None:
        """Check ``then`` and ``until``."""
        then = f"precision.then={self.then}"
        if self.then is None:
            if self.until is not None:
                why = "there is no precision.then, the mode after that step"
                raise no_effect(f"precision.until={self.until}", why, mistake="precision.until")
            return
        if format_name(self.then) in FORMATS.keys() - {self.then}:
            problem = f"{then} is another library's word for a mode"
            raise UserError(problem, f"precision.then={format_name(self.then)}")
        check_choice("precision.then", self.then, FORMATS)
        if self.then == self.mode:
            raise UserError(f"{then} is the mode that the run begins in: nothing would change", "", mistake=_CHANGE)
        for key, mode in (("precision", self.mode), ("precision.then", self.then)):
            if FORMATS[mode].weights != torch.float32:
                dtype, plain = dtype_name(FORMATS[mode].weights), FORMATS[mode].number.name
                is_change = FORMATS[mode].half_weights is not None and plain not in (self.mode, self.then)
                raise UserError(
                    f"{key}={mode} holds weights in {dtype}; a run changes between modes with fp32 weights only",
                    *[f"{key}={plain}"] * is_change,
                    "",
                    mistake=_CHANGE,
                )
        if self.until is None:
            raise UserError(f"{then} needs precision.until, the last step before it", "precision.until=0.8")
        if not (self.until >= 1 if isinstance(self.until, int) else 0 < self.until < 1):
            problem = (
                f"precision.until={self.until} must be the number of a step, or a share of all steps between 0 and 1"
            )
            raise UserError(problem, "precision.until=0.8")

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
            if self.scaled and name in _PRODUCTS:
                others = [each for each in self.fp32_ops or () if each not in _PRODUCTS]
                raise UserError(
                    f"precision.fp32_ops: {name} would not reach the linear layers in {' and '.join(self.scaled)} "
                    "(precision.modules names layers)",
                    f"precision.fp32_ops=[{','.join(others)}]" if others else "",
                    mistake="precision.fp32_ops",
                )

    def check(self, hardware: Hardware) -> None:
        """Check that the hardware, the installed packages and the environment allow all formats in use.

        Raises:
            UserError: one is not available here, or a variable such as NVIDIA_TF32_OVERRIDE lowers fp32.
        """
        for mode in self.formats:
            number = FORMATS[mode].number
            if hardware.support(mode) == UNAVAILABLE and number is FP64:
                raise UserError(
                    f"precision={mode} is not available on {hardware.name}: {hardware.kind.words} has no fp64",
                    "precision=fp32",
                    "device=cpu",
                )
            if hardware.support(mode) == UNAVAILABLE:
                capability = ".".join(map(str, number.capability or ()))
                raise UserError(
                    f"precision={mode} is not available on {hardware.name} ({hardware.kind.name}); {mode} "
                    f"needs an NVIDIA GPU of compute capability {capability} or later",
                    "precision=fp32",
                    f"precision={hardware.half.name}",
                )
            if number.scaled and scaled.ARITHMETIC[number].by_torchao and not _has_torchao():
                others = {pattern: BF16.name if each == mode else each for pattern, each in self.modules.items()}
                changes = [f"precision={BF16.name}"] * (mode == self.mode)
                changes += [typed(OPTION, others)] * (others != self.modules)
                raise UserError(
                    f"{named(self.modules, self.mode, mode)} needs torchao 0.18 or later, which is not installed "
                    '(pip install "torchao>=0.18", the extra torchao)',
                    " ".join(changes),
                )
        if self.half is BF16.dtype and hardware.half is not BF16:
            raise UserError(
                f"precision={self.mode} computes in bf16, for which {hardware.name} has no instructions (compute "
                "capability 8.0 and later have): torch emulates them, and does not compile such a model",
                "precision=fp16",
                "precision=fp32",
            )
        number = self.format.number
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
    def formats(self) -> tuple[str, ...]:
        """The modes in use: the run's, that after ``until``, and those of modules."""
        return tuple(dict.fromkeys([*self.modes, *self.modules.values()]))

    @property
    def scaled(self) -> list[str]:
        """Those of the modes in use in which linear layers multiply scaled numbers."""
        return [mode for mode in self.formats if FORMATS[mode].number.scaled]

    def not_timed(self, hardware: Hardware, convolves: bool = False) -> str | None:
        """Return why the speed on this machine is not that of its formats; None: it is, see ``kernels``."""
        whys = [kernels.not_timed_here(mode, hardware, self.kernels, convolves) for mode in self.formats]
        found = sorted({why for why in whys if why}, key=lambda why: not kernels.is_emulated(why))
        return "; ".join(found) or None

    @property
    def rounds_as_eager(self) -> bool:
        """Whether a compiled model has to round wherever the eager one does: fp8 by rows is NaN behind a fused RMS norm
        (pytorch issue 150859).
        """
        return self.fp8_scaling == SCALINGS[1]

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit dtype that layers compute in, by autocast or by their weights; None in fp64, fp32 and tf32."""
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
            UserError: see ``keep_fp32`` and ``convert_layers``; or such a submodule shares a weight with one in 16
                bits; or no weight is left for 16 bits.
        """
        # Islands are the same in all modes of a run: in fp32 they change nothing.
        halves = any(FORMATS[mode].half for mode in self.modes)
        kept = self.keep_fp32(model, device, fp32_of(model) if halves else ())
        blocks = blocks_of(model)
        self.check_phases(lambda phase: phase.convert_layers(model, device, blocks, kept))
        if self.then is not None:
            self.phases[0].convert_layers(model, device, blocks, kept)
        if self.format.wide is not None:
            _widen(model, self.format.wide)
        if self.format.half_weights is not None:
            self._halve(model, kept, self.format.half_weights)
        return kept

    def _halve(self, model: nn.Module, kept: list[str], dtype: torch.dtype) -> None:
        """Round the weights to 16 bits, but those of the submodules ``kept`` in fp32, as ``convert`` says."""
        islands = {id(module) for name in kept for module in model.get_submodule(name).modules()}
        shared = {id(parameter) for name in kept for parameter in model.get_submodule(name).parameters()}
        for module_name, module in model.named_modules():
            if id(module) in islands:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in shared:
                    both = typed(OPTION, {**self.modules, module_name: FP32.name})
                    raise UserError(
                        f"precision.modules: {', '.join(kept)} shares a weight with {module_name}.{name}, which "
                        f"precision={self.mode} makes 16-bit",
                        *[both] * bool(module_name),
                        "",
                        mistake=OPTION,
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
                mistake=OPTION,
            )
        cast_inputs(model, dtype)

    def keep_fp32(self, model: nn.Module, device: torch.device, more: Iterable[str] = ()) -> list[str]:
        """Make the submodules that ``modules`` has in fp32, and ``more``, compute in fp32; return their names.

        Their floating-point inputs are cast to fp32 and their forward runs with autocast off. In a model of 16-bit
        weights their results are cast back to that dtype, except scalars, such as a loss.

        Raises:
            UserError: see ``modules.islands_of``; or a submodule that is never called.
        """
        kept = islands_of(self.modules, model, more)
        try:
            keep_fp32(model, kept, device.type, self.format.half_weights)
        except FormatError as error:
            raise UserError(f"{OPTION}: {error}") from None
        return kept

    def convert_layers(self, model: nn.Module, device: torch.device, blocks: list[nn.Module], kept: list[str]) -> None:
        """Let linear layers multiply in scaled formats, and those that did in an earlier one in these, or no longer.

        Raises:
            UserError: see ``modules.scaled_layers``.
        """
        numbers = scaled_layers(self.modules, self.format.number, model, blocks, kept)
        products = {
            number: scaled.product_of(number, str(self.fp8_scaling or SCALINGS[0]), self.gradients, device)
            for number in dict.fromkeys(numbers.values())
        }
        scaled.convert(model, numbers, products)

    def in_mode(self, mode: str) -> Precision:
        """Return this precision in one mode alone, without the options that have no effect in it."""
        if mode == self.mode and self.then is None:
            return self
        half, allowed = FORMATS[mode].half, BY_MODULE if mode in BY_MODULE else (FP32.name,)
        modules = {name: each for name, each in self.modules.items() if half and each in allowed}
        numbers = [FORMATS[each].number for each in (mode, *modules.values())]
        return replace(
            self,
            mode=mode,
            then=None,
            until=None,
            modules=modules,
            gradients=self.gradients if any(number.scaled for number in numbers) else None,
            fp8_scaling=self.fp8_scaling if FP8 in numbers else None,
            fp32_ops=self.fp32_ops if half else None,
            kernels=self.kernels if half else kernels.AUTO,
        )

    def check_phases(self, check: Callable[[Precision], None]) -> None:
        """Call ``check`` with each of the ``phases``.

        Raises:
            UserError: as ``check`` does; of the later mode, in words of ``then``.
        """
        for phase in self.phases:
            try:
                check(phase)
            except UserError as error:
                if phase.mode == self.mode:
                    raise
                # Another first mode is no remedy.
                remedies = [each for each in error.remedies if not each.startswith("precision=")]
                problem = f"precision.then={phase.mode}: {error.problem}"
                raise UserError(problem, *(remedies or [""]), mistake="" if remedies else _CHANGE) from error

    def check_single(self, why: str) -> None:
        """Refuse a change, by a UserError that says ``why`` it has no effect."""
        if self.then is not None:
            raise no_effect(f"precision.then={self.then}", why, mistake=_CHANGE)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of a run, in their order."""
        return (self.mode,) if self.then is None else (self.mode, self.then)

    @cached_property
    def phases(self) -> tuple[Precision, ...]:
        """The precision of each mode of a run by itself, without the options that have no effect in it."""
        return tuple(map(self.in_mode, self.modes))

    def at(self, step: int) -> Precision:
        """Return the precision of optimizer step ``step``, counted from 1, once ``until`` is a step."""
        return self.phases[0 if self.until is None or step <= self.until else 1]


def automatic(hardware: Hardware) -> tuple[str, str]:
    """Return the mode that ``precision=auto`` is on a device, and why: by an NVIDIA GPU's compute capability alone."""
    if hardware.capability is None:
        return FP32.name, f"on {hardware.kind.words}; 16 bits are chosen on NVIDIA GPUs alone"
    of = f"compute capability {'.'.join(map(str, hardware.capability))}"
    if hardware.support(hardware.half.name) != NATIVE:
        return FP32.name, f"{of} has no 16-bit instructions"
    return hardware.half.name, f"{of} has {hardware.half.name} instructions"


def _widen(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():  # not by ``Module.to``, which cannot swap the fake tensors of a forecast
        for parameter in module.parameters(recurse=False):
            parameter.data = in_dtype(parameter.data, dtype)
        held = {name: each for name, each in module._buffers.items() if each is not None}
        module._buffers.update({name: in_dtype(each, dtype) for name, each in held.items()})


def _has_torchao() -> bool:
    return find_spec("torchao") is not None and tuple(map(int, version("torchao").split(".")[:2])) >= (0, 18)


def allow_cudnn_attention(allowed: bool) -> None:
    """Enable or disable cuDNN's attention on CUDA, for this process.

    Not for models that mask: its backward can give NaN gradients of the query beside a mask where the length is 64
    more than a multiple of 128 (pytorch issue 196678, on Hopper, from torch 2.11 on), and no later cuDNN is known to be
    free of it.
    """
    torch.backends.cuda.enable_cudnn_sdp(allowed)
