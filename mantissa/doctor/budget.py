"""Seconds and memory that an examination may spend; what does not fit is left out, and named."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from mantissa.display import size
from mantissa.errors import FormatError, UsageError, described, is_out_of_memory
from mantissa.step.step import Step
from mantissa.step.trace import is_raised_here, is_raised_in_model, line_of_exception

Result = TypeVar("Result")


class Budget:
    """Runs the parts of an examination for which there is time and memory.

    Args:
        seconds: for all parts.
        step: which says how much memory is left, and how more time is given.
        say: hears the name of every part before it is run.
    """

    def __init__(self, seconds: float, step: Step, say: Callable[[str], None] = lambda name: None):
        self.seconds = seconds
        self.left_out: list[str] = []
        """Parts that were not run to their end, each with the reason."""
        self.crashes: dict[str, str] = {}
        """Traceback of each part that crashed, by its name."""
        self.spent: dict[str, float] = {}
        """Seconds by part."""
        self._step = step
        self._say = say
        self._began = time.monotonic()

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.seconds - (time.monotonic() - self._began)

    def goes_on(self, part: str) -> bool:
        """Return whether there is time for more of a part; it is left out from here on where there is not."""
        if self.left() > 0:
            return True
        if (out := f"{part} ({self._no_time})") not in self.left_out:
            self.left_out.append(out)
        return False

    def run(
        self, part: str, make: Callable[[], Result], memory_bytes: float = 0, seconds: float = 0, always: bool = False
    ) -> Result | None:
        """Return what a part makes; None where it is left out, or fails.

        A part that this model cannot do is left out; one that fails for any other reason is a crash, and kept.

        Args:
            part: its name.
            make: the part.
            memory_bytes: memory that it needs.
            seconds: time that it takes.
            always: whether it is run whatever is left; it raises where memory runs out.
        """
        if not always and (why := self._lacks(memory_bytes, seconds)):
            self.left_out.append(f"{part} ({why})")
            return None
        self._say(part)
        began = time.monotonic()
        try:
            return make()
        except Exception as error:
            if is_out_of_memory(error):
                if always:
                    raise
                self.left_out.append(f"{part} (out of memory)")
            elif _is_the_models(error):
                known = isinstance(error, FormatError | UsageError)
                self.left_out.append(f"{part} ({error if known else described(error)})")
            else:
                self.crashes[part] = traceback.format_exc()
            return None
        finally:
            self.spent[part] = self.spent.get(part, 0.0) + time.monotonic() - began

    @property
    def _no_time(self) -> str:
        return f"no time left; set more than {self._step.remedies.time_budget.format(self.seconds)}"

    def _lacks(self, memory_bytes: float, seconds: float) -> str:
        """Return why there is no time or no memory for a part; an empty string: there is."""
        if memory_bytes > (free := self._step.free_bytes()):
            return f"it needs about {size(memory_bytes)}, {size(free)} are free"
        left = self.left()
        if left <= 0:
            return self._no_time
        if seconds > left:
            enough = self._step.remedies.time_budget.format(self.seconds + seconds)
            return f"it takes about {seconds:.0f} s; set {enough}"
        return ""


def _is_the_models(error: Exception) -> bool:
    """Return whether a model cannot be computed so: torch or the model's own code raises it, not this library's."""
    if isinstance(error, FormatError | UsageError):
        return True
    if isinstance(error, RuntimeError):
        return line_of_exception(error) is not None or not is_raised_here(error)
    return is_raised_in_model(error)
