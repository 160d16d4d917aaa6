"""How fast this device multiplies matrices in each number format: measured once, then cached."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.benchmark import Timer

from mantissa.formats import FORMATS, FP8, FP32, NUMBERS, TF32, Number
from trainer.cache import cached
from trainer.errors import UserError
from trainer.hardware import UNAVAILABLE, Hardware, available_bytes, processor
from trainer.precision import kernels

_SMALLEST, _LARGEST = 128, 8192
_LARGEST_ON_CPU = 4096
_ENOUGH_S = 0.005
"""What the matmuls take at least, so that neither the clock nor the launch of kernels is in it."""
_ENOUGH_IN_ALL_S = 0.2


def product_rates(hardware: Hardware, numbers: Iterable[str] = NUMBERS) -> dict[str, float]:
    """Return the rates of matmuls here, in 10^12 FLOP/s by number format; formats that the device lacks are left out.

    Measured are the three matmuls of a linear layer in training, of square matrices: forward, the gradient of the
    input, the gradient of the weight, by the kernels that this process uses. They differ in which factor is transposed,
    which matters where a processor has no instructions for the format. On a CPU the higher of two rates counts: of one
    thread by its CPU time, and of all of torch's threads. The shortest of several times counts. This takes some 0.1 to
    0.5 s for a format, once for each device, number of threads and torch.

    Args:
        hardware: the device.
        numbers: names of ``mantissa.formats.NUMBERS``.
    """
    of = _of(hardware)
    return {
        name: _rate(NUMBERS[name], hardware.device, of) for name in numbers if hardware.support(name) != UNAVAILABLE
    }


def slowdown(mode: str, hardware: Hardware) -> float:
    """Return the time of a matmul in a precision mode over fp32's; on a CPU by one thread's CPU time.

    (With all threads, one of the two could have been measured while other programs ran, and the other not.)

    Raises:
        UserError: this device does not have the mode.
    """
    number, of, alone = FORMATS[mode].number, _of(hardware), hardware.device.type == "cpu"
    if hardware.support(number.name) == UNAVAILABLE:
        raise UserError(f"precision={mode} is not available on {hardware.name}; use precision=fp32")
    if number is FP32:
        return 1.0
    if alone:
        of |= {"threads": 1, "by": "CPU time"}
    return _rate(FP32, hardware.device, of, alone) / _rate(number, hardware.device, of, alone)


def _rate(number: Number, device: torch.device, of: dict[str, Any], alone: bool = False) -> float:
    """Return what ``measure`` returns, or has returned for the same ``of`` and kernels."""
    of = of | {"format": number.name}
    if kernels.in_use(number.dtype, "mm"):
        of["arithmetic"] = "fp32"
    return cached("products", of, partial(measure, number, device, alone))


def measure(number: Number, device: torch.device, alone: bool = False) -> float:
    """Measure the rate of matmuls in one format, in 10^12 FLOP/s; see ``product_rates``.

    ``alone``: on a CPU, of one thread.
    """
    threads = torch.get_num_threads()
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        if device.type != "cpu":
            rate, _ = _rate_and_size(number, device, threads, time.perf_counter)
        else:
            # One thread's own time does not count the work of other programs, which keep several threads waiting for
            # each other. On a busy machine it is the better figure, although of one thread only.
            rate, size = _rate_and_size(number, device, 1, time.thread_time)
            if threads > 1 and not alone:
                rate = max(rate, _rate_and_size(number, device, threads, time.perf_counter, size)[0])
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the run's own allocations begin afresh
    return rate


def _rate_and_size(
    number: Number, device: torch.device, threads: int, clock: Callable[[], float], size: int = _SMALLEST
) -> tuple[float, int]:
    """Return 10^12 FLOP/s, and the size of the matrices, which begins at ``size``.

    The size grows until the matmuls take long enough and their rate no longer rises, so a slow format is measured on
    small matrices.
    """
    largest, before = _largest(device), 0.0
    while True:
        matmuls = _matmuls(number, device, size)
        flop = 2.0 * size**3 * len(matmuls)
        seconds = _seconds(matmuls, number, device, threads, clock, _ENOUGH_S)
        rate = flop / seconds
        if size >= largest or seconds >= 10 * _ENOUGH_S or (seconds >= _ENOUGH_S and rate < 1.2 * before):
            break
        size, before = 2 * size, rate
    return flop / _seconds(matmuls, number, device, threads, clock, _ENOUGH_IN_ALL_S) / 1e12, size


def _seconds(
    matmuls: list[Callable[[], Tensor]],
    number: Number,
    device: torch.device,
    threads: int,
    clock: Callable[[], float],
    at_least_s: float,
) -> float:
    """Return the shortest time of all matmuls together, of those measured in ``at_least_s``."""
    timer = Timer(
        "for matmul in matmuls: result = matmul()\nresult[0, 0].item()",  # waits for the device
        globals={"matmuls": matmuls},
        timer=clock,
        num_threads=threads,
    )
    with _fp32_matmuls(number, device):
        return min(timer.blocked_autorange(min_run_time=at_least_s).times)


def _matmuls(number: Number, device: torch.device, size: int) -> list[Callable[[], Tensor]]:
    generator = torch.Generator(device).manual_seed(0)  # random: a GPU is faster where all bits are equal
    x, weight, upstream = (torch.randn(size, size, device=device, generator=generator) for _ in range(3))
    if number is FP8:
        return [_scaled(x, weight)]
    x, weight, upstream = (each.to(number.dtype) for each in (x, weight, upstream))
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
    on_gpu = device.type == "cuda"
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


def _of(hardware: Hardware) -> dict[str, Any]:
    """Return what the rates depend on."""
    if hardware.device.type == "cpu":
        return processor(hardware) | {"threads": torch.get_num_threads(), "cores": hardware.cpu_cores}
    cuda = hardware.device.type == "cuda"
    variables = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_BLAS_PREFER_CUBLASLT")
    return {
        "gpu": hardware.name,
        "capability": hardware.capability,
        "memory_bytes": hardware.memory_bytes,
        "driver": torch._C._cuda_getDriverVersion() if cuda else None,  # type: ignore[attr-defined]
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }
