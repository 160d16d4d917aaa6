from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import CPU, compose, fit, trainer_of
from trainer.config.settle import plan_of


def test_amp_mlp_is_the_network_of_pytorchs_recipe() -> None:
    config = compose("experiment=amp_mlp", "data.samples=8")
    plan = plan_of(config, CPU)
    assert (plan.steps, plan.batching.batch_size, plan.batching.micro_batch_size) == (150, 512, 512)
    with torch.device("meta"):
        model = config.recipe.build_model(config.recipe.datasets(config.data, 0))
    layers = [module for module in model.modules() if not list(module.children())]
    assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(4096, 4096), (4096,)] * 3
    options = config.optimizer.options | {"lr": config.optimizer.lr, "weight_decay": config.optimizer.weight_decay}
    assert options == {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


def test_its_loss_is_the_mean_squared_error_and_falls() -> None:
    trainer = trainer_of("experiment=amp_mlp", "precision=fp16", "recipe.width=64", "data.samples=64", "steps=30",
                         "batch_size=16", "micro_batch_size=8", "optimizer.lr=1", "scaler.init=1024")  # fmt: skip
    batch = next(trainer.batches())[0]
    with trainer.config.precision.autocast(trainer.device):
        output = trainer.recipe.loss(trainer.model, batch)
        expected = nn.functional.mse_loss(trainer.model(batch["x"]).float(), batch["y"])
    assert output.loss_sum.item() / trainer.recipe.count_targets(batch) == pytest.approx(expected.item(), rel=1e-5)
    before = trainer.evaluate()["loss"]
    fit(trainer)
    assert trainer.evaluate()["loss"] < 0.9 * before
