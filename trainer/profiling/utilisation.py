"""MFU, model FLOPs utilisation: the share of the device's matmul throughput that a run needs for its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mantissa.display import quantity


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
    """That train together."""

    def mfu(self, units_per_s: float | None) -> float | None:
        """Return the share of the measured rate that a throughput (of all ranks) needs: 0 to about 1."""
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


def text(facts: dict[str, Any], processes: int) -> str | None:
    """Return the row of the summary table: ``41.3 % of 0.0892 TFLOP/s measured here in fp32 matmuls``."""
    if facts["unknown"]:
        return f"not known: {facts['unknown']}"
    if facts["mfu"] is None:
        return None
    each = " of each process" if processes > 1 else ""
    rate = f"{quantity(facts['measured_tflops'])} TFLOP/s{each} measured here in {facts['format']} matmuls"
    row = f"{_percent(facts['mfu'])} of {rate}"
    if facts["mfu_of_data_sheet"] is not None:
        row += f"; {_percent(facts['mfu_of_data_sheet'])} of the data sheet's {quantity(facts['data_sheet_tflops'])}"
    return row


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.01 else f"{100 * share:.1f} %"
