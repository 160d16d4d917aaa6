"""The ladder: the same step in one format after another, from fp64 to that of the run, and compiled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from evidence.doctor.step.case import Case, CaseTrainer, Reference
from trainer.hardware import UNAVAILABLE
from trainer.precision.modes import Precision
from trainer.trainer import Gradients

OK, BREAKS, DIFFERS, LEFT_OUT = "ok", "BREAKS", "DIFFERS", "left out"

FP64, FP32, TF32 = "fp64", "fp32", "tf32"
SCALER = "+scaler"


@dataclass
class Rung:
    """One format, and whether the step is finite in it."""

    name: str
    build: Callable[[], CaseTrainer]
    scales: tuple[float, ...] = (1.0,)
    """Loss scales to try in this order, until one is finite."""
    status: str = ""
    harmed: list[str] | None = None
    scale: float = 1.0
    """The last one tried."""
    why: str = ""
    """It was left out."""
    loss: float = math.nan
    seconds: float = 0.0

    def climb(self) -> CaseTrainer:
        """Take the step, and return the trainer that did; sets ``status``."""
        trainer = self.build()
        began = time.monotonic()
        self.scale, self.harmed, found = attempt(trainer, self.scales)
        self.loss = found.loss.item()
        self.status = BREAKS if self.harmed else OK
        self.seconds = time.monotonic() - began
        return trainer

    def text(self) -> str:
        """Return the rung with its status, such as ``fp16+scaler 65536 ok at 8192``."""
        if self.status == LEFT_OUT:
            return f"{self.name} {self.why}"
        name = f"{self.name} {self.scales[0]:.10g}" if self.name.endswith(SCALER) else self.name
        lower = f" at {self.scale:.10g}" if self.status == OK and self.scale != self.scales[0] else ""
        return f"{name} {self.status}{lower}"


def attempt(trainer: CaseTrainer, scales: Sequence[float]) -> tuple[float, list[str], Gradients]:
    """Take the step with one loss scale after another until it is finite; return the last one and what it harmed."""
    for scale in scales:
        found = trainer.attempt(scale)
        harmed = trainer.harmed(found)
        if not harmed or "loss" in harmed:  # no scale mends a forward pass
            break
    return scale, harmed, found


def rungs(case: Case) -> list[Rung]:
    """Return the ladder of a case, without the compiled rungs.

    The formats are those up to the run's own, on fp32 weights; then, where it is another, what the run does: its own
    stored weights, its fp32 modules and operators.
    """
    own = case.config.precision
    half = own.format.number.name
    result = [Rung(FP64, lambda: Reference(case, torch.float64)), Rung(FP32, lambda: case.trainer(Precision()))]
    if case.hardware.support(TF32) != UNAVAILABLE and own.mode != FP32:
        result.append(Rung(TF32, lambda: case.trainer(Precision(mode=TF32))))
    if half in (FP32, TF32):
        return result
    if case.hardware.support("bf16") != UNAVAILABLE and half != "bf16":
        result.append(Rung("bf16", lambda: case.trainer(_plain(own, "bf16"))))
    basic = "bf16" if half == "fp8" else half
    result.append(Rung(basic, lambda: case.trainer(_plain(own, basic))))
    scales = loss_scales(case)
    if scales != (1.0,):
        result.append(Rung(basic + SCALER, lambda: case.trainer(_plain(own, basic)), scales))
    if own.mode != basic:
        result.append(Rung(own.mode, lambda: case.trainer(own, own=True), scales))
    return result


def _plain(own: Precision, mode: str) -> Precision:
    """Return autocast in this mode, with the run's fp32 modules and operators."""
    return replace(own, mode=mode, fp8_scaling=None)


def loss_scales(case: Case) -> tuple[float, ...]:
    """Return the run's loss scale, and those that a dynamic scaler would back off to."""
    scaler = case.config.scaler.build(case.config.precision.format, torch.device("cpu"))
    floor = case.config.scaler.floor
    scales = [case.scale]
    if scaler.recovers and floor:
        while scales[-1] / 2 >= floor:
            scales.append(scales[-1] / 2)
    return tuple(scales)
