"""The trainer against a bare PyTorch loop, by bit: the same weights, optimizer state, losses, norms and scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.gpt2 import GPT2
from tests.helpers import NoData, SmallConvNet, compose, fit, same_bits, start, without_padding
from trainer.config.schema import Config
from trainer.data.contract import Batch
from trainer.optim.optimizer import Optimizer
from trainer.optim.schedule import Cosine
from trainer.optim.update import Clip, ClipNorm, ClipValue
from trainer.precision.scaler import AutoScaler
from trainer.profiling.ledger import MemoryLedger
from trainer.trainer import Trainer

STEPS = 9
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CLIPS = {"none": Clip, "norm": lambda: ClipNorm(0.5), "value": lambda: ClipValue(0.01)}


@dataclass
class Bare:
    """A plain training loop, as anyone would write it, but for a mean in two factors where backward is 16-bit.

    The loss is divided by the power of two above its targets; the unscaled gradients are multiplied by what is left.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_sum: Callable[[nn.Module, Batch], Tensor]
    mode: str
    clip: str
    scaler: torch.amp.GradScaler
    lrs: list[float]
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def step(self, microbatches: list[Batch], targets: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lrs[len(self.losses)]
        self.scales.append(self.scaler.get_scale())
        total = torch.zeros(())
        power = targets if self.mode == "fp32" else 2 ** math.ceil(math.log2(targets))
        for batch in microbatches:
            dtype = DTYPES.get(self.mode)
            with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                loss = self.loss_sum(self.model, batch) / power
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer) if self.scaler.is_enabled() else None
        for parameter in self.model.parameters() if power != targets else ():
            assert parameter.grad is not None
            parameter.grad *= power / targets
        if self.clip == "norm":
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        elif self.clip == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(total * (power / targets))


def gpt2_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    logits = without_padding(model.gpt2(tokens[:, :-1], use_cache=False).logits, 90)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def conv_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["image"].to(memory_format=torch.channels_last)).float()
    return F.cross_entropy(logits, batch["label"], reduction="sum")


def gpt2_config(mode: str, clip: str, accumulation: int) -> Config:
    config = compose(
        *["recipe=gpt2", "recipe.size=tiny", "recipe.context=16", "data=synthetic", "data.vocab_size=90", "device=cpu"],
        f"precision={mode}",
        f"steps={STEPS}",
        "batch_size=8",
        f"micro_batch_size={8 // accumulation}",
        f"scaler.init={2.0**21}",  # some gradient is then beyond fp16 in the first two steps
        "scaler.interval=4",
        "schedule.warmup_steps=2",
    )
    return replace(config, clip=CLIPS[clip]())


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


def bare_of(trainer: Trainer, loss: Callable[[nn.Module, Batch], Tensor], mode: str, clip: str) -> Bare:
    config = trainer.config
    torch.manual_seed(config.seed)
    model = config.recipe.build_model(trainer.datasets).train()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.optimizer.name == "AdamW":
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, fused=True)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=config.scaler.init, growth_interval=config.scaler.interval, enabled=mode == "fp16"
    )
    lrs = [config.optimizer.lr * config.schedule.factor(step, STEPS) for step in range(STEPS)]
    return Bare(model, optimizer, loss, mode, clip, scaler, lrs)


def compare(config: Config, loss: Callable[[nn.Module, Batch], Tensor], mode: str, clip: str) -> list[bool]:
    """Train both, compare every bit, and return which steps were skipped."""
    trainer = start(config)
    steps = list(trainer.batches())
    assert [len(step) for step in steps] == [trainer.plan.batching.accumulation] * STEPS
    bare = bare_of(trainer, loss, mode, clip)
    before = {name: tensor.clone() for name, tensor in bare.model.state_dict().items()}
    assert same_bits(before, dict(trainer.model.state_dict()))
    records = fit(trainer)
    for microbatches in steps:
        bare.step(microbatches, sum(config.recipe.count_targets(batch) for batch in microbatches))

    assert same_bits([record.loss for record in records], bare.losses)
    if clip == "norm":
        assert same_bits([record.grad_norm for record in records], bare.norms)
    assert [record.loss_scale.item() for record in records] == bare.scales
    assert trainer.loss_scale.scale.item() == bare.scaler.get_scale()
    assert same_bits(dict(trainer.model.state_dict()), dict(bare.model.state_dict()))
    assert not same_bits(before, dict(bare.model.state_dict()))
    assert same_bits(trainer.optimizer.state_dict()["state"], bare.optimizer.state_dict()["state"])
    return [bool(record.skipped) for record in records]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", ["none", "norm", "value"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_gpt2_with_adamw_is_bitwise_the_bare_loop(mode: str, clip: str, accumulation: int) -> None:
    skipped = compare(gpt2_config(mode, clip, accumulation), gpt2_loss, mode, clip)
    if mode == "fp16":
        assert skipped[:2] == [True, True]  # a real overflow, at the start
        assert skipped.count(False) >= 4
    else:
        assert not any(skipped)


@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_targets_that_are_no_power_of_two_are_no_exception(mode: str, clip: str) -> None:
    config = replace(gpt2_config(mode, clip, 4), batch_size=6)  # 96 targets in three microbatches
    skipped = compare(config, gpt2_loss, mode, clip)
    assert skipped.count(False) >= 4


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_convnet_with_sgd_is_bitwise_the_bare_loop(mode: str, clip: str, accumulation: int) -> None:
    skipped = compare(conv_config(mode, clip, accumulation), conv_loss, mode, clip)
    assert any(skipped) == (mode == "fp16")
    assert skipped.count(False) >= 4


@pytest.mark.parametrize("size", ["tiny", "wide"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_step_takes_no_more_memory_than_the_bare_loop(mode: str, accumulation: int, size: str) -> None:
    config = gpt2_config(mode, "norm", accumulation)
    assert isinstance(config.recipe, GPT2)
    config = replace(config, recipe=replace(config.recipe, size=size))
    if size == "wide":
        config = replace(config, batch_size=4, micro_batch_size=4 // accumulation)
    trainer = start(config)
    bare = bare_of(trainer, gpt2_loss, mode, "norm")
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
