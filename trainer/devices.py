"""The kinds of device that training runs on: one table of what differs between them.

What torch can say itself is not in it: ``torch.accelerator`` selects and synchronises, ``torch.get_device_module`` has
the generators and the cache, the dispatcher knows for which optimizers a device has fused kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """Whether formats depend on CUDA's compute capability (TF32 and fp8 exist)."""
    ran: str = "not run"
    """What of this project has run on it."""


CPU = DeviceKind("CPU", "cpu", "a CPU", "gloo", ran="tests, measurements")
CUDA = DeviceKind("CUDA", "cuda", "an NVIDIA GPU", "nccl", True, True, fused_amp=True, nvidia=True)
# torch's builds for ROCm call the device cuda and RCCL nccl. TF32 and fp8 are refused: MI300 multiplies e4m3fnuz, whose
# largest number is 240, not the table's 448 (rocm.docs.amd.com, "Low precision floating point types").
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


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type != CPU.type:
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Return the accelerator's unused memory to the driver; nothing where it has not been used."""
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        torch.get_device_module(accelerator).empty_cache()
