"""The bytes that scripts/scale.py predicts are those that real ranks exchange: gloo, at the sockets."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from torch import nn

from evidence.scaling.arithmetic import Collective, exchanges, sent_bytes
from evidence.scaling.command import summed_in, weights_of
from tests.helpers import compose
from tests.parallel.ranks import MICROBATCHES, TRAFFIC, TRAFFIC_OPTIONS
from tests.parallel.test_gradients import Ranks
from trainer.config.schema import Config
from trainer.hardware import detect
from trainer.parallel.wrap import DDP, FSDP

SLACK = 1.02
"""Headers, and the few numbers that ranks exchange besides."""


def config_of(case: str) -> Config:
    return compose(*TRAFFIC_OPTIONS, f"precision={TRAFFIC[case][0]}", "batch_size=1")


def model_of(config: Config) -> tuple[nn.Module, list[nn.Module]]:
    model = config.recipe.build_model(config.open_datasets())
    config.precision.convert(model, detect("cpu").device)
    return model, config.recipe.blocks(model)


def predicted(case: str, processes: int) -> list[Collective]:
    config = config_of(case)
    config = config.resolve(detect("cpu")).config
    mode = TRAFFIC[case][1]()
    assert isinstance(mode, DDP | FSDP)
    return exchanges(weights_of(*model_of(config)), mode, processes, MICROBATCHES, summed_in(config))


@pytest.mark.parametrize("case", TRAFFIC)
@pytest.mark.parametrize("processes", [2, 4])
def test_a_step_exchanges_the_predicted_bytes(processes: int, case: str, ranks: Ranks) -> None:
    expected = predicted(case, processes)
    asked: Counter[str] = Counter()
    for each in expected:
        asked[each.kind] += each.size
    # Gloo reduce-scatters by an all-reduce, which moves twice as much.
    moved = [each._replace(kind="all_reduce") if each.kind == "reduce_scatter" else each for each in expected]
    for rank in ranks("four" if processes == 4 else "all", processes):
        found = rank["traffic"][case.split()[0]][case]
        assert found["asked"] == asked
        assert found["count"] == len(expected)
        if sys.platform == "linux":
            assert 1 <= found["arrived"] / sent_bytes(moved, processes) < SLACK


def test_padded_rows_are_counted() -> None:
    (weights, expected) = (weights_of(nn.Linear(3, 5), []), 4 * (6 * 3 + 6))
    gather, scatter = exchanges(weights, FSDP(), 2, 1)
    assert (gather.size, scatter.size) == (expected, expected)
    assert [each.size for each in exchanges(weights, DDP(), 2, 1)] == [4 * (5 * 3 + 5)]
