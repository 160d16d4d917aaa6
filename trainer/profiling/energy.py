"""The energy that a GPU has used, read from its own counter."""

from __future__ import annotations

from contextlib import suppress

import torch


class EnergyMeter:
    """Counts the energy of an NVIDIA GPU (Volta or later) since ``start``; of other devices, None.

    The counter is of the whole board: the work of other processes on it is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle = None
        self._began_mj: int | None = None
        if device.type != "cuda" or torch.version.hip:
            return
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        with suppress(pynvml.NVMLError, AttributeError):  # no driver library here, or a part of a GPU (MIG)
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def start(self) -> None:
        """Count from here on."""
        self._began_mj = self._read()

    def joules(self) -> float | None:
        """Return the energy since ``start`` in joules; None where it is not measured."""
        now = self._read()
        return None if now is None or self._began_mj is None else (now - self._began_mj) / 1000

    def _read(self) -> int | None:
        if self._handle is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:  # before Volta
            return None
