"""How fast this device multiplies matrices in each number format: measured once, then cached."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mantissa.formats import FP8, NUMBERS, Number
from mantissa.step.flags import flags_of
from mantissa.step.memory import available_bytes
from trainer.cache import cached
from trainer.hardware import CUDA, NATIVE, UNAVAILABLE, Hardware, driver_version
from trainer.precision import kernels

_SMALLEST, _LARGEST = 128, 8192
_LARGEST_ON_CPU = 4096
_ENOUGH_S = 0.005
"""What one timed block takes at least, so that neither the clock nor the launch of kernels is in it."""
_ENOUGH_IN_ALL_S = 0.2
_VARIABLES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_BLAS_PREFER_CUBLASLT"),
)
"""Variables of the environment that decide which kernels torch's libraries choose."""


def matmul_rates(hardware: Hardware, numbers: Iterable[str]) -> dict[str, float]:
    """Return the rates of matmuls here, in 10^12 FLOP/s by number format; formats that the device lacks are left
    out, and scaled ones other than native fp8.

    Measured are the three matmuls of a linear layer in training, of square matrices: forward, the gradient of the
    input, the gradient of the weight, by the kernels that this process uses. They differ in which factor is transposed,
    which matters where a processor has no instructions for the format. The shortest of several times counts. This takes
    up to a second for a format, once for each device, number of threads and torch. ``numbers``: names of
    ``mantissa.formats.NUMBERS``.
    """
    return {
        name: cached("products", _of(hardware, name), partial(measure, NUMBERS[name], hardware.device))
        for name in numbers
        if _has_matmul(hardware, NUMBERS[name])
    }


def _has_matmul(hardware: Hardware, number: Number) -> bool:
    native = number is FP8 and hardware.support(number.name) == NATIVE
    return native or (hardware.support(number.name) != UNAVAILABLE and not number.scaled)


def measure(number: Number, device: torch.device) -> float:
    """Measure the rate of matmuls in one format, in 10^12 FLOP/s; see ``matmul_rates``.

    The size of the matrices grows until they take long enough and their rate no longer rises, so a slow format is
    measured on small ones.
    """
    size, largest, before = _SMALLEST, _largest(device), 0.0
    off = torch.autocast(device.type, enabled=False)
    with unset_fake_temporarily(), torch.no_grad(), off, flags_of(number):
        while True:
            matmuls = _matmuls(number, device, size)
            flop = 2.0 * size**3 * len(matmuls)
            seconds = min(_seconds(matmuls, 1) for _ in range(2))
            rises = flop / seconds >= 1.2 * before
            if size >= largest or seconds >= 10 * _ENOUGH_S or (seconds >= _ENOUGH_S and not rises):
                break
            size, before = 2 * size, flop / seconds
        repeats = math.ceil(_ENOUGH_S / seconds)
        until, times = time.perf_counter() + _ENOUGH_IN_ALL_S, [seconds]
        while len(times) < 4 or time.perf_counter() < until:
            times.append(_seconds(matmuls, repeats))
    del matmuls
    torch.accelerator.empty_cache()  # the run's own allocations begin afresh
    return flop / min(times) / 1e12


def _seconds(matmuls: list[Callable[[], Tensor]], repeats: int) -> float:
    matmuls[0]()[0, 0].item()  # waits for the device
    began = time.perf_counter()
    for _ in range(repeats):
        for matmul in matmuls:
            result = matmul()
    result[0, 0].item()
    return (time.perf_counter() - began) / repeats


def _matmuls(number: Number, device: torch.device, size: int) -> list[Callable[[], Tensor]]:
    generator = torch.Generator(device).manual_seed(0)  # random: a GPU is faster where all bits are equal
    x, weight, upstream = (torch.randn(size, size, device=device, generator=generator) for _ in range(3))
    if number is FP8:
        return [_scaled(x, weight)]
    x, weight, upstream = (matrix.to(number.dtype) for matrix in (x, weight, upstream))
    return [lambda: x @ weight.t(), lambda: upstream @ weight, lambda: upstream.t() @ x]


def _scaled(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return an fp8 matmul as torchao computes it: both factors in e4m3, one scale each, the result in bf16."""
    scale = torch.ones((), device=x.device)
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(x, weight, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _largest(device: torch.device) -> int:
    """Return the largest size whose matrices take at most a quarter of the memory that is left."""
    size = _LARGEST_ON_CPU if device.type == "cpu" else _LARGEST
    while size > 1024 and 7 * size**2 * 4 > available_bytes(device) / 4:
        size //= 2
    return size


def _of(hardware: Hardware, name: str) -> dict[str, Any]:
    """Return what the rate of a format depends on."""
    return hardware.facts() | {
        "format": name,
        "arithmetic": "fp32" if kernels.in_use(NUMBERS[name].dtype) else "own",
        "driver": driver_version() if hardware.kind is CUDA else None,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
