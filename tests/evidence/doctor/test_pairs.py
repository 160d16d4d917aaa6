from __future__ import annotations

import pytest
import torch

from evidence.doctor.faults.errors import FAULTS
from evidence.doctor.faults.planted import Expected, Fault
from evidence.doctor.measured.pairs import measure
from evidence.doctor.step.case import Case
from recipes.gpt2_model import SHAPES, Shape
from tests.helpers import trainer_of

TEXT = ["data=synthetic", "data.vocab_size=90", "batch_size=4"]
TINY = {
    "gpt2": ["recipe=gpt2", "recipe.size=tiny", "recipe.context=16", *TEXT],
    "llama": [
        *("recipe=llama", "recipe.layers=2", "recipe.width=32", "recipe.heads=4", "recipe.kv_heads=2", "recipe.ffn=64"),
        *("recipe.context=16", *TEXT),
    ],
    "bert": ["recipe=bert", "recipe.context=24", *TEXT],
    "t5": ["recipe=t5", "recipe.context=24", *TEXT],
    "resnet": ["recipe=resnet", "recipe.arch=resnet18", "data=digits", "batch_size=4"],
    "bignet": ["recipe=bignet", "recipe.layers=8", "recipe.width=64", "batch_size=16", "profiler=none"],
}
NO_FAULT = Expected("", "", "", "")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", Shape(2, 2, 32, 16))
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
