"""The corpus: every fault is named exactly, with a cure that was tried; in a healthy step nothing is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from mantissa.doctor import diagnosis
from mantissa.doctor.checks import CHECKS
from mantissa.doctor.diagnosis import FOUND
from mantissa.doctor.finding import CRASH, DIFFERENCE, MEANINGS, NO_PROGRESS
from tests.mantissa.doctor.faults import FAULTS
from tests.mantissa.doctor.healthy import HEALTHY

PROJECT = Path(__file__).resolve().parents[3]
DOCS, COMMAND = PROJECT / "docs" / "doctor.md", PROJECT / "scripts" / "doctor.py"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    fault, report = FAULTS[name], FAULTS[name].examined()
    assert (report.verdict, report.diagnosis.exit_code, report.diagnosis.budget.left_out) == (FOUND, 7, []), str(report)
    finding = report.findings[0]
    assert (finding.kind, finding.place) == (fault.kind, fault.place), str(report)
    assert finding.direction == (fault.direction or finding.direction)
    assert finding.format == (fault.format or finding.format)
    assert fault.line in finding.line, str(report)
    assert any(fault.cure in cure for cure in finding.cure or [""]), str(report)
    assert fault.no_cure is None or not any(fault.no_cure in cure for cure in finding.cure), str(report)
    assert tuple(other.kind for other in report.findings[1:]) == fault.besides, str(report)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("name", "precision"), [(name, precision) for name, step in HEALTHY.items() for precision in step.precisions]
)
def test_nothing_is_found_in_a_healthy_step(name: str, precision: str) -> None:
    report = HEALTHY[name].examined(precision)
    result = report.diagnosis
    assert (report.verdict, report.findings, result.budget.left_out) == (diagnosis.HEALTHY, [], []), str(report)
    assert [trial.status for trial in result.formats][:2] == ["ok", "ok"]


def test_every_kind_of_fault_is_planted_and_in_the_docs() -> None:
    elsewhere = {CRASH, DIFFERENCE, NO_PROGRESS}  # see test_course.py, and the tests of scripts/doctor.py
    assert {fault.kind for fault in FAULTS.values()} | elsewhere == set(MEANINGS)
    assert [name for name in MEANINGS if name not in first_column()] == [], f"add to the table of faults: {DOCS}"


def test_every_check_is_in_the_docs_and_in_help() -> None:
    assert [name for name in CHECKS if f"`{name}`" not in first_column()] == [], f"add to the table of checks: {DOCS}"
    assert f"  check=all         or some of {','.join(CHECKS)}\n" in COMMAND.read_text(encoding="utf-8")


def first_column() -> set[str]:
    """What the tables of the page are about."""
    rows = [line.split("|")[1] for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {name.strip() for row in rows for name in row.split(",")}
