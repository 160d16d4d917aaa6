"""How fast this device multiplies matrices in each number format: measured once, then cached."""

from __future__ import annotations

import math
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

from mantissa.formats import FORMATS, FP8, FP32, NUMBERS, TF32, Number
from trainer.cache import cached
from trainer.errors import UserError
from trainer.hardware import UNAVAILABLE, Hardware, available_bytes, processor
from trainer.precision import kernels

_SMALLEST, _LARGEST = 128, 8192
_LARGEST_ON_CPU = 4096
_ENOUGH_S = 0.005
"""What one timed block takes at least, so that neither the clock nor the launch of kernels is in it."""
_TIMES = (4, 20)
_ENOUGH_IN_ALL_S = 0.5
_AGREE = 1.03
"""The ratio of the two shortest times from which on they agree: other work on the machine did not slow them."""


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
            rate = _Matmuls(number, device, time.perf_counter).rate()
        else:
            # One thread's own time does not count the work of other programs, which keep several threads waiting for
            # each other. On a busy machine it is the better figure, although of one thread only.
            try:
                torch.set_num_threads(1)
                own = _Matmuls(number, device, time.thread_time)
                rate = own.rate()
            finally:
                torch.set_num_threads(threads)
            if threads > 1 and not alone:
                rate = max(rate, _Matmuls(number, device, time.perf_counter, own.size).rate())
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the run's own allocations begin afresh
    return rate


class _Matmuls:
    """The matmuls of one format, of a size that gives an exact time.

    The size grows until they take long enough and their rate no longer rises, so a slow format is measured on small
    matrices.
    """

    def __init__(self, number: Number, device: torch.device, clock: Callable[[], float], size: int = _SMALLEST) -> None:
        self.number = number
        self.device = device
        self.clock = clock
        self.size = size
        self.repeats = 1
        largest, before = _largest(device), 0.0
        while True:
            self._prepare()
            seconds = min(self._seconds() for _ in range(2))
            rate = self._flop / seconds
            if self.size >= largest or seconds >= 10 * _ENOUGH_S or (seconds >= _ENOUGH_S and rate < 1.2 * before):
                break
            self.size, before = 2 * self.size, rate
        self.repeats = max(1, math.ceil(_ENOUGH_S / seconds))

    def rate(self) -> float:
        """Return 10^12 FLOP/s, of the shortest of several times."""
        began, times = time.perf_counter(), [self._seconds()]
        least, most = _TIMES
        while len(times) < most:
            times.append(self._seconds())
            shortest, next_one = sorted(times)[:2]
            late = time.perf_counter() > began + _ENOUGH_IN_ALL_S
            if late or (len(times) >= least and next_one <= _AGREE * shortest):
                break
        return self._flop / min(times) / 1e12

    @property
    def _flop(self) -> float:
        return 2.0 * self.size**3 * len(self._matmuls)

    def _prepare(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)  # random: a GPU is faster where all bits are equal
        x, weight, upstream = (
            torch.randn(self.size, self.size, device=self.device, generator=generator) for _ in range(3)
        )
        self._matmuls: list[Callable[[], Tensor]]
        if self.number is FP8:
            self._matmuls = [_scaled(x, weight)]
            return
        x, weight, upstream = (each.to(self.number.dtype) for each in (x, weight, upstream))
        self._matmuls = [lambda: x @ weight.t(), lambda: upstream @ weight, lambda: upstream.t() @ x]

    def _seconds(self) -> float:
        with _fp32_matmuls(self.number, self.device):
            _wait(self._matmuls[0]())
            began = self.clock()
            for _ in range(self.repeats):
                for matmul in self._matmuls:
                    result = matmul()
            _wait(result)
            return (self.clock() - began) / self.repeats


def _scaled(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return an fp8 matmul as torchao computes it: both factors in e4m3, one scale each, the result in bf16."""
    scale = torch.ones((), device=x.device)
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(x, weight, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _wait(result: Tensor) -> None:
    result[0, 0].item()


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
