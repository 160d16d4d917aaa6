"""Every parallel mode, activation checkpointing, precision and compilation trains the same when combined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.conftest import Found
from tests.parallel.ranks import ACTIVATIONS, PRECISIONS

COLUMNS = [("gpt2", precision, "off") for precision in PRECISIONS]
COLUMNS += [("resnet", "bf16", "off"), ("bignet", "bf16", "default")]


def test_every_combination_trains_the_same(ranks: Callable[[str, int], Found]) -> None:
    (alone,) = ranks("all", 1)
    first, second = ranks("all", 2)
    assert first["composition"] == second["composition"]
    outcome: dict[str, str] = alone["composition"] | first["composition"]
    assert len(outcome) == 3 * len(ACTIVATIONS) * len(COLUMNS)
    for name, *rest in COLUMNS:
        column = [loss for key, loss in outcome.items() if key.startswith(name) and key.endswith(" ".join(rest))]
        losses = [float(loss) for loss in column]  # none was refused
        # ResNet's batch norm sees one microbatch of one process, and FSDP2 stores weights in another layout.
        assert name == "resnet" or losses == pytest.approx([losses[0]] * len(losses), abs=0.003)
