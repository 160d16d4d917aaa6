"""Seconds and memory that an examination may spend; what does not fit is left out, and named."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from mantissa.display import size
from mantissa.errors import FormatError, UsageError, described, is_out_of_memory
from mantissa.formats import FP32
from mantissa.step.step import Step
from mantissa.step.trace import is_raised_here, is_raised_in_model, line_of_exception
from mantissa.tensors import synchronise

Result = TypeVar("Result")
Say = Callable[[str], None]
"""Hears the name of a part before it begins."""
_FASTEST = 16
"""How many times as fast as in fp32 a GPU multiplies in TF32 or 16 bits, at most: A100 312 to 19.5 TFLOP/s."""


class LeftOutError(Exception):
    """A part of an examination does not fit; the message says why."""


class Budget:
    """Runs the parts of an examination for which there is time and memory.

    Args:
        seconds: for all parts.
        step: which says how much memory is left, and how more time is given.
        say: hears the name of every part before it is run.
        step_seconds: duration of the step.
        step_bytes: memory that the step takes.
    """

    def __init__(
        self,
        seconds: float,
        step: Step,
        say: Say = lambda name: None,
        step_seconds: float = 0.0,
        step_bytes: int = 0,
    ):
        self.seconds, self.step_seconds, self.step_bytes = seconds, step_seconds, step_bytes
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
        self._leave_out(part, self._no_time)
        return False

    def _leave_out(self, part: str, why: str) -> None:
        if (out := f"{part} ({why})") not in self.left_out:  # of a part that is run again, such as for each cure
            self.left_out.append(out)

    def run(self, part: str, make: Callable[[], Result], always: bool = False) -> Result | None:
        """Return what a part makes; None where it is left out, or fails.

        A part that this model cannot do is left out; one that fails for any other reason is a crash, and kept.

        Args:
            part: its name.
            make: the part.
            always: whether it is run whatever is left; it raises where memory runs out.
        """
        if not always and not self.goes_on(part):
            return None
        self._say(part)
        began = time.monotonic()
        try:
            result = make()
            synchronise(self._step.device)  # what it has queued belongs to it, with its time and its errors
            return result
        except Exception as error:
            if is_out_of_memory(error):
                if always:
                    raise
                self._leave_out(part, "out of memory")
            elif cannot_compute(error):
                known = isinstance(error, FormatError | UsageError | LeftOutError)
                self._leave_out(part, str(error) if known else described(error))
            else:
                self.crashes[part] = traceback.format_exc()
            return None
        finally:
            self.spent[part] = self.spent.get(part, 0.0) + time.monotonic() - began

    def expect(self, seconds: float = 0, steps_in_memory: float = 0) -> None:
        """Say what a part needs, before it begins.

        Args:
            seconds: time that it takes.
            steps_in_memory: memory that it takes, in those of the step.

        Raises:
            LeftOutError: there is not so much.
        """
        needed, free = steps_in_memory * self.step_bytes, self._step.free_bytes()
        if needed > free:
            raise LeftOutError(f"it needs about {size(needed)}, {size(free)} are free")
        if seconds and seconds > self.left():
            enough = self._step.remedies.time_budget.format(self.seconds + seconds)
            raise LeftOutError(f"it takes about {seconds:.0f} s; set {enough}")

    @property
    def fp64_seconds(self) -> float:
        """How long the step takes in fp64, about."""
        # What was done for the first time in fp32, such as loading kernels, is no time of fp64's.
        most = self.step_seconds * (1 if self._step.format.number is FP32 else _FASTEST)
        return min(self.spent.get(FP32.name, most), most) * self._step.fp64_slowdown

    @property
    def _no_time(self) -> str:
        return f"no time left; set more than {self._step.remedies.time_budget.format(self.seconds)}"


def cannot_compute(error: Exception) -> bool:
    """Return whether a model cannot be computed so: torch or the model's own code raises it, not this library's."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, FormatError | UsageError | LeftOutError):
        return True
    if isinstance(error, RuntimeError):
        return line_of_exception(error) is not None or not is_raised_here(error)
    return is_raised_in_model(error)
