from __future__ import annotations

import copy

import pytest
from torch import nn

from tests.helpers import NoData, SmallConvNet, copied, fit, same_bits, start
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.optim.groups import freeze
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3, affine=False))
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        ([], []),
        (["embedding"], ["embedding.weight"]),
        (["head"], ["embedding.weight", "head.bias"]),  # the weight is the embedding's
        (["bias"], ["blocks.0.bias", "blocks.1.bias", "head.bias"]),
        (["blocks"], ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]),
        (["blocks.0"], ["blocks.0.weight", "blocks.0.bias"]),
        (["*.[01].weight", "head.bias"], ["blocks.0.weight", "blocks.1.weight", "head.bias"]),
    ],
)
def test_a_pattern_names_parameters_or_modules_with_everything_in_them(patterns: list[str], frozen: list[str]) -> None:
    model = Tied()
    assert freeze(model, patterns) == frozen
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


@pytest.mark.parametrize(
    ("patterns", "still"),
    [(["blocks"], [True, True]), (["blocks.1"], [True, False]), (["blocks.3"], [False, True]), (["bias"], [False] * 2)],
)
def test_batch_norm_that_is_frozen_as_a_whole_stays_in_evaluation_mode(patterns: list[str], still: list[bool]) -> None:
    """Also in a deep copy, which has modes of its own."""
    model = Tied()
    freeze(model, patterns)
    for each in (model, copy.deepcopy(model)):
        for _ in range(2):
            each.eval().train()
            assert [not each.blocks[number].training for number in (1, 3)] == still
            assert each.blocks[0].training


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embeding"], r"freeze: 'embeding' matches no parameter, and no module that has any; similar: embedding"),
        (["blocks.2"], r"freeze: 'blocks.2' matches no parameter"),  # ReLU has none
        (["embedding", "blocks", "bias"], r"leaves no parameter to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        freeze(Tied(), patterns)


@pytest.mark.parametrize("mode", ["fp32", "fp16_master", "bf16_sr"])
def test_frozen_weights_and_statistics_do_not_change_and_take_no_memory(mode: str) -> None:
    precision, scaler = Precision(mode), AutoScaler()
    trainer = start(Config(SmallConvNet(), NoData(), precision=precision, scaler=scaler, freeze=["0", "1"]))
    before = copied(trainer.model.state_dict())
    fit(trainer, 3)
    trainer.evaluate()
    fit(trainer, 4)
    frozen = [name for name in before if name.startswith(("0.", "1."))]
    changed = {name for name, tensor in trainer.model.state_dict().items() if not same_bits(tensor, before[name])}
    assert trainer.frozen == ["0.weight", "1.weight", "1.bias"]
    assert "1.running_mean" in frozen
    assert changed == before.keys() - set(frozen)
    state = trainer.state_dict()
    assert not [name for name in state["optimizer"] if name.startswith(("0.", "1."))]
    trained = ["3.weight", "7.weight", "3.bias", "7.bias"]
    assert state["optimizer_options"]["names"] == trained
    masters = {name for name in state["optimizer"] if name.endswith(".master_weight")}
    assert masters == ({f"{name}.master_weight" for name in trained} if mode == "fp16_master" else set())
