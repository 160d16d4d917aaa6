"""How a run that was killed and started again differs from one that nobody disturbed, and what it has lost."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Lines = dict[int, list[str]]
"""What a process said of each step, in the order of its steps."""
Values = dict[tuple[str, str, str], Any]
"""Tensors, numbers and texts by file, part of the file (``optimizer``) and name (``state.0.exp_avg``)."""

_MISSING = object()
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Numpy's random state, in the checkpoints of transformers.
_SAFE: list[Any] = [np.ndarray, np.dtype, np.empty(0).__reduce__()[0], type(np.dtype(np.uint32))]


class Record(NamedTuple):
    """What is known of a run: the lines of each start, from the first to the last, and what it left in the end."""

    metrics: list[dict[Any, Any]]
    """``Lines``, as of the data."""
    data: list[dict[Any, Any]]
    values: list[dict[Any, Any]]
    """One dict of ``Values``."""


@dataclass(frozen=True)
class Differences:
    """What was compared between an undisturbed run and a killed one, and what differs."""

    tensors: int
    """Tensors, numbers and texts that were compared."""
    elements: int
    steps: int
    repeated_steps: int
    """Steps that were taken more than once, because a kill came before they were saved."""
    ulp: float
    """The largest distance of two numbers in units in the last place; infinite for integers, shapes and NaNs."""
    first_step: int | None
    """The first step with a line that differs."""
    place: str
    """The first value in a file that differs, or empty."""
    lost: list[str]
    """One sentence for each thing that was lost."""

    def judge(self, max_ulp: float) -> tuple[str, int]:
        """Return the verdict and its exit code: 0 BITWISE, 5 ``ULP <= k``, 6 DIVERGED.

        Up to ``max_ulp`` units in the last place are rounding, if no line differs.
        """
        if self.first_step is not None:
            return f"DIVERGED AT step {self.first_step}", 6
        if not self.ulp:
            return "BITWISE", 0
        return (f"ULP <= {self.ulp:g}", 5) if self.ulp <= max_ulp else (f"DIVERGED IN {self.place}", 6)


def compare(whole: Record, killed: Record) -> Differences:
    """Compare a run that nobody disturbed with one that was killed and started again."""
    (values,), (others,) = whole.values, killed.values
    lost, place, largest = _of_values(values, others)
    if values and not largest:  # a kill between a checkpoint and the line of its step loses the line, not the step
        whole = whole._replace(metrics=_seen(whole.metrics, killed.metrics), data=_seen(whole.data, killed.data))
    metrics, data = _wrong_steps(whole.metrics, killed.metrics), _wrong_steps(whole.data, killed.data)
    said = [*_cause(whole, killed, metrics, data), *_of_data(whole, killed, data), *_of_metrics(metrics)]
    return Differences(
        tensors=len(values),
        elements=sum(value.numel() if isinstance(value, Tensor) else 1 for value in values.values()),
        steps=len(whole.metrics[0]),
        repeated_steps=sum(map(len, killed.metrics)) - len(set().union(*killed.metrics)),
        ulp=largest,
        first_step=min(metrics | data, default=None),
        place=place,
        lost=said + lost,
    )


def unlike(one: Record, other: Record) -> list[set[Any]]:
    """Return in which steps and values two undisturbed runs differ: a set for each field of a record."""
    return [
        {key for key in first.keys() | second.keys() if distance(first.get(key, _MISSING), second.get(key, _MISSING))}
        for (first,), (second,) in zip(one, other, strict=True)
    ]


def drop(record: Record, keys: list[set[Any]]) -> bool:
    """Remove steps and values that ``unlike`` returned; return whether something is left."""
    for parts, unstable in zip(record, keys, strict=True):
        for part in parts:
            for key in unstable & part.keys():
                del part[key]
    return any(part for parts in record for part in parts)


# --- files ---


def values_in(path: Path, name: str) -> Values:
    """Return what a file holds: of safetensors, JSON and what torch.save wrote each value, of others the bytes."""
    content: Any = path.read_bytes()
    with suppress(pickle.UnpicklingError, RuntimeError, ValueError):  # other objects, or another kind of archive
        if path.suffix == ".safetensors":
            from safetensors.torch import load

            content = load(content)
        elif path.suffix == ".json":
            content = json.loads(content)
        elif zipfile.is_zipfile(path):
            with torch.serialization.safe_globals(_SAFE):
                content = torch.load(path, map_location="cpu", weights_only=True)
    values: Values = {}
    for part, held in (content if isinstance(content, dict) else {"content": content}).items():
        for key, value in _leaves(held):
            place = (name, str(part), key) if key else (name, "", str(part))
            while place in values:  # keys 1 and "1"
                place = (*place[:2], f"{place[2]}'")
            values[place] = value
    return values


def _leaves(nested: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers, texts and lists of numbers in nested dicts, lists and tuples, by their dotted names."""
    if isinstance(nested, dict):
        items = list(nested.items())
    elif isinstance(nested, list | tuple) and not all(isinstance(item, int | float) for item in nested):
        items = list(enumerate(nested))
    else:
        yield name, torch.from_numpy(nested) if isinstance(nested, np.ndarray) else nested
        return
    for key, value in items:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def distance(one: Any, other: Any) -> float:
    """Return how far apart two values are in units in the last place; infinite where these mean nothing."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return ulps(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return ulps(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        return max(map(distance, one, other), default=0.0)
    return 0.0 if type(one) is type(other) and one == other else math.inf


def ulps(one: Tensor, other: Tensor) -> float:
    """Return the largest distance between two tensors in units in the last place; 0: the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return math.inf
    one, other = (each if each.layout == torch.strided else each.to_dense() for each in (one, other))
    if torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)):
        return 0.0
    if not one.is_floating_point() or not bool((torch.isfinite(one) & torch.isfinite(other)).all()):
        return math.inf
    gap = (_ordered(one) - _ordered(other)).abs().max()
    return max(1.0, float(gap))  # at least 1, since +0 and -0 differ in bits


def _ordered(tensor: Tensor) -> Tensor:
    """Map floating-point numbers to integers of the same order; neighbours differ by 1."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).to(torch.int64)
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def _of_values(whole: Values, killed: Values) -> tuple[list[str], str, float]:
    """Return a sentence for each part of a file that differs, the first such value, and the largest distance."""
    parts: dict[str, dict[str, float]] = {}
    for key in sorted(whole.keys() | killed.keys()):
        gap = distance(whole.get(key, _MISSING), killed.get(key, _MISSING))
        parts.setdefault(": ".join(filter(None, key[:2])), {})[key[2]] = gap
    lost, place = [], ""
    for part, distances in parts.items():
        if differing := [name for name in distances if distances[name]]:
            worst = max(distances.values())
            far = f"by up to {worst:.3g} ULPs" if math.isfinite(worst) else "in more than rounding"
            place = place or ": ".join(filter(None, (part, differing[0])))
            lost.append(f"{part}: {len(differing)} of {len(distances)} values differ, first {differing[0]}, {far}.")
    return lost, place, max((max(distances.values()) for distances in parts.values()), default=0.0)


# --- lines ---


class _Wrong(NamedTuple):
    start: int
    """By which start of the killed run; the first is 0."""
    expected: list[str]
    said: list[str]


def kept(starts: list[Lines]) -> Lines:
    """Return the lines of the steps that count in the end: a start discards all from its first step on."""
    left: Lines = {}
    for lines in starts:
        first = min(lines, default=math.inf)
        left = {step: said for step, said in left.items() if step < first} | lines
    return left


def _seen(whole: list[Lines], killed: list[Lines]) -> list[Lines]:
    """Return the undisturbed run's lines of the steps that the killed run has in the end."""
    left = kept(killed)
    return [{step: said for step, said in lines.items() if step in left} for lines in whole]


def _wrong_steps(whole: list[Lines], killed: list[Lines]) -> dict[int, _Wrong]:
    """Return the steps with a line that differs, in the order found; each time that a step was taken counts."""
    wrong: dict[int, _Wrong] = {}
    for start, lines in enumerate(killed):
        last = next(reversed(lines), None) if start + 1 < len(killed) else None
        for step, said in lines.items():
            expected = whole[0].get(step, [])
            if said != (expected[: len(said)] if step == last else expected):  # a kill may cut the last step's lines
                wrong.setdefault(step, _Wrong(start, expected, said))
    left = kept(killed)
    for lines in whole:
        for step, expected in lines.items():
            if left.get(step) != expected:
                wrong.setdefault(step, _Wrong(len(killed) - 1, expected, left.get(step, [])))
    return wrong


def _of_metrics(wrong: dict[int, _Wrong]) -> Iterator[str]:
    missing = [step for step, found in wrong.items() if not found.said]
    surplus = [step for step, found in wrong.items() if len(found.said) > len(found.expected)]
    differing = sorted(set(wrong).difference(missing, surplus))
    if missing:
        yield f"{counted(missing, 'step')} missing."
    if surplus:
        yield f"{counted(surplus, 'step')} taken once too often, without a kill between."
    if differing:
        _, expected, said = wrong[differing[0]]
        values = f"{', '.join(said)} in place of {', '.join(expected)}"
        yield f"The metric of {counted(differing, 'step')} differs; at step {differing[0]} it is {values}."


def _of_data(whole: Record, killed: Record, wrong: dict[int, _Wrong]) -> Iterator[str]:
    one, other = (Counter(_samples(kept(starts))) for starts in (whole.data, killed.data))
    skipped, added = one - other, other - one
    for found, what in (
        (skipped, "skipped"),
        ({sample: times for sample, times in added.items() if sample in one}, "seen twice"),
        ({sample: times for sample, times in added.items() if sample not in one}, "seen by the killed run alone"),
    ):
        if found:
            number = sum(found.values())
            yield f"{counted(list(found), 'sample', number)} {'was' if number == 1 else 'were'} {what}."
    if wrong and not skipped and not added:
        yield f"{counted(sorted(wrong), 'step')} with the samples in another order, or replayed with others."


def _samples(lines: Lines) -> Iterator[str]:
    for said in lines.values():
        for text in said:
            yield from re.findall(r"[^\s,;\[\](){}]+", text)


def _cause(whole: Record, killed: Record, metrics: dict[int, _Wrong], data: dict[int, _Wrong]) -> Iterator[str]:
    """Say what was not restored, from the first step at which a start differs: its own first, or a later one."""
    differing = {step: found for step, found in metrics.items() if 0 < len(found.said) <= len(found.expected)}
    step = next(iter(differing), 0)
    start = differing[step].start if differing else 0
    other = next(((found.start, step) for step, found in data.items() if found.said and found.start), None)
    if other and (not start or other[0] <= start):
        yield f"Start {other[0] + 1} took other samples at step {other[1]}: its place in the data was not restored."
    elif start and {step - 1, step + 1} & whole.metrics[0].keys():
        first, same = min(killed.metrics[start]), ", with the same samples" if whole.data[0] else ""
        if step > first:
            what = "the optimizer's state, the learning rate or the loss scale was"
        else:
            what = f"the weights or the random state (of dropout{'' if whole.data[0] else ', or of the data'}) were"
        yield f"Start {start + 1} began at step {first} and differed from step {step} on{same}: {what} not restored."


def counted(items: Sequence[Any], noun: str, number: int | None = None) -> str:
    """Return ``3 steps (7, 8, 9)``, with the first five items."""
    number = len(items) if number is None else number
    listed = ", ".join(map(str, items[:5])) + (", …" if len(items) > 5 else "")
    return f"{number} {noun}{'s' * (number != 1)} ({listed})"
