"""The format sweep: the same step in one format after another, from fp64 to that of the run, and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from mantissa.errors import FormatError, described, is_out_of_memory
from mantissa.formats import BF16, plain
from mantissa.formats import FP32 as FP32_NUMBERS
from mantissa.formats import TF32 as TF32_NUMBERS
from mantissa.step.step import Replay, Step

OK, BREAKS, RAISES, DIFFERS, LEFT_OUT = "ok", "BREAKS", "RAISES", "DIFFERS", "left out"

FP64, FP32, TF32 = "fp64", "fp32", "tf32"
SCALER = "+scaler"
DIFFERENT = 0.01
"""Share of the loss from which on those of two formats differ: they are shown then, and one is no cure of the other."""


@dataclass
class FormatTrial:
    """One format of the sweep, and whether the step is finite in it."""

    name: str
    build: Callable[[], Replay] | None = None
    """Returns the replay; None: it is the step, compiled, which ``compiled_trial`` takes."""
    scales: list[float] = field(default_factory=lambda: [1.0])
    """Loss scales to try in this order, until one is finite."""
    status: str = ""
    nonfinite: list[str] = field(default_factory=list)
    scale: float = 1.0
    """The last one tried."""
    why: str = ""
    """Reason why it was left out, or the error that it raised."""
    loss: float = math.nan

    def take(self) -> Replay | None:
        """Take the step, and return the passes that did; None: they cannot be built. Sets ``status``."""
        assert self.build is not None
        passes = None
        try:
            passes = self.build()
            found = passes.run_with_backoff(self.scales)
        except Exception as error:  # of many kinds: the model and the format decide
            if is_out_of_memory(error):
                raise
            self.why = described(error)
            self.status = LEFT_OUT if isinstance(error, FormatError) else RAISES
            return passes
        self.nonfinite, self.scale, self.loss = found.nonfinite, passes.scale, found.loss.item()
        self.status = BREAKS if self.nonfinite else OK
        return passes

    def text(self, with_loss: bool = False) -> str:
        """Return the format with its status, such as ``fp16+scaler 65536 ok at 8192``, and maybe its loss."""
        if self.status == LEFT_OUT:
            return f"{self.name} {self.why}"
        name = f"{self.name} {self.scales[0]:.10g}" if self.name.endswith(SCALER) else self.name
        lower = f" at {self.scale:.10g}" if self.status == OK and self.scale != self.scales[0] else ""
        loss = f" (loss {self.loss:.4g})" if with_loss and self.status == OK else ""
        return f"{name} {self.status}{lower}{loss}"


def format_sweep(step: Step) -> list[FormatTrial]:
    """Return the formats to try, without the compiled ones.

    They are those up to the run's own, on fp32 weights; then, where it is another, what the run does: its own stored
    weights, its fp32 modules and operators.
    """
    number, own = step.format.number, step.format.name
    fp32, tf32 = plain(FP32_NUMBERS), plain(TF32_NUMBERS)
    trials = [FormatTrial(FP64, partial(step.reference, torch.float64)), FormatTrial(FP32, partial(step.replay, fp32))]
    if step.available(tf32) and own != FP32:
        trials.append(FormatTrial(TF32, partial(step.replay, tf32)))
    if step.format.half is None:
        return trials
    if number is not BF16 and step.available(plain(BF16)):
        trials.append(FormatTrial(BF16.name, partial(step.replay, plain(BF16))))
    basic = plain(number)
    trials.append(FormatTrial(basic.name, partial(step.replay, basic)))
    if step.scales != [1.0]:
        trials.append(FormatTrial(basic.name + SCALER, partial(step.replay, basic), step.scales))
    if step.format is not basic:
        trials.append(FormatTrial(own, step.as_run, step.scales))
    return trials
