"""Planted faults of the optimizer's update in 16-bit weights: numbers 24 and 25 of docs/doctor.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mantissa.finding import LOST, MOMENT, UPDATE
from tests.mantissa.doctor.faults.planted import WIDTH, Block, Expected, Fault, around, mean_square
from trainer.data.contract import Batch
from trainer.optim.optimizer import Optimizer
from trainer.precision.modes import Precision


def faint(output: Tensor, batch: Batch) -> Tensor:
    """Return a thousandth of the mean square."""
    return mean_square(output, batch) * 1e-3


def small_weights() -> nn.Module:
    """Return layer norm between blocks whose weights are so small that bf16 holds their updates."""
    model = around(nn.LayerNorm(WIDTH))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if name.startswith("1.") else 0.01)
    return model


FAULTS = [
    Fault(
        24,
        "AdamW with lr 1e-4 on 16-bit norm weights at 1.0",
        Expected(LOST, UPDATE, "1", "bf16_pure"),
        small_weights,
        Precision(mode="bf16_pure"),
        optimizer=Optimizer(name="AdamW", lr=1e-4),
    ),
    Fault(
        25,
        "Adam's second moment in fp16",
        Expected(MOMENT, UPDATE, ("0.down", "0.up"), "fp16_pure", (LOST,)),
        lambda: nn.Sequential(Block()),
        Precision(mode="fp16_pure"),
        loss=faint,
        optimizer=Optimizer(name="Adam", lr=1e-5),
    ),
]
