"""Format numbers and tables for the terminal and for reports."""

from __future__ import annotations

import math
from collections.abc import Sequence


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON can hold them: None in the place of infinity and NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def loss(value: float | None) -> str:
    """Return a loss or another score: four decimals, or three significant digits of a small one; ``not finite``."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if 0.01 <= abs(value) < 1e9 or value == 0 else f"{value:.3g}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equal length as lines of aligned columns, the first row a heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def quantity(value: float) -> str:
    """Return a number with three significant digits and k, M, B or T: ``12.3k``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if suffix != 'k' else 1e3):.3g}{suffix}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def about(value: float) -> str:
    """Return a number with two significant digits, like ``quantity``: ``27``, ``120``, ``1.5``."""
    return quantity(float(f"{value:.2g}"))


def duration(seconds: float) -> str:
    """Return ``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def dtype_name(dtype: object) -> str:
    """Return the name of a torch dtype without the module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``2,000 steps``, ``3 batches``."""
    plural = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{plural}"


def listed(names: Sequence[str], kind: str = "parameter") -> str:
    """Return how many there are, and the names of the first: ``4 parameters (a, b, c, …)``."""
    return f"{counted(len(names), kind)} ({shortened(names, 3)})"


def shortened(names: Sequence[str], most: int = 10) -> str:
    """Return the first names: ``a, b, c, …``."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def dimensions(shape: Sequence[int]) -> str:
    """Return the shape of a tensor: ``768 × 3072``, or ``a number``."""
    return " × ".join(map(str, shape)) or "a number"


def size(count: float) -> str:
    """Return a number of bytes in binary units: ``154.8 MiB``."""
    for suffix in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {suffix}" if suffix != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.2f} GiB"


def mebibytes(count: float) -> str:
    """Return a number of bytes in MiB, without the unit: three significant digits or more, ``0.0381`` or ``5,000``."""
    amount = count / 2**20
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:,.1f}" if amount >= 10 else f"{amount:.3g}"
