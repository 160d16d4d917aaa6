"""A training loop in plain PyTorch, as anyone would write it, to compare the trainer with by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.formats import FORMATS, Format
from tests.helpers import same_bits, without_padding
from trainer.data.contract import Batch
from trainer.optim.update import Clip, ClipNorm, ClipValue
from trainer.trainer import StepRecord, Trainer

LossSum = Callable[[nn.Module, Batch], Tensor]


def gpt2_loss(vocabulary: int) -> LossSum:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch["tokens"].to(next(model.parameters()).device)
        logits = without_padding(model.gpt2(tokens[:, :-1], use_cache=False).logits.float(), vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    return loss


@dataclass
class Bare:
    """The loop, with fp32 masters of 16-bit weights as apex's O2 kept them.

    It is a plain one but for a mean in two factors where backward is 16-bit: the loss is divided by the power of two
    above its targets, and the unscaled gradients are multiplied by what is left.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_sum: LossSum
    format: Format
    clip: Clip
    scaler: torch.amp.GradScaler
    lrs: list[float]
    weights: list[nn.Parameter]
    masters: list[nn.Parameter]
    """What the optimizer changes: the weights themselves, or fp32 copies of them."""
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: Trainer, loss_sum: LossSum) -> Bare:
        """Return the loop of what a new trainer trains, from the same first weights."""
        config, format = trainer.config, FORMATS[trainer.config.precision.mode]
        torch.manual_seed(config.seed)
        model = config.recipe.build_model(trainer.datasets).to(trainer.device).train()
        if format.half_weights:
            model.to(format.half_weights)
        weights = list(model.parameters())
        masters = [nn.Parameter(weight.detach().float()) for weight in weights] if format.masters else weights
        groups = [
            {"params": [each for each in masters if each.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
            {"params": [each for each in masters if each.ndim < 2], "weight_decay": 0.0},
        ]
        if config.optimizer.name == "AdamW":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
        else:
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, fused=True)
        scaling = {"init_scale": config.scaler.init, "growth_interval": config.scaler.interval}
        scaler = torch.amp.GradScaler(trainer.device.type, enabled=format.needs_loss_scale, **scaling)
        steps = trainer.plan.steps
        lrs = [config.optimizer.lr * config.schedule.factor(step, steps) for step in range(steps)]
        return cls(model, optimizer, loss_sum, format, config.clip, scaler, lrs, weights, masters)

    def step(self, microbatches: list[Batch], targets: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lrs[len(self.losses)]
        self.scales.append(self.scaler.get_scale())
        device, dtype = self.weights[0].device, self.format.autocast
        power = targets if self.format.half is None else 2 ** math.ceil(math.log2(targets))
        total = torch.zeros((), device=device)
        for batch in microbatches:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = self.loss_sum(self.model, batch) / power
            self.scaler.scale(loss).backward()
            total += loss.detach()
            for weight, master in zip(self.weights, self.masters, strict=True) if self.format.masters else ():
                master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad
                weight.grad = None
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        for master in self.masters if power != targets else ():
            master.grad *= power / targets
        if isinstance(self.clip, ClipNorm):
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.masters, self.clip.max_norm))
        elif isinstance(self.clip, ClipValue):
            torch.nn.utils.clip_grad_value_(self.masters, self.clip.max_value)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True) if self.format.masters else ():
                weight.copy_(master)
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(total * (power / targets))

    def check(self, trainer: Trainer, records: list[StepRecord]) -> list[bool]:
        """Compare every bit with what the trainer did in the same steps, and return which it skipped."""
        assert same_bits([record.loss for record in records], self.losses)
        if self.norms:
            assert same_bits([record.grad_norm for record in records], self.norms)
        assert [record.loss_scale.item() for record in records] == self.scales
        assert trainer.loss_scale.scale.item() == self.scaler.get_scale()
        assert same_bits(dict(trainer.model.state_dict()), dict(self.model.state_dict()))
        assert same_bits(trainer.optimizer.state_dict()["state"], self.optimizer.state_dict()["state"])
        if trainer.masters is not None:
            held = [master.detach() for _, master in trainer.masters.persistent_weights()]
            assert same_bits(held, [master.detach() for master in self.masters])
        return [bool(record.skipped) for record in records]
