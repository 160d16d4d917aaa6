"""The ``debug`` config group: short runs that find mistakes before a long one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.errors import RunError, check_range


@dataclass
class Debug:
    """The ``debug`` config group; this base is ``debug=none``, and ``fast``, whose YAML sets the sizes."""

    kind: ClassVar[str] = "none"

    def check(self, first: float, last: float, steps: int) -> str | None:
        """Check the result of a complete run, and return the verdict if there is one.

        Args:
            first: loss of the first step, over all ranks.
            last: loss of the last step.
            steps: optimizer steps done.

        Raises:
            RunError: the run did not do what this choice expects.
        """
        return None


@dataclass
class Overfit(Debug):
    """``debug=overfit``: its YAML repeats the first batch, which any correct model and loss can learn."""

    kind: ClassVar[str] = "overfit"
    target: float = 0.2
    """The last loss must be at most this fraction of the first."""

    def __post_init__(self) -> None:
        check_range("debug.target", self.target, "(0, 1)")

    def check(self, first: float, last: float, steps: int) -> str | None:
        if not last <= self.target * first:
            raise RunError(
                f"debug=overfit: after {steps} steps on one batch the loss is {last:.4g}, down from {first:.4g} at "
                f"the first step; expected at most {self.target * first:.4g} (debug.target={self.target}). Try more "
                "steps= or another optimizer.lr=; if neither helps, check the labels, the loss and what is trained",
                shared=True,
            )
        return f"debug=overfit: passed, the loss of one batch fell from {first:.4g} to {last:.4g} in {steps} steps"
