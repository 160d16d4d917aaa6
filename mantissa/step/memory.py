"""How much memory this process could still allocate."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int:
    """Return how much more this process could allocate: what the device, the machine and its own limits leave."""
    if device.type not in ("cpu", "mps"):
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return torch.accelerator.get_memory_info(device)[0] + cached  # which torch would give out again
    # Of memory, the machine has this much, and the container or job may take that much.
    left = min([_machines_bytes(), *(limit - used for limit, used in control_groups())])
    # Limits of the process itself, as ulimit sets them.
    with suppress(ImportError, OSError):  # Linux; elsewhere these limits mean little
        import resource

        for limit, held in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                left = min(left, soft - held_bytes(held))
    return max(0, left)


def held_bytes(name: str) -> int:
    """Return one of Linux's figures about this process, such as ``VmData``, its private writable pages.

    Raises:
        OSError: not on Linux.
    """
    return _figure("/proc/self/status", name)


def _machines_bytes() -> int:
    with suppress(OSError):
        return _figure("/proc/meminfo", "MemAvailable")
    with suppress(ImportError):  # on other systems than Linux
        import psutil

        return int(psutil.virtual_memory().available)
    return sys.maxsize


def _figure(file: str, name: str) -> int:
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def control_groups(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """Return the limit of memory and what is used of it, in bytes, of each control group that this process is in.

    That is how Linux limits containers, services and batch jobs. File pages that can be dropped do not count as used.
    """
    groups = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, names = (mounted, _CGROUP_2) if not controllers else (mounted / "memory", _CGROUP_1)
            inner = root / path.lstrip("/")
            # A container may see only its own group, mounted at the root.
            for folder in dict.fromkeys([inner, *inner.parents, root]):
                if folder.is_relative_to(root):
                    with suppress(OSError, ValueError, StopIteration):  # no limit, or no such file at the root
                        groups.append(_limit_and_use(folder, *names))
    return groups


_CGROUP_2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _limit_and_use(folder: Path, limit: str, usage: str, droppable: str) -> tuple[int, int]:
    statistics = (folder / "memory.stat").read_text().splitlines()
    files = next(int(line.split()[1]) for line in statistics if line.startswith(f"{droppable} "))
    return int((folder / limit).read_text()), max(0, int((folder / usage).read_text()) - files)
