"""The energy that a GPU has used, read from its own counter."""

from __future__ import annotations

from contextlib import suppress

import torch

from trainer.devices import kind_of


class EnergyMeter:
    """Counts the energy of an NVIDIA GPU (Volta or later) since ``begin``; of other devices, None.

    The counter is of the whole board: the work of other processes on it is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle = None
        self._began_mj: int | None = None
        self._units = 0
        if not kind_of(device).nvidia:
            return
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        with suppress(pynvml.NVMLError, AttributeError):  # no driver library here, or a part of a GPU (MIG)
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def begin(self, units: int) -> None:
        """Count from here on, after ``units`` units of training; later calls do nothing."""
        if self._began_mj is None:
            self._began_mj, self._units = self._read(), units

    def used(self, units: int) -> tuple[float, int] | tuple[None, None]:
        """Return the joules and the units since ``begin``, after ``units`` in all; None where it is not measured."""
        now = self._read()
        if now is None or self._began_mj is None:
            return None, None
        return (now - self._began_mj) / 1000, units - self._units

    def _read(self) -> int | None:
        if self._handle is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:  # before Volta
            return None
