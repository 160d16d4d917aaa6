"""Every planted fault is named exactly: module, direction, kind and rung."""

from __future__ import annotations

import pytest

from evidence.doctor.accuracy import FAULTS, examine
from evidence.doctor.diagnosis import FOUND
from evidence.doctor.faults.planted import Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_a_planted_fault_is_named(fault: Fault) -> None:
    outcome = examine(fault)
    diagnosis = outcome.diagnosis
    assert outcome.named, f"expected {fault.expected}; said: {outcome.text()}; ladder: {diagnosis.ladder}"
    assert (diagnosis.verdict, diagnosis.exit_code, diagnosis.budget.left_out) == (FOUND, 7, [])


def test_the_faults_are_numbered_without_repetition() -> None:
    numbers = [fault.number for fault in FAULTS]
    assert numbers == sorted(set(numbers))
