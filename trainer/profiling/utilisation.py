"""MFU, model FLOPs utilisation: the share of the device's matmul throughput that a run needs for its model.

The throughput is the measured one, and the vendor's peak by data sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SHEETS: dict[str, dict[str, float]] = {
    r"B200": {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500},
    r"H200 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5},
    r"H200": {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979},
    r"H100 NVL": {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5},
    r"H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756.5, "fp16": 756.5, "fp8": 1513},
    r"H100 80GB HBM3": {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979},
    r"A100[- ](SXM4-|PCIE-|80GB PCIe|40GB).*": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    r"L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733},
    r"L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5},
    r"(Tesla )?T4": {"fp32": 8.1, "fp16": 65},
    r"(Tesla )?V100-SXM2.*": {"fp32": 15.7, "fp16": 125},
    r"(Tesla )?V100-PCIE.*": {"fp32": 14, "fp16": 112},
    r"GeForce RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
    r"GeForce RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
}
"""10^12 FLOP/s of dense matrices, sums in fp32, by a pattern of the name that CUDA gives (without ``NVIDIA``).

NVIDIA's data sheets of the H100, H200, A100, L40S, L4, T4 and V100 Tensor Core GPUs; that of HGX B200, divided by its
eight GPUs; for the GeForce cards the whitepapers of the GA102 and Ada architectures. Rates that are stated for sparse
matrices only (H100, H200, L4, B200) are halved.
"""


def data_sheet(gpu: str, name: str) -> float | None:
    """Return the vendor's peak for matmuls in a number format, in 10^12 FLOP/s; None: not known.

    Args:
        gpu: its name, such as ``NVIDIA H100 80GB HBM3``. A part of one (MIG) is not known.
        name: of the format: fp32, tf32, bf16, fp16 or fp8.
    """
    short = gpu.removeprefix("NVIDIA ")
    for pattern, rates in SHEETS.items():
        if re.fullmatch(pattern, short) and "MIG" not in short:
            return rates.get(name)
    return None


@dataclass(frozen=True)
class Utilisation:
    """What turns a throughput into MFU.

    The model FLOPs of a unit (a token, an image) are counted in one forward pass over the first samples, forward and
    backward, without what is recomputed (``ModelFlops``). MFU is throughput × that number over the rate of the devices
    (Chowdhery et al., "PaLM", 2022, appendix B).
    """

    flops_per_unit: float | None = None
    """Model FLOP of one unit, forward and backward; None: not known."""
    unknown: str | None = None
    """Why it is not known."""
    format: str = "fp32"
    """The number format of the rates."""
    measured_tflops: float | None = None
    """Matmul throughput of one device as measured, in 10^12 FLOP/s."""
    data_sheet_tflops: float | None = None
    """The vendor's peak; None: not known."""
    devices: int = 1
    """Number of devices that train together."""

    def mfu(self, units_per_s: float | None) -> float | None:
        """Return the share of the measured rate that a throughput (of all ranks) needs.

        It is about 0 to 1; above 1 if the rate was measured on a busy machine.
        """
        return self._share(units_per_s, self.measured_tflops)

    def _share(self, units_per_s: float | None, tflops: float | None) -> float | None:
        if self.flops_per_unit is None or units_per_s is None or tflops is None:
            return None
        return units_per_s * self.flops_per_unit / (self.devices * tflops * 1e12)

    def facts(self, units_per_s: float | None) -> dict[str, Any]:
        """Return what summary.json holds."""
        return {
            "mfu": self.mfu(units_per_s),
            "mfu_of_data_sheet": self._share(units_per_s, self.data_sheet_tflops),
            "unknown": self.unknown,
            "model_flops_per_unit": self.flops_per_unit,
            "format": self.format,
            "measured_tflops": self.measured_tflops,
            "data_sheet_tflops": self.data_sheet_tflops,
        }


def text(facts: dict[str, Any]) -> str | None:
    """Return ``MFU 41.3 %``, of the rate that the start block shows, and of the data sheet's."""
    if facts["unknown"]:
        return f"MFU not known: {facts['unknown']}"
    if facts["mfu"] is None:
        return None
    sheet = facts["mfu_of_data_sheet"]
    return f"MFU {_percent(facts['mfu'])}{f' ({_percent(sheet)} of the data sheet)' if sheet is not None else ''}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.01 else f"{100 * share:.1f} %"
