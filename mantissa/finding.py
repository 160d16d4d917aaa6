"""What the doctor reports: one finding for each fault, and notes for what is unusual and harmless."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Kinds of faults.
OVERFLOW = "overflow"
"""A finite reference is beyond the largest number of the format."""
UNDERFLOW = "underflow"
"""The reference is not 0, and the format's result is."""
DOMAIN = "domain"
"""The result is not finite in the reference either: 0/0, log(0), a row of -inf."""
NOT_FINITE = "not finite"
"""It is not finite, and no operator that torch runs made it so: code outside of torch did."""
INPUT = "input"
"""A weight, a buffer or the data is not finite before the step."""
ERROR = "error"
"""More rounding error than the format makes unavoidable."""
DTYPE = "dtype"
"""What was to be fp32 is in 16 bits."""
SCALE = "scale"
"""No loss scale holds all gradients."""
LOST = "lost updates"
"""The optimizer's updates are rounded away."""
MOMENT = "second moment"
"""The optimizer's second moment is 0 where the gradient is not."""
DIFFERENCE = "difference"
"""A compiled model computes other numbers than the eager one."""
DIVERGENCE = "divergence"
"""The loss leaves the spread of the reference within a few steps."""

FORWARD, BACKWARD, UPDATE, EXCHANGE = "forward", "backward", "update", "exchange"


@dataclass
class Finding:
    """One fault: where it is, what it is, and from which format on it occurs."""

    kind: str
    direction: str
    module: str
    """The submodule's name, or the parameter's; an empty string: the model itself, or the loss."""
    format: str
    """The first one of the format sweep that shows it, such as ``fp16+scaler``."""
    op: str = ""
    """The operator, such as ``aten.mm``."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of the operator's result."""
    detail: str = ""
    """The measured numbers, in words."""
    path: list[str] = field(default_factory=list)
    """From the fault to what it harms."""
    cure: list[str] = field(default_factory=list)
    """What to set, the cheapest first."""

    @property
    def place(self) -> str:
        """The module, in words where that is none."""
        return self.module or "(the model itself, or the loss)"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; ``rung`` is the format."""
        facts = asdict(self) | {"shape": list(self.shape)}
        return facts | {"rung": facts.pop("format")}

    @property
    def result(self) -> str:
        """The operator with its result's dtype and shape: ``aten.mm float16 [64, 64]``."""
        return " ".join(filter(None, [self.op, self.dtype, str(list(self.shape)) if self.shape else ""]))

    def lines(self) -> list[str]:
        """Return the finding as text for a terminal, two spaces before all lines but the first."""
        lines = [f"FOUND {self.kind}, {self.direction}: {self.place}"]
        if self.result or self.detail:
            lines.append("  " + ": ".join(filter(None, [self.result, self.detail])))
        if self.path:
            lines.append("  → " + " → ".join(self.path))
        return lines + [f"  {cure}" for cure in self.cure]
