"""How many planted faults the doctor names exactly."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from evidence.doctor.diagnosis import CHECKS, Diagnosis, diagnose
from evidence.doctor.faults import backward, errors, formats, infinite, scales, updates
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
        return sorted(found[: len(expected)]) == sorted(expected)

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


def table(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """Return the accuracy table: its head, and a row for each fault."""
    rows: list[tuple[str, ...]] = [("", "planted fault", "what the doctor said", "named")]
    return rows + [
        (str(each.fault.number), each.fault.name, each.text(), "yes" if each.named else "NO") for each in outcomes
    ]
