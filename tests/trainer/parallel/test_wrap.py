"""Where the model is before it is wrapped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers import compose
from trainer.config.settle import plan_of, settle
from trainer.hardware import detect
from trainer.parallel.wrap import DDP, FSDP, Parallel
from trainer.trainer import Trainer


@pytest.mark.parametrize(("parallel", "where"), [(Parallel, "meta"), (DDP, "meta"), (FSDP, "cpu")])
def test_a_model_that_is_sharded_is_never_whole_on_the_device(parallel: type[Parallel], where: str) -> None:
    """FSDP2 moves each block by itself, and keeps a part of it."""
    settled = settle(plan_of(compose("recipe=bignet", "recipe.width=8", "recipe.layers=2"), detect("cpu")))
    trainer = Trainer.__new__(Trainer)
    trainer.config = replace(settled.config, parallel=parallel())
    trainer.recipe, trainer.datasets, trainer.device = settled.config.recipe, settled.datasets, torch.device("meta")
    assert {parameter.device.type for parameter in trainer.first_model().parameters()} == {where}
