"""What is found in a step: one finding for each fault; what is unusual and harmless is a note."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mantissa.step.trace import Op, Site, Trace

if TYPE_CHECKING:
    from mantissa.step.batch import Batch
    from mantissa.step.step import Step

MEANINGS: dict[str, str] = {}
"""The kinds of faults, and what they mean."""


def kind(name: str, meaning: str) -> str:
    """Make a kind of fault known, and return its name."""
    MEANINGS[name] = meaning
    return name


OVERFLOW = kind("overflow", "A number is larger than the format can hold, so it becomes infinite.")
UNDERFLOW = kind("underflow", "Numbers are smaller than the format can hold, so they become 0.")
DOMAIN = kind("domain", "An operation has no finite result, such as 0/0, log(0) or a softmax over nothing.")
NOT_FINITE = kind("not finite", "A result is not finite, and no torch operator made it so: code outside of torch did.")
INPUT = kind("input", "A weight, a buffer or the data is not finite before the step, far too large, or rounded away.")
ERROR = kind("error", "The result has more rounding error than the format makes unavoidable.")
DTYPE = kind("dtype", "Something that should be computed or stored in fp32 is in 16 bits.")
SCALE = kind(
    "scale", "The loss or its gradients are multiplied by a number that does not fit the format or the optimizer."
)
LOST = kind("lost updates", "Weight updates are too small for the format of the weights, and are rounded away.")
MOMENT = kind("optimizer state", "What the optimizer kept of earlier steps spoils this one.")
DIFFERENCE = kind("difference", "The compiled model gives other results than the eager one.")
EXCEPTION = kind("exception", "The step cannot be computed in this format.")
RATE = kind("learning rate", "The updates are too large: fp32 goes wrong as well, and learns at a lower rate.")
NO_PROGRESS = kind(
    "no progress", "The recorded loss of the run did not fall, or rose again, and no other cause was found."
)
DIVERGENCE = kind("divergence", "Within a few steps, the loss leaves the spread of the reference.")
CRASH = kind("crash", "A check of the examination failed: the traceback is in the report.")

UPDATE, EXAMINATION = "update", "examination"
"""Where a fault is, besides forward and backward."""


@dataclass(frozen=True)
class Cure:
    """What a person can change, and the step with that changed."""

    text: str
    """What to do, in the words of the loop that the step is from."""
    step: Step
    at: dict[str, Any] = field(default_factory=dict)
    """Fields of a finding that say where the cure changes something: there a fault is that shows nowhere else."""
    data: Callable[[Batch], Batch] | None = None
    """What it changes of every batch; None: nothing."""
    results: Callable[[Op], None] | None = None
    """What it changes of the results of operators; None: nothing."""
    about: str = ""
    """What it costs, and what of it was not tried."""

    def applied(self) -> AbstractContextManager[Any]:
        """Return what a step is taken in, with the results of operators as it changes them."""
        return nullcontext() if self.results is None else Trace(None, self.results)

    def of(self, steps: list[list[Batch]]) -> list[list[Batch]]:
        """Return the microbatches of some steps as it changes them."""
        return steps if self.data is None else [list(map(self.data, microbatches)) for microbatches in steps]

    def __str__(self) -> str:
        return self.text + (f"  ({self.about})" if self.about else "")


@dataclass(frozen=True)
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
    """Shape of the operator's result."""
    detail: str = ""
    """The measured numbers, in words."""
    path: tuple[str, ...] = ()
    """Modules and operators from the fault to the output that it spoils."""
    cure: tuple[str, ...] = ()
    """What to change, the cheapest first; a diagnosis has tried it."""
    tensor: str = ""
    """The weight, the buffer, or the batch's tensor and sample that is at fault; empty: none is."""
    line: str = ""
    """Line of the forward code: file, number and text; empty: it is not known."""
    candidates: tuple[Cure, ...] = field(default=(), repr=False, compare=False)
    """What may cure it, the cheapest first. The first that holds becomes a ``cure`` of the diagnosis's finding."""

    @classmethod
    def at(cls, site: Site, kind: str, format: str, **fields: Any) -> Finding:
        """Return a fault at an operator; ``fields`` say otherwise."""
        return cls(**{"kind": kind, "format": format} | site._asdict() | fields)

    @property
    def place(self) -> str:
        """The tensor or the module at fault, in words where that is none."""
        return self.tensor or self.module or "(the model itself, or the loss)"

    @property
    def key(self) -> tuple[str, str]:
        """What a fault is known by: a check that no longer reports it of a changed step has lost it."""
        return self.kind, self.place

    @property
    def parts(self) -> list[str]:
        """What it is and where; then, as far as they are known, the operator's result and the numbers."""
        result = " ".join(filter(None, [self.op, self.dtype, str(list(self.shape)) if self.shape else ""]))
        numbers = ": ".join(filter(None, [result, self.detail]))
        return list(filter(None, [f"{self.kind}, {self.direction}: {self.place}", numbers]))

    def lines(self) -> list[str]:
        """Return the finding as text for a terminal, two spaces before all lines but the first."""
        fault, *numbers = self.parts
        lines = [f"FOUND {fault}", *(f"  {part}" for part in numbers)]
        if self.line:
            lines.append(f"  at {self.line}")
        if self.path:
            lines.append("  → " + " → ".join(self.path))
        return lines + [f"  {'or' if number else 'cure:'} {cure}" for number, cure in enumerate(self.cure)]


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What a check says of a step."""

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """What could not be examined, with the reason."""
    rows: tuple[Any, ...] = ()
    """What was measured, for a table."""
    again: Again | None = field(default=None, repr=False, compare=False)
    """The same check of another step, beside what this one was compared with; None: the check itself."""


Again = Callable[["Step"], Examined]
"""A check, of another step."""
