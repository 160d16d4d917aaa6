from __future__ import annotations

import pytest

from trainer.run.step_metrics import STEP_METRICS

FIVE = ("loss", "lr", "grad_norm", "loss_scale", "skipped_steps")


@pytest.fixture
def five_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of a step whose lines and columns a test writes out, without those that are added later."""
    for name in STEP_METRICS.keys() - set(FIVE):
        monkeypatch.delitem(STEP_METRICS, name)
