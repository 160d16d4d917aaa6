"""Vendor peak throughput of matmuls, by GPU."""

from __future__ import annotations

import re

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
