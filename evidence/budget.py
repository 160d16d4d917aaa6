"""A budget of time: work is begun while it is expected to fit, and the next call continues."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.errors import UserError

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_SAFETY = 1.15
"""Work may take this much longer than expected."""
_SHORTEST_S = 20.0
"""With less time than this, work of unknown length is not begun."""


class OutOfTime(Exception):
    """What would come next does not fit in the time left."""

    def __init__(self, needed_s: float | None) -> None:
        super().__init__(needed_s)
        self.needed_s = needed_s
        """Seconds for all that is left of the work; None: not known."""


def seconds_of(text: str) -> float:
    """Return the seconds that ``90s``, ``25min`` or ``1.5h`` means.

    Raises:
        UserError: no unit, another unit, or no positive number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text.strip())
    if match and (seconds := float(match[1]) * _UNITS[match[2]]) > 0:
        return seconds
    raise UserError(f"budget={text} is not a time: set budget=25min, or with another unit budget=90s, budget=1.5h")


@dataclass
class Budget:
    """Seconds from now on, and what of them is left."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.seconds

    def left(self) -> float:
        """Return the seconds left."""
        return max(0.0, self._end - self.clock())

    def fits(self, seconds: float | None) -> bool:
        """Return whether work may begin that is expected to take so long; None: not known."""
        return self.left() >= (_SHORTEST_S if seconds is None else seconds * _SAFETY)
