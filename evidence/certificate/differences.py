"""Compares two runs: the trace of every step, every tensor of the last checkpoint, every logged number."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evidence.certificate.child import TRACE_FILE
from trainer.checkpoint.reader import load
from trainer.files import METRICS_FILE, read_json_lines

_CLOCKS = ("time", "step_time_s", "mfu", "memory_bytes", "checkpoint_stall_s")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Differences:
    """What was compared between an uninterrupted run and a killed one, and what differs."""

    tensors: int = 0
    elements: int = 0
    steps: int = 0
    repeated_steps: int = 0
    """Steps that were trained more than once, because a kill came before they were saved."""
    metric_lines: int = 0
    ulp: float = 0
    """The largest distance of two numbers in units in the last place; infinite for integers, shapes and NaNs."""
    first_step: int | None = None
    """The first step whose trace differs."""
    differences: list[str] = field(default_factory=list)
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
    result = Differences()
    _compare_traces(trace(whole), trace(killed), result)
    one, other = load(whole / "checkpoints", last_step), load(killed / "checkpoints", last_step)
    _compare_tensors(one.tensors(), other.tensors(), result)
    for name in one.progress.keys() | other.progress.keys():
        if one.progress.get(name) != other.progress.get(name):
            result.differences.append(f"progress: {name}")
            result.ulp = float("inf")
    before, after = metrics(whole), metrics(killed)
    result.metric_lines = len(before)
    if before != after:
        lines = (number for number, pair in enumerate(zip(before, after, strict=False), 1) if pair[0] != pair[1])
        line = next(lines, min(len(before), len(after)) + 1)
        result.differences.append(f"{METRICS_FILE}, line {line}")
        result.ulp = float("inf")
    return result


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
        return float("inf")
    if torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)):
        return 0.0
    if not one.is_floating_point() or not bool((torch.isfinite(one) & torch.isfinite(other)).all()):
        return float("inf")
    distance = (_ordered(one) - _ordered(other)).abs().max()
    return max(1.0, float(distance))  # at least 1, since +0 and -0 differ in bits


def _ordered(tensor: Tensor) -> Tensor:
    """Map floating-point numbers to integers of the same order; neighbours differ by 1."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).to(torch.int64)
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def _compare_traces(whole: list[dict[str, Any]], killed: list[dict[str, Any]], result: Differences) -> None:
    expected = {line["step"]: line for line in whole if "step" in line}
    result.steps = len(expected)
    seen: set[int] = set()
    wrong: dict[int, str] = {}
    for line in killed:
        if "step" not in line:
            continue
        step = line["step"]
        result.repeated_steps += step in seen  # and every time it has to be the same
        seen.add(step)
        differing = [key for key in line if line[key] != expected.get(step, {}).get(key)]
        if differing:
            wrong.setdefault(step, f"step {step}: {', '.join(differing)}")
    for step in expected.keys() - seen:
        wrong[step] = f"step {step} was never trained"
    if wrong:
        result.first_step = min(wrong)
        result.differences += [wrong[step] for step in sorted(wrong)]


def _compare_tensors(one: dict[str, Tensor], other: dict[str, Tensor], result: Differences) -> None:
    distances = {}
    for name in one.keys() | other.keys():
        both = name in one and name in other
        distances[name] = ulps(one[name], other[name]) if both else float("inf")
    result.tensors = len(distances)
    result.elements = sum(tensor.numel() for tensor in one.values())
    result.ulp = max(distances.values(), default=0.0)
    differing = sorted((name for name in distances if distances[name]), key=lambda name: (-distances[name], name))
    result.differences += [f"tensor {name} ({distances[name]:g} ulp)" for name in differing]
