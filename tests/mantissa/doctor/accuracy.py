"""How many planted faults the doctor names exactly."""

from __future__ import annotations

from dataclasses import dataclass

from mantissa.doctor.diagnosis import CHECKS, Diagnosis, diagnose
from tests.mantissa.doctor.faults import backward, errors, formats, infinite, scales, updates
from tests.mantissa.doctor.faults.planted import Fault

FAULTS = sorted(
    [*infinite.FAULTS, *backward.FAULTS, *formats.FAULTS, *scales.FAULTS, *errors.FAULTS, *updates.FAULTS],
    key=lambda fault: fault.number,
)


@dataclass
class Outcome:
    """What the doctor said of a planted fault."""

    fault: Fault
    diagnosis: Diagnosis

    @property
    def named(self) -> bool:
        """Whether module, direction, kind and rung are those expected, of every module that was expected."""
        wanted = self.fault.expected
        modules = [wanted.module] if isinstance(wanted.module, str) else wanted.module
        found = [(each.kind, each.direction, each.module, each.format) for each in self.diagnosis.findings]
        expected = [(wanted.kind, wanted.direction, module, wanted.format) for module in modules]
        further = [kind for kind, *_ in found[len(expected) :] if kind not in wanted.also]
        return sorted(found[: len(expected)]) == sorted(expected) and not further

    def text(self) -> str:
        """Return what was found, in a line."""
        found = self.diagnosis.findings
        said = "; ".join(
            f"{each.kind}, {each.direction}: {each.module or '(loss)'} at {each.format}" for each in found[:2]
        )
        return said or self.diagnosis.verdict


def examine(fault: Fault, seed: int = 0) -> Outcome:
    """Plant a fault and let the doctor examine the step."""
    with fault.planting():
        diagnosis = diagnose(fault.replay(seed), tuple(name for name in CHECKS if name != "islands"), budget_s=600)
    return Outcome(fault, diagnosis)
