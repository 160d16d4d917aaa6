"""How many planted faults the doctor names exactly."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from evidence.doctor import healthy
from evidence.doctor.diagnosis import CHECKS, Diagnosis, diagnose
from evidence.doctor.faults import backward, errors, formats, infinite, scales, updates
from evidence.doctor.faults.holdout import HOLDOUT
from evidence.doctor.faults.planted import Fault

FAULTS = sorted(
    [*infinite.FAULTS, *backward.FAULTS, *formats.FAULTS, *scales.FAULTS, *errors.FAULTS, *updates.FAULTS],
    key=lambda fault: fault.number,
)


@dataclass
class Outcome:
    """What the doctor said of a planted fault."""

    fault: Fault
    diagnosis: Diagnosis
    seconds: float

    @property
    def named(self) -> bool:
        """Whether module, direction, kind and rung are those expected, of every module that was expected."""
        wanted = self.fault.expected
        modules = [wanted.module] if isinstance(wanted.module, str) else wanted.module
        found = [(each.kind, each.direction, each.module, each.rung) for each in self.diagnosis.findings]
        expected = [(wanted.kind, wanted.direction, module, wanted.rung) for module in modules]
        further = [kind for kind, *_ in found[len(expected) :] if kind not in wanted.also]
        return sorted(found[: len(expected)]) == sorted(expected) and not further

    def text(self) -> str:
        """Return what was found, in a line."""
        found = self.diagnosis.findings
        said = "; ".join(
            f"{each.kind}, {each.direction}: {each.module or '(loss)'} at {each.rung}" for each in found[:2]
        )
        return said or self.diagnosis.verdict


def examine(fault: Fault, seed: int = 0) -> Outcome:
    """Plant a fault and let the doctor examine the step."""
    began = time.monotonic()
    with fault.planting():
        diagnosis = diagnose(fault.replay(seed), tuple(name for name in CHECKS if name != "islands"), budget_s=600)
    return Outcome(fault, diagnosis, time.monotonic() - began)


def measure(parts: Sequence[str], seeds: int) -> int:
    """Print what the doctor says of planted faults and of healthy combinations, each as soon as it is known.

    Args:
        parts: of ``PARTS``.
        seeds: how many; each decides weights and data.

    Returns:
        The exit code: 0 where every fault is named exactly and nothing else is.
    """
    good = True
    for part in parts:
        count, right = 0, 0
        began = time.monotonic()
        for name, run in _runs(part):
            said = [run(seed) for seed in range(seeds)]
            count += seeds
            right += sum(named for named, _ in said)
            wrong = [f"seed {seed}: {text}" for seed, (named, text) in enumerate(said) if not named]
            print(f"{name}: {'; '.join(wrong) or said[0][1]}{'  WRONG' if wrong else ''}")
        print(f"{part}: {right} of {count} {PARTS[part]}, in {time.monotonic() - began:.0f} s\n")
        good &= right == count
    return 0 if good else 1


PARTS = {"faults": "named exactly", "holdout": "named exactly", "healthy": "without a finding"}
"""What can be measured, and what counts as right."""


def _runs(part: str) -> Iterator[tuple[str, Callable[[int], tuple[bool, str]]]]:
    """Yield every case of a part by name, and the function from a seed to whether it is right and what was said."""
    if part != "healthy":
        for fault in FAULTS if part == "faults" else HOLDOUT:
            yield f"{fault.number:2} {fault.name}", functools.partial(_fault, fault)
    else:
        for overrides in healthy.combinations():
            yield " ".join(overrides), functools.partial(_healthy, overrides)


def _fault(fault: Fault, seed: int) -> tuple[bool, str]:
    outcome = examine(fault, seed)
    return outcome.named, outcome.text()


def _healthy(overrides: tuple[str, ...], seed: int) -> tuple[bool, str]:
    checks = tuple(name for name in CHECKS if name != "islands")
    diagnosis = healthy.examine((*overrides, f"seed={seed}"), checks)
    wrong = healthy.wrong(diagnosis)
    left_out = "".join(f", left out: {item}" for item in diagnosis.budget.left_out)
    return not wrong, "; ".join(wrong) or diagnosis.verdict + left_out
