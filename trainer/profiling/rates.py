"""How fast this device multiplies matrices in each number format: measured once on a quiet machine, then cached."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mantissa.display import quantity
from mantissa.formats import FP8, FP32, NUMBERS, TF32, Number
from mantissa.memory import available_bytes
from trainer.cache import cached, forget
from trainer.hardware import CPU, CUDA, NATIVE, UNAVAILABLE, Hardware
from trainer.precision import kernels

_SMALLEST, _LARGEST = 128, 8192
_FEW_WEIGHTS = 2**24
"""A layer with more is not timed: it would take seconds."""
_LARGEST_ON_CPU = 4096
_ENOUGH_S = 0.005
"""What one timed block takes at least, so that neither the clock nor the launch of kernels is in it."""
_ENOUGH_IN_ALL_S = 0.2
BUSY = 0.1
"""Share of the CPUs that others use, from which on times say little about the machine."""
_WHILE_BUSY: dict[str, float] = {}
"""Rates that are not kept for other processes, so that the runs of a sweep show the same one."""
_VARIABLES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_BLAS_PREFER_CUBLASLT"),
)
"""Of the environment: what decides which kernels torch's libraries choose."""


def matmul_rates(hardware: Hardware, numbers: Iterable[str] = NUMBERS) -> dict[str, float]:
    """Return the rates of matmuls here, in 10^12 FLOP/s by number format; formats that the device lacks are left
    out, and scaled ones other than native fp8.

    Measured are the three matmuls of a linear layer in training, of square matrices: forward, the gradient of the
    input, the gradient of the weight, by the kernels that this process uses. They differ in which factor is transposed,
    which matters where a processor has no instructions for the format. The shortest of several times counts. This takes
    up to a second for a format, once for each device, number of threads and torch. What was measured while other
    processes used the CPUs is kept for this process alone. ``numbers``: names of ``mantissa.formats.NUMBERS``.
    """
    rates = {}
    for name in (name for name in numbers if _has_matmul(hardware, NUMBERS[name])):
        of = _of(hardware, name)
        rates[name] = _WHILE_BUSY.get(repr(of)) or cached("products", of, partial(_measure_quietly, hardware, name))
    return rates


def _has_matmul(hardware: Hardware, number: Number) -> bool:
    native = number is FP8 and hardware.support(number.name) == NATIVE
    return native or (hardware.support(number.name) != UNAVAILABLE and not number.scaled)


def forget_rate(hardware: Hardware, name: str) -> None:
    """Let a later run measure the rate of a format again."""
    of = _of(hardware, name)
    _WHILE_BUSY.pop(repr(of), None)
    forget("products", of)


def _measure_quietly(hardware: Hardware, name: str) -> tuple[float, bool]:
    """Measure a rate; return it, and whether it is one of a quiet machine. Of a GPU, the load of CPUs says little."""
    import psutil

    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    psutil.cpu_percent(percpu=True)  # counts from here
    began, used = time.perf_counter(), time.process_time()
    rate = measure(NUMBERS[name], hardware.device)
    busy = sum(share for cpu, share in enumerate(psutil.cpu_percent(percpu=True)) if cpu in own) / 100
    others = busy - (time.process_time() - used) / (time.perf_counter() - began)
    is_quiet = hardware.kind is not CPU or others < BUSY * len(own)
    if not is_quiet:
        _WHILE_BUSY[repr(_of(hardware, name))] = rate
    return rate, is_quiet


def slower_than_fp32(model: nn.Module, dtype: torch.dtype, name: str, flop: float, rates: dict[str, float]) -> str:
    """Return why an eager microbatch may take as long under autocast as in fp32 on this CPU, or longer; empty: shorter.

    Its matmuls take their ``flop`` by the ``rates``. What they save must be more than casts and calls of 16-bit kernels
    take; casts of activations by their size, and what else 16 bits change, are not counted.
    """
    fp32, half = (flop / 1e9 / rates[each] for each in (FP32.name, name))
    casts = _casts_ms(model, dtype) if abs(fp32 - half) < 10 else 0.0  # of a large model nothing is timed
    if fp32 - half > casts:
        return ""
    more = f"and casts {quantity(casts)} ms" if casts else "without casts"
    return f"matmuls of a microbatch take {quantity(half)} ms {more}, in fp32 {quantity(fp32)} ms"


def _casts_ms(model: nn.Module, dtype: torch.dtype) -> float:
    """Return the milliseconds that autocast adds to a training pass over few rows, each weight in a linear layer.

    Of each shape one is timed, by CPU time, so that other processes matter little.
    """
    # Layers that multiply have a bias, though it may be None. Embeddings, which autocast does not cast, have none.
    found = [getattr(each, "weight", None) for each in model.modules() if hasattr(each, "bias")]
    weights = [each for each in found if isinstance(each, Tensor) and each.ndim > 1 and 0 < each.numel() < _FEW_WEIGHTS]
    sizes = Counter((len(each), each.numel() // len(each)) for each in weights)
    added = 0.0
    for (rows, columns), count in sizes.items():
        x, weight = (torch.ones(size, columns, requires_grad=True) for size in (8, rows))
        seconds = [math.inf, math.inf]
        for enabled in (False, True) * 5:  # the first passes of a process take longer
            began = time.thread_time()
            with torch.autocast("cpu", dtype, enabled):
                F.linear(x, weight).sum().backward()
            seconds[enabled] = min(seconds[enabled], time.thread_time() - began)
        added += 1e3 * count * max(0.0, seconds[True] - seconds[False])
    return added


def measure(number: Number, device: torch.device) -> float:
    """Measure the rate of matmuls in one format, in 10^12 FLOP/s; see ``matmul_rates``.

    The size of the matrices grows until they take long enough and their rate no longer rises, so a slow format is
    measured on small ones.
    """
    size, largest, before = _SMALLEST, _largest(device), 0.0
    off = torch.autocast(device.type, enabled=False)
    with unset_fake_temporarily(), torch.no_grad(), off, _fp32_matmuls(number, device):
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


@contextmanager
def _fp32_matmuls(number: Number, device: torch.device) -> Iterator[None]:
    """Multiply fp32 matrices as fp32 or tf32 does, whatever the precision of the process is."""
    on_gpu = device.type == CUDA.type
    backend: Any = torch.backends.cuda.matmul if on_gpu else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision

    def choose(value: str) -> None:
        if on_gpu:  # torch raises where the older flag disagrees
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                backend.allow_tf32 = value == TF32.name
        backend.fp32_precision = value

    try:
        choose("tf32" if number is TF32 else "ieee")
        yield
    finally:
        choose(before)


def _of(hardware: Hardware, name: str) -> dict[str, Any]:
    """Return what the rate of a format depends on."""
    return hardware.facts() | {
        "format": name,
        "arithmetic": "fp32" if kernels.in_use(NUMBERS[name].dtype) else "own",
        "driver": torch._C._cuda_getDriverVersion() if hardware.kind is CUDA else None,  # type: ignore[attr-defined]
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
