"""Compares two runs: the trace of every step, every tensor of the last checkpoint, every logged number."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evidence.certificate.child import TRACE_FILE
from trainer.checkpoint.reader import load
from trainer.files import METRICS_FILE, read_json_lines

_CLOCKS = ("time", "step_time_s", "mfu", "memory_bytes", "checkpoint_stall_s")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Differences:
    """What was compared between an uninterrupted run and a killed one, and what differs."""

    tensors: int
    elements: int
    steps: int
    repeated_steps: int
    """Steps that were trained more than once, because a kill came before they were saved."""
    metric_lines: int
    ulp: float
    """The largest distance of two numbers in units in the last place; infinite for integers, shapes and NaNs."""
    first_step: int | None
    """The first step whose trace differs."""
    differences: list[str]
    """What differs: the trace first, then tensors, the largest distance first."""

    def judge(self, max_ulp: float) -> tuple[str, int]:
        """Return the verdict, and the exit code of scripts/certify.py: 0 BITWISE, 5 ``ULP <= k``, 6 DIVERGED.

        Up to ``max_ulp`` units in the last place are rounding, if no step's trace differs.
        """
        if not self.differences:
            return "BITWISE", 0
        if self.first_step is None and self.ulp <= max_ulp:
            return f"ULP <= {self.ulp:g}", 5
        where = f"AT step {self.first_step}" if self.first_step is not None else f"IN {self.differences[0]}"
        return f"DIVERGED {where}", 6


def differences_between(whole: Path, killed: Path, last_step: int) -> Differences:
    """Compare the folders of the uninterrupted and the killed run, with their checkpoints of ``last_step``."""
    expected = {line["step"]: line for line in trace(whole) if "step" in line}
    trained = [line for line in trace(killed) if "step" in line]
    wrong = _wrong_steps(expected, trained)
    one, other = load(whole / "checkpoints", last_step), load(killed / "checkpoints", last_step)
    tensors, others = one.tensors(), other.tensors()
    distances = {
        name: ulps(tensors[name], others[name]) if name in tensors and name in others else math.inf
        for name in tensors.keys() | others.keys()
    }
    farthest = sorted((name for name in distances if distances[name]), key=lambda name: (-distances[name], name))
    names = one.progress.keys() | other.progress.keys()
    unlike = [f"progress: {name}" for name in names if one.progress.get(name) != other.progress.get(name)]
    before, after = metrics(whole), metrics(killed)
    if before != after:
        lines = (number for number, pair in enumerate(zip(before, after, strict=False), 1) if pair[0] != pair[1])
        unlike.append(f"{METRICS_FILE}, line {next(lines, min(len(before), len(after)) + 1)}")
    return Differences(
        tensors=len(distances),
        elements=sum(tensor.numel() for tensor in tensors.values()),
        steps=len(expected),
        repeated_steps=len(trained) - len({line["step"] for line in trained}),
        metric_lines=len(before),
        ulp=math.inf if unlike else max(distances.values(), default=0.0),
        first_step=min(wrong, default=None),
        differences=[
            *(wrong[step] for step in sorted(wrong)),
            *(f"tensor {name} ({distances[name]:g} ulp)" for name in farthest),
            *unlike,
        ],
    )


def _wrong_steps(expected: dict[int, dict[str, Any]], trained: list[dict[str, Any]]) -> dict[int, str]:
    """Return what differs, by step. A step that was trained several times has to be the same every time."""
    wrong = {step: f"step {step} was never trained" for step in expected.keys() - {line["step"] for line in trained}}
    for line in trained:
        step = line["step"]
        if differing := [key for key in line if line[key] != expected.get(step, {}).get(key)]:
            wrong.setdefault(step, f"step {step}: {', '.join(differing)}")
    return wrong


def trace(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a trace, without incomplete ones (after a kill)."""
    lines = []
    for line in (run / TRACE_FILE).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metric log without times and memory, which differ between equal runs."""
    return [
        {key: value for key, value in line.items() if key not in _CLOCKS and not key.endswith("_per_s")}
        for line in read_json_lines(run / METRICS_FILE)
    ]


def ulps(one: Tensor, other: Tensor) -> float:
    """Return the largest distance between two tensors in units in the last place; 0: the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return math.inf
    if torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)):
        return 0.0
    if not one.is_floating_point() or not bool((torch.isfinite(one) & torch.isfinite(other)).all()):
        return math.inf
    distance = (_ordered(one) - _ordered(other)).abs().max()
    return max(1.0, float(distance))  # at least 1, since +0 and -0 differ in bits


def _ordered(tensor: Tensor) -> Tensor:
    """Map floating-point numbers to integers of the same order; neighbours differ by 1."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).to(torch.int64)
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
