"""Every parallel mode, activation checkpointing, precision and compilation trains the same when combined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.conftest import Found
from tests.parallel.ranks import COLUMNS, MODES


@pytest.mark.parametrize("column", COLUMNS, ids=" ".join)
def test_combinations_train_the_same(column: tuple[str, ...], ranks: Callable[[str, int], Found]) -> None:
    (alone,) = ranks("all", 1)
    first, second = ranks("all", 2)
    assert first["composition"] == second["composition"]
    outcome: dict[str, float] = alone["composition"] | first["composition"]
    losses = [loss for key, loss in outcome.items() if key.startswith(" ".join(column))]
    assert len(losses) == len(MODES)
    # ResNet's batch norm sees one microbatch of one process, and FSDP2 stores weights in another layout.
    assert column[0] == "resnet" or losses == pytest.approx([losses[0]] * len(losses), abs=0.003)
