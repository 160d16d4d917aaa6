from __future__ import annotations

import pytest
import torch

from evidence.doctor.faults.errors import FAULTS
from evidence.doctor.faults.planted import Fault
from evidence.doctor.healthy import TINY
from evidence.doctor.measured.pairs import measure
from evidence.doctor.step.case import Case
from tests.helpers import trainer_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def case_of(*overrides: str) -> Case:
    trainer = trainer_of(*overrides)
    return Case.of(trainer, next(trainer.batches()))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_excess_errors_are_found_where_they_are(fault: Fault) -> None:
    findings = measure(fault.replay().case).findings
    assert [(each.kind, each.direction, each.module, each.rung) for each in findings] == [
        (fault.expected.kind, fault.expected.direction, fault.expected.module, fault.expected.rung)
    ]


@pytest.mark.parametrize("mode", ["fp32", "bf16_master"])
@pytest.mark.parametrize("recipe", TINY)
def test_nothing_is_found_in_healthy_models(recipe: str, mode: str) -> None:
    pairs = measure(case_of(*TINY[recipe], f"precision={mode}"))
    assert (pairs.findings, pairs.notes) == ([], [])
    assert max(row.ratio for row in pairs.rows) < 0.8
    assert {row.direction for row in pairs.rows} == {"forward", "backward"}
