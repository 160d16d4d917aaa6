"""Replay two recorded runs side by side, and find the first operator whose results part.

``parting`` is called with the first step at which the logs differ; ``first_weights`` says what there is to say before
step 1, where no log does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.run_folder import RunFolder


@dataclass(frozen=True)
class Difference:
    """The size of a difference between two tensors."""

    relative: float
    """L2 norm of the difference over that of run b's tensor, in fp64; NaN: that is 0."""
    largest: float
    """Largest absolute difference of two elements."""
    formats: str = ""
    """``bfloat16 against float32``; empty: both are in one dtype."""


@dataclass(frozen=True)
class Parting:
    """The first results of two replays that differ."""

    step: int
    """Number of the step, from 1: the one that parts, or the last one that was replayed where none does."""
    stage: str = ""
    """``data``, ``weights``, ``optimizer state``, ``forward``, ``backward``, ``gradients`` or ``update``; empty: no
    replayed step parts."""
    name: str = ""
    """Module of an operator, or the name of a tensor of the batch, the weights, the state or the gradients."""
    op: str = ""
    """Operator, such as ``aten.addmm``; empty: outside of the forward and the backward pass."""
    difference: Difference | None = None
    """Size of the difference; None: there is none, or it is not one of numbers."""
    notes: list[str] = field(default_factory=list)
    """What was replayed and how, a line each."""

    def lines(self) -> list[str]:
        """Return what is printed."""
        return self.notes


def parting(a: RunFolder, b: RunFolder, step: int) -> Parting | str:
    """Replay two runs from their last equal state up to a step, and name what parts first.

    Nothing is written, and the process computes afterwards as it did before.

    Args:
        a: the first run.
        b: the second run.
        step: number of the first step at which their logs differ, from 1.

    Returns:
        What parts first; or a sentence that says why the runs cannot be replayed here.
    """
    return "the runs are not replayed"


def first_weights(a: RunFolder, b: RunFolder) -> Parting | str:
    """Compare the weights that two runs begin with, built anew from their records.

    Returns:
        ``Parting`` of step 1 whose ``stage`` is ``weights``, or empty where all are equal bit for bit; or a sentence
        that says why they cannot be built here.
    """
    return "the first weights are not compared"
