"""Every planted fault is named exactly: its kind, its place, and a cure that was tried."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch import nn

from evidence.doctor.step import step_of as step_of_trainer
from mantissa.doctor import compiled
from mantissa.doctor.diagnosis import CHECKS, FOUND, diagnose
from mantissa.doctor.examine import take
from mantissa.doctor.sweep import DIFFERS
from mantissa.finding import DIFFERENCE
from mantissa.step.step import Gradients, Step
from tests.mantissa.doctor.faults import FAULTS, TRAINED, miscompiling
from tests.mantissa.doctor.planted import WIDTH, step_of


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


def test_gradients_of_compiled_code_that_are_nan_are_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Step) -> Gradients:
        return {name: each * float("nan") for name, each in step.as_run().true_gradients().items()}

    monkeypatch.setattr(compiled, "_compiled", broken)
    trial, (finding,) = compiled.compiled_trial(step_of(lambda: nn.Linear(WIDTH, WIDTH)))
    assert (trial.status, finding.kind) == (DIFFERS, DIFFERENCE)
