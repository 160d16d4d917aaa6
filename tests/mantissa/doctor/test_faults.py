"""Every planted fault is named exactly: its kind, its place, and a cure that was tried."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from evidence.doctor.step import step_of as step_of_trainer
from mantissa.doctor.diagnosis import CHECKS, FOUND, diagnose
from mantissa.examination import take
from tests.mantissa.doctor.faults import FAULTS, TRAINED, miscompiling


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_loop_is_named(name: str) -> None:
    fault, report = FAULTS[name], FAULTS[name].examined()
    assert (report.verdict, report.diagnosis.exit_code, report.diagnosis.budget.left_out) == (FOUND, 7, []), str(report)
    finding = report.findings[0]
    assert (finding.kind, finding.place) == (fault.kind, fault.place), str(report)
    assert finding.direction == (fault.direction or finding.direction)
    assert finding.format == (fault.format or finding.format)
    assert fault.line in finding.line, str(report)
    assert any(fault.cure in cure for cure in finding.cure or [""]), str(report)


@pytest.mark.parametrize("name", TRAINED)
def test_a_fault_in_the_trainer_is_named(name: str) -> None:
    expected, planted = TRAINED[name]
    compiles = "compiled" in name
    with miscompiling() if compiles else nullcontext():
        taken = take(step_of_trainer(planted.trainer()))
        taken.step.compiles = compiles
        diagnosis = diagnose(taken, tuple(check for check in CHECKS if check != "islands"), time_budget_s=600)
    found = [(finding.kind, finding.direction, finding.module, finding.format) for finding in diagnosis.findings]
    assert (diagnosis.verdict, found, diagnosis.budget.left_out) == (FOUND, expected, [])
