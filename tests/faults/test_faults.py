from __future__ import annotations

import ast

import pytest

from tests.faults.faults import FAULTS, PROJECT, DoesNotApply, Fault
from tests.faults.run import CAUGHT, MISSED, attempt, copy_source


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_applies_and_its_test_is_there(fault: Fault) -> None:
    fault.planted()
    path, _, name = fault.test.partition("::")
    functions = {node.name for node in ast.parse((PROJECT / path).read_text(encoding="utf-8")).body
                 if isinstance(node, ast.FunctionDef)}  # fmt: skip
    assert not name or name in functions


def test_an_edit_that_does_not_apply_or_changes_no_code_is_refused() -> None:
    for old, new in (("no such text", "x"), ("self.scale", "self.other"), ("A fixed scale.", "A fixed scale.")):
        with pytest.raises(DoesNotApply):
            Fault("f", "trainer/precision/scaler.py", old, new, "a test").planted()


def test_a_fault_is_caught_by_a_test_of_it_and_missed_by_another(tmp_path) -> None:  # type: ignore[no-untyped-def]
    project = copy_source(tmp_path)
    file, tests = "mantissa/formats.py", "tests/mantissa/test_formats.py"
    known = (project / file).read_text()
    assert attempt(Fault("f", file, "65504.0", "65536.0", tests), project) == (CAUGHT, "")
    docstring = f"{tests}::test_tf32_has_the_exponents_of_fp32_and_the_significand_of_fp16"
    assert attempt(Fault("f", file, "65504.0", "65536.0", docstring), project) == (MISSED, "")
    assert attempt(Fault("f", file, "65504.0", "65536.0", f"{tests}::no_such_test"), project)[0] == MISSED
    assert (project / file).read_text() == known
