"""Every row of the table of step metrics, as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import BIGNET, PROJECT, fit, trainer_of
from trainer.run.step_metrics import STEP_METRICS


@pytest.mark.parametrize("name", STEP_METRICS)
def test_a_metric_is_a_number_that_the_host_does_not_wait_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(*BIGNET, "precision=fp16", "steps=2")
    (record,) = fit(trainer, 1)

    def waits(*_: Any) -> None:
        raise AssertionError(f"{name} waits for the device")

    with monkeypatch.context() as patch, torch.no_grad():
        for method in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
            patch.setattr(Tensor, method, waits)
        value = STEP_METRICS[name].value(record, trainer)
    assert not isinstance(value, Tensor) or (value.ndim, value.device) == (0, trainer.device)
    combine = STEP_METRICS[name].combine
    assert combine is None or isinstance(combine([float(value)] * 2), float)


def test_every_metric_is_in_the_docs() -> None:
    lines = (PROJECT / "docs" / "mlflow.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith("| every `log_every` steps |")]
    assert [name for name in STEP_METRICS if f"`{name}`" not in row] == [], "name it in this row of docs/mlflow.md"
