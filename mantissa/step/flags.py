"""torch's flags that decide how fp32 numbers are multiplied, and in what products of 16-bit numbers are summed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mantissa.formats import FP32, TF32, Number

_backends: Any = torch.backends
_matmul, _cudnn, _mkldnn = _backends.cuda.matmul, _backends.cudnn, _backends.mkldnn
_ON_CUDA = (_cudnn, _matmul, _cudnn.conv, _cudnn.rnn)
_OUTER = (_backends, _cudnn)
_OPERATORS = (*_ON_CUDA[1:], _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn)
"""Of these, a flag that is ``none`` reads as one of those outside."""
_BY_DEVICE = {"cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"), "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")}
"""Flags of torch.backends that decide how a kind of device multiplies fp32 numbers."""
_REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def set_flags(number: Number) -> None:
    """Set every backend's fp32 mode for this process: IEEE, but TF32 on CUDA where that is the number.

    In products of 16-bit numbers cuBLAS may no longer add the parts of a long sum up in 16 bits, as torch's default
    lets it.
    """
    # The older flags, too: torch.compile's kernel templates read them, and torch raises where they disagree with the
    # newer ones. One is not enough: ``torch.set_float32_matmul_precision("highest")`` leaves cuDNN in TF32.
    _matmul.allow_tf32 = _cudnn.allow_tf32 = number is TF32
    for place in (*_OUTER, *_OPERATORS):
        place.fp32_precision = "tf32" if number is TF32 and place in _ON_CUDA else "ieee"
    for name in _REDUCTIONS:
        setattr(_matmul, name, False)


def fp32_flags(kind: str) -> dict[str, str]:
    """Return how a kind of device, ``cuda`` or ``cpu``, multiplies fp32 numbers, by the name in ``torch.backends``."""
    split = {name: name.split(".") for name in _BY_DEVICE.get(kind, ())}
    return {name: getattr(getattr(torch.backends, one), two).fp32_precision for name, (one, two) in split.items()}


@contextmanager
def flags_of(number: Number) -> Iterator[None]:
    """Compute with the flags of a number, and leave this process with those that it had, whatever they are."""
    # Each newer flag's own value, with nothing outside of it that it could read as.
    before: list[tuple[Any, str, Any]] = []
    for places, instead in ((_OUTER, "none"), (_OPERATORS, "ieee")):
        for place in places:
            before.append((place, "fp32_precision", place.fp32_precision))
            place.fp32_precision = instead
    # The older ones, which cannot be read where they contradict the newer: those are all IEEE now.
    matmul, tf32 = torch.get_float32_matmul_precision(), True
    with suppress(RuntimeError):
        tf32 = _cudnn.allow_tf32
    before += [(_matmul, name, (getattr(_matmul, name), getattr(_matmul, f"{name}_split_k"))) for name in _REDUCTIONS]

    try:
        set_flags(number)
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        _cudnn.allow_tf32 = tf32
        for place, name, value in before:
            setattr(place, name, value)


with warnings.catch_warnings(action="ignore"), flags_of(FP32):
    pass  # some versions of torch warn of the older flags, once in a process
