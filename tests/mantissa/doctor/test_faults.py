"""Every planted fault is named exactly: kind, direction, module and format."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from evidence.doctor.step import step_of as step_of_trainer
from mantissa.doctor.diagnosis import CHECKS, FOUND, diagnose
from mantissa.examination import take
from tests.mantissa.doctor.faults import FAULTS, TRAINED, miscompiling


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    diagnosis = FAULTS[name].examined()
    first = diagnosis.findings[0]
    assert (first.kind, first.direction, first.module, first.format) == FAULTS[name].expected, diagnosis.findings
    assert (diagnosis.verdict, diagnosis.exit_code, diagnosis.budget.left_out) == (FOUND, 7, [])


@pytest.mark.parametrize("name", TRAINED)
def test_a_fault_in_the_trainer_is_named(name: str) -> None:
    expected, planted = TRAINED[name]
    compiles = "compiled" in name
    with miscompiling() if compiles else nullcontext():
        replay = take(step_of_trainer(planted.trainer()))
        replay.step.ranks, replay.step.compiles = planted.ranks, compiles
        diagnosis = diagnose(replay, tuple(check for check in CHECKS if check != "islands"), budget_s=600)
    found = [(finding.kind, finding.direction, finding.module, finding.format) for finding in diagnosis.findings]
    assert (diagnosis.verdict, found, diagnosis.budget.left_out) == (FOUND, expected, [])
