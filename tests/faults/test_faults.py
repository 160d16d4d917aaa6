from __future__ import annotations

import ast

import pytest

from tests.faults.faults import FAULTS, PROJECT, DoesNotApply, Fault


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
