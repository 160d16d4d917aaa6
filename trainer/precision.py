"""What runs in which number format: the ``precision`` config group, its fp32 islands and its manifest."""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from trainer.errors import UserError
from trainer.hardware import EMULATED, UNAVAILABLE, Hardware

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODES = ("fp32", "tf32", "bf16", "fp16")

# Libraries read these before torch's own flags, so a flag read back would not show what they did.
_LOWERING_ENVIRONMENT = {
    "NVIDIA_TF32_OVERRIDE": {"1"},
    "ONEDNN_DEFAULT_FPMATH_MODE": {"BF16", "F16", "TF32", "ANY"},
    "DNNL_DEFAULT_FPMATH_MODE": {"BF16", "F16", "TF32", "ANY"},
}
_NO_TF32 = ("NVIDIA_TF32_OVERRIDE", "0")


@dataclass
class Precision:
    """The ``precision`` config group.

    ``fp32`` is IEEE single precision in every backend, ``tf32`` lets matrix products and convolutions round
    their inputs to TF32, ``bf16`` and ``fp16`` are fp32 weights under torch.autocast of that type.
    """

    mode: str = "fp32"
    fp32_modules: list[str] = field(default_factory=list)
    """Patterns (``lm_head``, ``*.ln_*``) of submodule names that stay in fp32 under autocast."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"precision.mode={self.mode} is unknown; use precision={'|'.join(MODES)}")
        if self.fp32_modules and self.mode not in AUTOCAST_DTYPE:
            raise UserError(
                f"precision.fp32_modules has no effect with precision={self.mode}, which has no autocast; "
                "drop it, or use precision=bf16 or precision=fp16"
            )

    def check(self, hardware: Hardware) -> None:
        """Refuse what this hardware cannot compute, or what the environment would silently change.

        Raises:
            UserError: the mode is not available here, or a variable such as NVIDIA_TF32_OVERRIDE lowers fp32.

        """
        if hardware.support(self.mode) == UNAVAILABLE:
            raise UserError(
                f"precision={self.mode} is not available on {hardware.name} ({hardware.device.type}); "
                "tf32 needs an NVIDIA GPU of compute capability 8.0 or later. Use precision=fp32 or precision=bf16"
            )
        variable, value = _NO_TF32
        if self.mode == "tf32" and os.environ.get(variable) == value:
            raise UserError(
                f"the environment variable {variable}={value} turns TF32 off behind torch's back; "
                f"unset it for precision=tf32 (unset {variable})"
            )
        if self.mode != "fp32":
            return
        for variable, lowering in _LOWERING_ENVIRONMENT.items():
            if os.environ.get(variable, "").upper() in lowering:
                raise UserError(
                    f"the environment variable {variable}={os.environ[variable]} lowers fp32 behind torch's back; "
                    f"unset it for precision=fp32 (unset {variable})"
                )

    def warning(self, hardware: Hardware) -> str | None:
        """Return a sentence for the user where this hardware only emulates the mode."""
        if hardware.support(self.mode) != EMULATED:
            return None
        return (
            f"{hardware.name} has no {self.mode} instructions: results are {self.mode}'s, but expect no speed from it"
        )

    def apply(self) -> None:
        """Set every backend's fp32 mode for this process.

        One flag is not enough: ``torch.set_float32_matmul_precision("highest")`` leaves cuDNN in TF32.
        """
        fp32 = "tf32" if self.mode == "tf32" else "ieee"
        with warnings.catch_warnings():
            # The older flags are deprecated, but torch.compile's kernel templates read them, and torch raises
            # where they disagree with the newer ones.
            warnings.simplefilter("ignore")
            torch.backends.cuda.matmul.allow_tf32 = fp32 == "tf32"
            torch.backends.cudnn.allow_tf32 = fp32 == "tf32"
        torch.backends.fp32_precision = fp32  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = fp32
        torch.backends.cudnn.fp32_precision = fp32
        torch.backends.cudnn.conv.fp32_precision = fp32  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn.fp32_precision = fp32  # type: ignore[attr-defined]
        torch.backends.mkldnn.fp32_precision = "ieee"
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        torch.backends.mkldnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a fresh autocast context for one forward pass and its loss.

        Fresh, because a long-lived context caches low-precision copies of the weights, and the next forward
        would not see the optimizer's update.
        """
        dtype = AUTOCAST_DTYPE.get(self.mode)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)

    def keep_fp32(self, model: nn.Module, device: torch.device) -> list[str]:
        """Take the submodules that match ``fp32_modules`` out of autocast; return their names.

        Their floating-point inputs are cast to fp32 and their forward runs with autocast off.

        Raises:
            UserError: a pattern that matches no submodule.

        """
        modules = {name: module for name, module in model.named_modules() if name}
        kept: dict[str, nn.Module] = {}
        for pattern in self.fp32_modules:
            matches = {name for name in modules if _matches(name, pattern)}
            if not matches:
                last = [name.rpartition(".")[2] for name in modules]
                near = difflib.get_close_matches(pattern, [*modules, *dict.fromkeys(last)], n=3)
                hint = f"near it: {', '.join(near)}" if near else f"names are such as {', '.join([*modules][:4])}"
                raise UserError(f"precision.fp32_modules: {pattern!r} matches no submodule; {hint}")
            kept |= {name: modules[name] for name in matches}
        for name in kept:
            parent = name.rpartition(".")[0]
            if isinstance(modules.get(parent), nn.MultiheadAttention) and parent not in kept:
                raise UserError(
                    f"precision.fp32_modules: {name} is never called by itself, torch's attention takes its weights; "
                    f"name the whole of it: {parent}"
                )
        # A container may be passed by: its children are called directly. So they are taken out with it.
        inside = {id(module): module for match in kept.values() for module in match.modules()}
        for module in inside.values():
            module.forward = _in_fp32(module.forward, device.type)
        return sorted(kept)

    def manifest(self, hardware: Hardware, fp32_modules: list[str]) -> dict[str, Any]:
        """Return what was requested and what is effective, read back from torch and tried on the device.

        ``matmul_dtype`` is the type that a product of two fp32 matrices really has under this run's autocast.
        """
        with self.autocast(hardware.device):
            one = torch.ones(8, 8, device=hardware.device)
            matmul_dtype = str((one @ one).dtype).removeprefix("torch.")
        backends = torch.backends
        return {
            "requested": {"mode": self.mode, "fp32_modules": list(self.fp32_modules)},
            "support": hardware.support(self.mode),
            "effective": {
                "device": str(hardware.device),
                "weights_dtype": "float32",
                "matmul_dtype": matmul_dtype,
                "fp32_modules": fp32_modules,
                "fp32_in_cuda_matmul": backends.cuda.matmul.fp32_precision,
                "fp32_in_cudnn_conv": backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
                "fp32_in_cudnn_rnn": backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
                "fp32_in_mkldnn_matmul": backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
                "fp32_in_mkldnn_conv": backends.mkldnn.conv.fp32_precision,  # type: ignore[attr-defined]
                "fp16_reduced_precision_reduction": bool(backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
                "bf16_reduced_precision_reduction": bool(backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
            },
            "environment": {name: os.environ[name] for name in _LOWERING_ENVIRONMENT if name in os.environ},
        }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _in_fp32(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def fp32_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(*_upcast(args), **_upcast(kwargs))

    return fp32_forward


def _upcast(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _upcast(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_upcast(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_upcast(item) for item in value)
    return value
