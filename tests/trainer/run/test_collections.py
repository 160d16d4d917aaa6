"""What Python's garbage collector walks while a run trains."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import ClassVar

import pytest

from tests.helpers import compose
from trainer.data.contract import Batch
from trainer.run.run import Run
from trainer.run.start import train
from trainer.trainer import StepRecord

BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "steps=3", "checkpoint=none")


class Watched(Run):
    frozen: ClassVar[list[bool]] = []
    fails_at = 4

    def step(self, microbatches: list[Batch]) -> StepRecord:
        self.frozen.append(gc.get_freeze_count() > 10_000)
        if self.trainer.step + 1 == self.fails_at:
            raise InterruptedError
        return super().step(microbatches)


class Failing(Watched):
    fails_at = 3


@pytest.mark.parametrize("run", [Watched, Failing])
def test_what_exists_before_the_model_is_not_walked_until_the_run_has_ended(run: type[Watched], tmp_path: Path) -> None:
    Watched.frozen.clear()
    config = compose(*BIGNET, "tracking=local", "profiler=none", "device=cpu", f"output_dir={tmp_path}")
    if run is Failing:
        with pytest.raises(InterruptedError):
            train(config, run_class=run)
    else:
        train(config, run_class=run)
    assert Watched.frozen == [True, True, True]
    assert gc.get_freeze_count() == 0
