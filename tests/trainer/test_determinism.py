from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers import trainer_of
from trainer.determinism import set_determinism


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    set_determinism(False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_has_the_kernels_that_it_asks_for(deterministic: bool) -> None:
    trainer_of("recipe=bignet", "recipe.width=8", "recipe.layers=2", f"deterministic={deterministic}")
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic
