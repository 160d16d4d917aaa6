"""What Python's garbage collector walks while a run trains."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.helpers import compose
from trainer.data.contract import Batch
from trainer.run.run import Run
from trainer.run.start import train
from trainer.trainer import StepRecord


@pytest.mark.parametrize("fails", [False, True])
def test_what_exists_before_the_model_is_not_walked_until_the_run_has_ended(fails: bool, tmp_path: Path) -> None:
    frozen: list[bool] = []

    class Watched(Run):
        def step(self, microbatches: list[Batch]) -> StepRecord:
            frozen.append(gc.get_freeze_count() > 10_000)
            if fails and self.trainer.step == 2:
                raise InterruptedError
            return super().step(microbatches)

    sizes = ("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "steps=3", "checkpoint=none")
    config = compose(*sizes, "tracking=local", "profiler=none", "device=cpu", f"output_dir={tmp_path}")
    with pytest.raises(InterruptedError) if fails else nullcontext():
        train(config, run_class=Watched)
    assert frozen == [True, True, True]
    assert gc.get_freeze_count() == 0
