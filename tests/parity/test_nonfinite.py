"""An injected infinity: weights and optimizer stay as they were, bit for bit, and the run continues or ends."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import copied, same_bits, trainer_of
from trainer.data.contract import Batch
from trainer.errors import NonFiniteError
from trainer.run.monitor import Monitor
from trainer.trainer import StepRecord, Trainer

BIGNET = ["recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "micro_batch_size=2", "steps=40"]


def bignet(*overrides: str) -> tuple[Trainer, list[list[Batch]]]:
    trainer = trainer_of(*BIGNET, "schedule=constant", *overrides)
    return trainer, list(trainer.batches())


def watched(trainer: Trainer, log_every: int = 1) -> Monitor:
    monitor = Monitor(trainer)
    monitor.log_every = log_every
    return monitor


def poisoned(microbatches: list[Batch], value: float = float("inf")) -> list[Batch]:
    """The same step with one bad number in its second microbatch."""
    bad = {name: tensor.clone() for name, tensor in microbatches[1].items()}
    bad["y"][0, 3] = value
    return [microbatches[0], bad, *microbatches[2:]]


def state(trainer: Trainer) -> tuple[object, object]:
    return copied(trainer.model.state_dict()), copied(trainer.optimizer.state_dict()["state"])


STATIC = ("scaler=static", "scaler.scale=1024")


@pytest.mark.parametrize(
    ("clip", "value", "optimizer", "scaler", "after"),
    [
        ("none", math.inf, "adamw", ("scaler.init=1024",), 512),
        ("norm", math.nan, "sgd", ("scaler.init=1024",), 512),
        ("value", -math.inf, "adamw", ("scaler.init=1024",), 512),
        ("norm", math.inf, "rmsprop", STATIC, 1024),
    ],
)
def test_fp16_skips_the_step_halves_a_dynamic_scale_and_continues(
    clip: str, value: float, optimizer: str, scaler: tuple[str, ...], after: float
) -> None:
    trainer, steps = bignet("precision=fp16", *scaler, f"clip={clip}", f"optimizer={optimizer}")
    monitor = watched(trainer)
    for step in steps[:2]:
        monitor.add(trainer.train_step(step))
    before = state(trainer)

    record = trainer.train_step(poisoned(steps[2], value))
    monitor.add(record)
    assert bool(record.skipped)
    assert not torch.isfinite(record.grad_norm)
    assert (record.loss_scale.item(), trainer.loss_scale.scale.item()) == (1024, after)
    assert same_bits(state(trainer), before)
    assert monitor.skipped_steps == 1
    assert trainer.step == 3  # an attempted step counts

    record = trainer.train_step(steps[3])
    monitor.add(record)
    assert not record.skipped
    assert record.loss_scale.item() == after
    assert [same_bits(*pair) for pair in zip(state(trainer), before, strict=True)] == [False, False]
    assert monitor.skipped_steps == 1


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_without_a_loss_scale_the_update_and_all_later_ones_are_blocked(mode: str) -> None:
    trainer, steps = bignet(f"precision={mode}", "log_every=5", "clip=norm")
    monitor = watched(trainer, log_every=5)
    for step in steps[:2]:
        monitor.add(trainer.train_step(step))
    before = state(trainer)
    records: list[StepRecord] = [trainer.train_step(poisoned(steps[2])), trainer.train_step(steps[3])]
    assert [bool(record.skipped) for record in records] == [True, True]
    assert torch.isfinite(records[1].grad_norm)  # blocked for what came before it
    assert same_bits(state(trainer), before)
    for record in records:
        monitor.add(record)  # not a log step: nothing is read yet
    with pytest.raises(NonFiniteError, match="step 3"):
        monitor.add(trainer.train_step(steps[4]))
    assert same_bits(state(trainer), before)
