"""What this machine is, what differs between kinds of device, and which number formats they compute natively."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mantissa.formats import BF16, FORMATS, FP16, FP32, FP64, NUMBERS, Number
from mantissa.step.memory import control_groups, held_bytes
from trainer.errors import UserError, first_line

_allocator: Any = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h
_HUGE_PAGE, _USE_HUGE_PAGES = 2**21, 14  # bytes; of Linux's mman.h

# Deterministic algorithms need it, and torch asks once in a process, at its first product on CUDA: a later run in the
# process could not set it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

NATIVE, EMULATED, UNAVAILABLE = "native", "emulated", "not available"


@dataclass(frozen=True)
class DeviceKind:
    """A row of the table."""

    name: str
    type: str
    """Of its ``torch.device``."""
    words: str
    collectives: str | None
    """The backend of torch.distributed for its tensors; None: it trains in one process alone."""
    own_memory: bool = False
    """Whether it has memory of its own, whose capacity and peak torch counts; else the process's memory is measured."""
    pinned: bool = False
    """Whether it copies by itself from page-locked memory of the host."""
    wide: torch.dtype = torch.float64
    """The widest floating-point dtype that it computes in."""
    fused_amp: bool = False
    """Whether torch's fused optimizers take GradScaler's ``grad_scale`` and ``found_inf`` on the device; elsewhere they
    are tried before they update 16-bit weights, and the host reads whether a step is skipped."""
    profiled: bool = True
    """Whether torch.profiler times its kernels."""
    nvidia: bool = False
    """Whether formats depend on CUDA's compute capability (TF32 exists, fp8 is native)."""


CPU = DeviceKind("CPU", "cpu", "a CPU", "gloo")
CUDA = DeviceKind("CUDA", "cuda", "an NVIDIA GPU", "nccl", True, True, fused_amp=True, nvidia=True)
# torch's builds for ROCm call the device cuda and RCCL nccl. TF32 is refused; fp8 is emulated: MI300 multiplies
# e4m3fnuz, whose largest number is 240, not the table's 448 (rocm.docs.amd.com, "Low precision floating point types").
ROCM = DeviceKind("ROCm", "cuda", "an AMD GPU", "nccl", True, True, fused_amp=True)
# TF32 is refused: ``torch.backends.mkldnn.allow_tf32`` alone decides on it (pytorch pull request 144240), which the
# manifest does not read back.
XPU = DeviceKind("XPU", "xpu", "an Intel GPU", "xccl", True, True)
# No pinned memory: torch's DataLoader turns it off (pytorch issue 86060). No counters of memory before torch 2.13 (pull
# request 186748). Fused kernels ignored grad_scale and found_inf before pull request 186360.
MPS = DeviceKind("MPS", "mps", "an Apple GPU", None, wide=torch.float32, profiled=False)
DEVICE_KINDS = (CPU, CUDA, ROCM, XPU, MPS)


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the row of a device, such as ``cuda:0``, in this build of torch."""
    kinds = {kind.type: kind for kind in DEVICE_KINDS if kind is not (CUDA if torch.version.hip else ROCM)}
    return kinds[str(device).partition(":")[0]]


def best_type() -> str:
    """Return the type that ``device=auto`` means: of the accelerator that is here, else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    known = accelerator is not None and any(kind.type == accelerator.type for kind in DEVICE_KINDS)
    return accelerator.type if accelerator is not None and known else CPU.type


def select(device: torch.device) -> None:
    """Let calls of this thread without a device (streams, synchronisation, pinning) use this one."""
    if device.type != CPU.type:
        torch.accelerator.set_device_index(device)


@dataclass(frozen=True)
class Hardware:
    """The device a run uses, with the facts that explain its numbers."""

    device: torch.device
    name: str
    """Of the processor or GPU, as its maker calls it."""
    memory_bytes: int
    """Of the GPU, or of the machine when the run uses the CPU."""
    cpu_cores: int
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None elsewhere."""
    cpu_flags: frozenset[str] = field(default_factory=frozenset)
    """The instruction sets that decide about number formats, see ``mantissa.formats.Number.instructions``."""

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU with memory of its own (CUDA, ROCm, XPU), on which the published sizes fit."""
        return self.kind.own_memory

    @property
    def kind(self) -> DeviceKind:
        """What holds for all devices of this kind."""
        return kind_of(self.device)

    @property
    def half(self) -> Number:
        """The 16-bit numbers to train in here: bf16, and fp16 on an NVIDIA GPU without instructions for bf16."""
        return FP16 if self.capability is not None and self.support(BF16.name) != NATIVE else BF16

    def support(self, mode: str) -> str:
        """Return how this device computes matmuls in a mode: native, emulated, not available.

        Native means that they run in that format's own instructions; emulated, that the results are right but
        computed in another format (usually no faster).
        """
        number = FORMATS[mode].number
        if number is FP32:
            return NATIVE
        if number is FP64:
            return NATIVE if self.kind.wide == number.dtype else UNAVAILABLE
        if self.capability is not None:
            least = number.capability
            if least and self.capability >= least and not (number.one_major and self.capability[0] > least[0]):
                return NATIVE
            return UNAVAILABLE if number.only_nvidia else EMULATED
        if number.only_nvidia:
            return UNAVAILABLE
        if number.scaled:
            return EMULATED
        return NATIVE if self.device.type != "cpu" or self.cpu_flags & number.instructions else EMULATED

    def facts(self) -> dict[str, Any]:
        """Return what is recorded with every run: plain JSON types."""
        record = asdict(self) | {"device": str(self.device), "cpu_flags": sorted(self.cpu_flags)}
        record["torch"] = torch.__version__
        record["cuda"] = torch.version.cuda if self.kind is CUDA else None
        record["python"] = platform.python_version()
        record["threads"] = torch.get_num_threads()
        return record


def detect(device: str) -> Hardware:
    """Describe the device named ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``xpu`` or ``mps``.

    Raises:
        UserError: no such device here, or an NVIDIA GPU that torch cannot use.
    """
    check_driver(device)
    if device == "auto":
        device = best_type()
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"device={device} is not a device (cpu, cuda, cuda:1, xpu, mps)", "device=auto") from None
    if chosen.type not in [kind.type for kind in DEVICE_KINDS]:
        raise UserError(f"device={device} is not supported (cpu, cuda, xpu, mps)", "device=auto")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    kind = kind_of(chosen)
    if kind is not CPU:
        if best_type() != chosen.type:
            raise UserError(f"device={device}: torch finds no {kind.words[3:]} here", "device=cpu", "device=auto")
        if chosen.index is None:
            chosen = torch.device(chosen.type, torch.accelerator.current_device_index())
        if chosen.index >= (count := torch.accelerator.device_count()):
            raise UserError(
                f"device={device}: this machine has {count} GPU(s), counted from {chosen.type}:0", "device=auto"
            )
    if kind.own_memory:
        properties = torch.get_device_module(chosen).get_device_properties(chosen)
        capability = (properties.major, properties.minor) if kind.nvidia else None
        return Hardware(chosen, properties.name, properties.total_memory, cores, capability)
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    return Hardware(chosen, name, _ram_bytes(), cores, None, _cpu_flags())


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, such as ``580.65.06``; None: it is not known, or there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def check_driver(device: str) -> None:
    """Refuse to train on the CPU, without a word, beside a GPU that the driver sees and torch cannot use.

    Not where ``CUDA_VISIBLE_DEVICES`` hides it, nor with a build of torch for CPUs: there the user asks for the CPU.
    """
    if device.partition(":")[0] not in ("auto", CUDA.type) or torch.version.cuda is None or torch.cuda.is_available():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a library of the driver without a driver
        found = torch.cuda.device_count()  # which asks the driver (NVML), as long as CUDA is not initialised
    if not found:
        return
    try:
        torch.cuda.init()
        why = "it finds none"
    except RuntimeError as error:
        why = first_line(error).partition(". ")[0]
    raise UserError(
        f"device={device}: torch cannot use the NVIDIA GPU that is here ({why}); the driver is {driver_version()}, and "
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda}",
        "device=cpu",
    )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch's operators use ``count`` threads of the CPU (None: no change) in what runs inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak, so that consecutive runs in one process are measured separately."""
    if kind_of(device).own_memory:
        torch.accelerator.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux only; elsewhere the peak is that of the process
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak since the last reset: allocated on a GPU, or the resident set of this process."""
    if kind_of(device).own_memory:
        return torch.accelerator.max_memory_allocated(device)
    with suppress(OSError):
        return held_bytes("VmHWM")
    import psutil

    return int(psutil.Process().memory_info().rss)  # macOS has only the present value


def reserved_memory_bytes(device: torch.device) -> int | None:
    """Return what torch has taken of a GPU's memory, freed blocks included, the most since the last reset."""
    return torch.accelerator.max_memory_reserved(device) if kind_of(device).own_memory else None


def _ram_bytes() -> int:
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in control_groups())])


def _cpuinfo(key: str) -> str:
    """Return the first such line of Linux's /proc/cpuinfo, or an empty string."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


def _cpu_flags() -> frozenset[str]:
    deciding = frozenset().union(*(number.instructions for number in NUMBERS.values()))
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11 may lack it
        return deciding & frozenset(_cpuinfo("flags").split())
    capabilities = torch.cpu.get_capabilities()
    return frozenset(flag for flag in deciding if capabilities.get(flag))


def keep_freed_memory(size: int) -> None:
    """Let the C library of Linux keep the memory of freed tensors for the next ones, ``size`` bytes in huge pages.

    It would return large blocks to the system, so that new tensors begin with page faults: up to a quarter of a step on
    a CPU. Nothing changes where a variable of the environment tunes the allocator or loads another.
    """
    if not _may_tune():
        return
    _allocator.mallopt(_MMAP_MAX, 0)
    _allocator.mallopt(_TRIM_THRESHOLD, -1)
    # Huge pages have to be asked for by address: of a block that is free again at once.
    _allocator.malloc.restype = ctypes.c_void_p
    if block := _allocator.malloc(ctypes.c_size_t(size)):
        first = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        whole = max(0, block + size - first) // _HUGE_PAGE * _HUGE_PAGE
        _allocator.madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), _USE_HUGE_PAGES)
        _allocator.free(ctypes.c_void_p(block))


def release_kept_memory() -> None:
    """Return to the system what ``keep_freed_memory`` keeps, and from now on large blocks that are freed."""
    if _may_tune():
        _allocator.mallopt(_MMAP_MAX, 65536)  # glibc's own, as the next
        _allocator.mallopt(_TRIM_THRESHOLD, 128 * 1024)
        _allocator.malloc_trim(ctypes.c_size_t(0))


def _may_tune() -> bool:
    """Return whether the allocator is glibc's, and no variable of the environment tunes it or loads another."""
    others = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    return _allocator is not None and not any(name.startswith(others) for name in os.environ)


def seed_everything(seed: int) -> None:
    """Seed every global generator; data order and augmentation do not use them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def set_determinism(deterministic: bool) -> None:
    """Make torch refuse operations without a repeatable implementation, or let it choose the fastest."""
    torch.use_deterministic_algorithms(deterministic)
    # It takes a pass over memory and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic
