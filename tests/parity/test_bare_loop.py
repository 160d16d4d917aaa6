"""The trainer against a bare PyTorch loop, by bit: the same weights, optimizer state, losses, norms and scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.step.ledger import MemoryLedger
from recipes.gpt2 import GPT2
from tests.helpers import NoData, SmallConvNet, compose, copied, fit, same_bits, start
from tests.parity.bare import Bare, LossSum, gpt2_loss
from trainer.config.schema import Config
from trainer.data.contract import Batch
from trainer.optim.optimizer import Optimizer
from trainer.optim.schedule import Cosine
from trainer.optim.update import Clip, ClipNorm, ClipValue
from trainer.precision.scaler import AutoScaler

STEPS = 9
CLIPS = {"none": Clip, "norm": lambda: ClipNorm(0.5), "value": lambda: ClipValue(0.01)}


def conv_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["image"].to(memory_format=torch.channels_last)).float()
    return F.cross_entropy(logits, batch["label"], reduction="sum")


def gpt2_config(mode: str, clip: str, accumulation: int, batch_size: int = 8, **changes: Any) -> Config:
    config = compose(
        *["recipe=gpt2", "recipe.size=tiny", "recipe.context=16", "data=synthetic", "data.vocab_size=90", "device=cpu"],
        *[f"precision={mode}", f"steps={STEPS}", f"batch_size={batch_size}", "schedule.warmup_steps=2"],
        *[f"micro_batch_size={batch_size // accumulation}", "scaler.interval=4"],
        f"scaler.init={2.0**21}",  # some gradient is then beyond fp16 in the first two steps
    )
    return replace(config, clip=CLIPS[clip](), **changes)


def conv_config(mode: str, clip: str, accumulation: int) -> Config:
    return Config(
        SmallConvNet(),
        NoData(),
        precision=compose(f"precision={mode}").precision,
        # Not in the first step: there, fused SGD under GradScaler leaves its momentum uninitialised.
        scaler=AutoScaler(init=2.0**17, interval=3),
        clip=CLIPS[clip](),
        optimizer=Optimizer("SGD", lr=0.1, weight_decay=1e-3, options={"momentum": 0.9, "nesterov": True}),
        schedule=Cosine(warmup_steps=2),
        device="cpu",
        steps=STEPS,
        batch_size=8,
        micro_batch_size=8 // accumulation,
    )


def compare(config: Config, loss: LossSum) -> list[bool]:
    """Train both, compare every bit, and return which steps were skipped."""
    trainer = start(config)
    steps = list(trainer.batches())
    assert [len(step) for step in steps] == [trainer.plan.batching.accumulation] * STEPS
    bare = Bare.of(trainer, loss)
    before = copied(dict(bare.model.state_dict()))
    assert same_bits(before, dict(trainer.model.state_dict()))
    records = fit(trainer)
    for microbatches in steps:
        bare.step(microbatches, sum(config.recipe.count_targets(batch) for batch in microbatches))
    assert not same_bits(before, dict(bare.model.state_dict()))
    return bare.check(trainer, records)


@pytest.mark.parametrize(
    ("clip", "batch_size", "accumulation"),
    [("none", 8, 1), ("norm", 8, 4), ("norm", 6, 3), ("value", 6, 3)],  # 96 targets are no power of two
)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_gpt2_with_adamw_is_bitwise_the_bare_loop(mode: str, clip: str, batch_size: int, accumulation: int) -> None:
    skipped = compare(gpt2_config(mode, clip, accumulation, batch_size), gpt2_loss(90))
    if mode == "fp16":
        assert skipped[:2] == [True, True]  # a real overflow, at the start
        assert skipped.count(False) >= 4
    else:
        assert not any(skipped)


@pytest.mark.parametrize(
    ("mode", "batch_size", "accumulation"),
    [("bf16_master", 8, 1), ("bf16_master", 6, 3), ("fp16_master", 8, 2), ("fp16_master", 6, 3), ("bf16_pure", 8, 2)],
)
def test_16_bit_weights_are_bitwise_the_bare_loops(mode: str, batch_size: int, accumulation: int) -> None:
    clip, scaler = "none" if mode == "bf16_pure" else "norm", AutoScaler(init=2.0**19, interval=3)
    skipped = compare(gpt2_config(mode, clip, accumulation, batch_size, scaler=scaler), gpt2_loss(90))
    assert (skipped[0], skipped.count(False) >= 4) == (mode == "fp16_master", True)


@pytest.mark.parametrize(("clip", "accumulation"), [("none", 1), ("norm", 4)])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_convnet_with_sgd_is_bitwise_the_bare_loop(mode: str, clip: str, accumulation: int) -> None:
    skipped = compare(conv_config(mode, clip, accumulation), conv_loss)
    assert any(skipped) == (mode == "fp16")
    assert skipped.count(False) >= 4


@pytest.mark.parametrize(
    ("mode", "accumulation", "size"),
    [("fp32", 1, "wide"), ("fp32", 4, "wide"), ("bf16", 4, "wide"), ("bf16", 4, "tiny")],
)
def test_the_step_takes_no_more_memory_than_the_bare_loop(mode: str, accumulation: int, size: str) -> None:
    config = gpt2_config(mode, "norm", accumulation)
    assert isinstance(config.recipe, GPT2)
    config = replace(config, recipe=replace(config.recipe, size=size))
    if size == "wide":
        config = replace(config, batch_size=4, micro_batch_size=4 // accumulation)
    trainer = start(config)
    bare = Bare.of(trainer, gpt2_loss(90))
    peaks = []
    first, second, third = [step for step, _ in zip(trainer.batches(), range(3), strict=False)]
    for model, optimizer, step in (
        (bare.model, bare.optimizer, lambda batches: bare.step(batches, 128)),
        (trainer.model, trainer.optimizer, trainer.train_step),
    ):
        model.train()
        step(first)
        step(second)  # the optimizer state exists
        with MemoryLedger(model, optimizer) as ledger:
            step(third)
        peaks.append(ledger.report().peak_bytes)
        if size == "wide":
            weights = sum(parameter.numel() * 4 for parameter in model.parameters())
            assert peaks[-1] < 4.9 * weights  # so that a copy of the gradients, kept anywhere in the step, would show
    assert peaks[1] <= 1.02 * peaks[0], f"bare {peaks[0]} bytes, trainer {peaks[1]}"
