"""What is trained, and by what rule, is the same after a run was stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.command_line.conftest import Train
from tests.helpers import same_bits

BIGNET = ("recipe=bignet", "recipe.width=8", "data.samples=64", "batch_size=8", "schedule=constant")
DIGITS = ("recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "batch_size=4", "eval_samples=2", "schedule=constant",
          "loader.workers=0")  # fmt: skip
OPTIONS = ("tracking=local", "deterministic=true", "eval_every=2", "output_dir=out")
RULES: dict[str, tuple[str, ...]] = {
    "freeze": (*BIGNET, "freeze=['[012].?']", "precision=bf16_master"),
    "groups": (*BIGNET, r"optimizer.groups={\[01\].?:{lr:3,weight_decay:0},bias:{lr:0.5}}", "precision=bf16_sr"),
    "layer_decay": (*BIGNET, "optimizer.layer_decay=0.7"),
    "muon": (*BIGNET, "optimizer=muon", "precision=bf16_pure"),
    "adafactor": (*BIGNET, "optimizer=adafactor", "precision=bf16_master"),
    "lamb": (*BIGNET, "optimizer=lamb", "precision=fp16"),
    "augment": (*DIGITS, "augment=randaugment", "augment.mixup=0.4"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_is_the_same(rule: str, succeed: Train, folder: Path) -> None:
    line = (*RULES[rule], *OPTIONS)
    succeed(*line, "steps=4", "run_name=whole")
    succeed(*line, "steps=2", "run_name=part")
    succeed("resume=out/part", "steps=4")
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, two = (load_file(folder / "out" / run / "checkpoints/step-00000004" / file) for run in ("part", "whole"))
        assert same_bits(one, two)
