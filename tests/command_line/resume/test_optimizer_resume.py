"""What is trained, and by what rule, is the same after a run was stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import compose, same_bits

Train = Callable[..., Any]
BIGNET = ("recipe=bignet", "recipe.width=8", "data.samples=64", "batch_size=8", "schedule=constant")
OPTIONS = ("tracking=local", "deterministic=true", "eval_every=2", "output_dir=out")
RULES: dict[str, tuple[str, ...]] = {
    "freeze": ("freeze=['[012].?']", "precision=bf16_master"),
    "groups": (
        "optimizer.groups={[01].?:{lr:3,weight_decay:0},bias:{lr:0.5}}".replace("[01]", "\\[01\\]"),
        "precision=bf16_sr",
    ),
    "layer_decay": ("optimizer.layer_decay=0.7",),
    "muon": ("optimizer=muon", "precision=bf16_pure"),
    "adafactor": ("optimizer=adafactor", "precision=bf16_master"),
    "lion": ("optimizer=lion", "precision=bf16"),
    "schedulefree": ("optimizer=schedulefree", "precision=bf16_master"),
    "lamb": ("optimizer=lamb", "precision=fp16"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_is_the_same(rule: str, train: Train, folder: Path) -> None:
    line = (*BIGNET, *RULES[rule], *OPTIONS)
    assert train(*line, "steps=4", "run_name=whole").code == 0
    assert train(*line, "steps=2", "run_name=part").code == 0
    resumed = train("resume=out/part", "steps=4")
    assert resumed.code == 0, resumed.err
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, two = (load_file(folder / "out" / run / "checkpoints/step-00000004" / file) for run in ("part", "whole"))
        assert same_bits(one, two)


def test_the_export_has_the_frozen_weights_and_a_run_keeps_what_is_frozen(train: Train, folder: Path) -> None:
    line = (*BIGNET, *RULES["freeze"])
    ended = train(*line, *OPTIONS, "steps=2", "run_name=run")
    assert "1440 parameters, 864 of them frozen" in ended.out
    best = load_file(folder / "out/run/best/model.safetensors")
    torch.manual_seed(0)
    first = compose(*line).recipe.build_model(None).state_dict()
    for name, tensor in first.items():
        frozen = name[0] in "012"
        assert torch.equal(best[name].float(), tensor.bfloat16().float()) is frozen, name
    assert json.loads((folder / "out/run/config.json").read_text())["freeze"] == ["[012].?"]
    refused = train("resume=out/run", "steps=4", "freeze=['[01].?']")
    assert refused.code == 2
    assert "freeze was ['[012].?'], now ['[01].?']" in refused.err


@pytest.mark.parametrize("mode", ["fp32", "bf16_master", "bf16_sr"])
def test_the_export_of_a_schedule_free_run_has_the_averaged_weights(mode: str, train: Train, folder: Path) -> None:
    """x = y + (1 - 1/β₁) · (z - y), of the best step, which is not the last."""
    line = (*BIGNET, "optimizer=schedulefree", "optimizer.lr=0.1", f"precision={mode}", *OPTIONS)
    ended = train(*line, "steps=6", "run_name=run", "checkpoint.keep=9", "eval_every=1")
    assert ended.code == 0, ended.err
    summary = json.loads((folder / "out/run/summary.json").read_text())
    at_best = folder / f"out/run/checkpoints/step-{summary['best']['step']:08d}"
    best = load_file(folder / "out/run/best/model.safetensors")
    weights, state = (load_file(at_best / f"{file}.safetensors") for file in ("model", "optimizer"))
    assert best.keys() == weights.keys()
    for name, weight in weights.items():
        y = state.get(f"{name}.master_weight", weight).float()
        x = y.lerp(state[f"{name}.z"].float(), 1 - 1 / 0.9)
        assert best[name].dtype == torch.float32
        assert torch.equal(best[name], x)
        assert not torch.equal(x, y)
