"""What a rank of ``tests.parallel.ranks`` finds about optimizers and frozen weights: three steps of a small model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers import compose, copied, fit
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import Snapshot
from trainer.errors import UserError
from trainer.hardware import detect
from trainer.parallel.shards import is_sharded
from trainer.profiling.diagnostics import Diagnostics, Numerics
from trainer.profiling.flops import ModelFlops
from trainer.trainer import Trainer

SMALL = ("recipe=bignet", "recipe.width=12", "recipe.layers=12", "data.samples=64", "schedule=linear", "device=cpu")
TEXT = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64", "device=cpu")
# No batch norm, whose statistics would be those of each rank.
IMAGES = ("recipe=resnet", "recipe.arch=timm/test_convnext", "data=digits", "augment=light", "device=cpu")
STEPS = ("steps=4", "batch_size=8", "micro_batch_size=2", "clip=norm", "eval_samples=4")
RULES: dict[str, tuple[str, ...]] = {
    "freeze bf16_master": (
        *("freeze=['0.?',2.4.bias]", "precision=bf16_master", "ema=default", "ema.decay=0.5", "optimizer.lr=0.1"),
    ),
    "lamb bf16_master": ("optimizer=lamb", "precision=bf16_master"),
    **{mode: ("optimizer=sgd", "optimizer.lr=0.1", f"precision={mode}") for mode in ("bf16_sr", "bf16_pure")},
    "fp32 then fp16, bf16 state": (
        *("precision=fp32", "precision.then=fp16", "precision.until=2", "optimizer.state=bf16"),
        "optimizer.layer_decay=0.8",
    ),
    "fp64": (
        *("precision=fp64", "optimizer=muon", "optimizer.lr=0.02", "ema=default", "activation_checkpointing=blocks"),
        "optimizer.groups={0.0.*:{lr:3},bias:{lr:0.5},1.?:{weight_decay:0.5}}",
    ),
    "mixing": ("augment.mixup=0.4", "augment.cutmix=1"),
    "lora fp16_master": (
        *("recipe.lora.rank=2", "optimizer=sgd", "optimizer.lr=0.5", "precision=fp16_master", "scaler.init=1024"),
    ),
}
"""Overrides by name. Each is of what a rank could do otherwise than one process, as many in one run as go together."""
REFUSED_BY_FSDP: dict[str, tuple[tuple[str, ...], str]] = {
    "adafactor": (("optimizer=adafactor",), "set parallel=ddp or optimizer=adamw"),
    "bf16_sr": (RULES["bf16_sr"], "set precision=bf16_master or parallel=ddp"),
    "fp16_pure": (
        ("optimizer=sgd", "precision=fp16_pure"),  # no fused SGD
        "set optimizer=adamw optimizer.name=AdamW or precision=fp16_master",
    ),
}
"""Overrides, and words of the error."""


def whole(tensor: Any) -> Tensor:
    """A copy, put together from the ranks' parts where it is sharded."""
    full: Tensor = (tensor.full_tensor() if is_sharded(tensor) else tensor).detach().clone()
    return full


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}


def found(mode: str, device: str) -> dict[str, Any]:
    """Every rule: losses and the change of the weights in three steps, and a fourth one after a checkpoint."""
    refused = REFUSED_BY_FSDP if mode == "fsdp" else {}
    return {name: _found(mode, device, name) for name in RULES if name not in refused}


def refusals(device: str) -> dict[str, str]:
    """What FSDP says to each of those."""
    return {name: _refusal(device, *overrides) for name, (overrides, _) in REFUSED_BY_FSDP.items()}


def _refusal(device: str, *overrides: str) -> str:
    try:
        _trainer("fsdp", device, *overrides)
    except UserError as error:
        return str(error)
    return "accepted"


def _found(mode: str, device: str, name: str) -> dict[str, Any]:
    trainer, other = (_trainer(mode, device, *RULES[name]) for _ in range(2))
    flops = ModelFlops()
    trainer.observe(flops)
    first = copied(weights(trainer))
    half = trainer.config.precision.format.half_weights
    diagnostics = (Numerics(1) if half and "lamb" not in name else Diagnostics()).start(
        trainer.model, trainer.update, half, trainer.world
    )
    diagnostics.begin(1)
    records = fit(trainer, 1)
    trainer.update.meter = None
    records += fit(trainer, 3)
    folder = Path(sys.argv[2]) / f"{mode}-{name.replace(' ', '-')}"
    checkpoint.write(folder, Snapshot.of(trainer.state_dict(), {}, trainer.world), None, trainer.world)
    saved = load(folder)
    saved.loss_scale = trainer.loss_scale.state_dict()
    other.restore(saved)
    last = weights(trainer)
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    fit(trainer)
    fit(other)
    after, again = weights(trainer), weights(other)
    return {
        "model_flops": list(flops.per_unit("samples", 2)),
        "numerics": dict(diagnostics.collect()),
        "losses": [trainer.world.all_reduce_sum(record.loss.double()).item() for record in records],
        "change": torch.cat([(last[key] - first[key]).flatten().double() for key in trained]).tolist(),
        "unchanged": [key for key in first if torch.equal(first[key], after[key])],
        "score": trainer.evaluate()["loss"],
        "moved in the last step": any(not torch.equal(last[key], after[key]) for key in last),
        "resumed alike": all(torch.equal(after[key], again[key]) for key in after),
        "saved": sorted(key for key in saved.tensors() if key.startswith("optimizer/")),
    }


def _trainer(mode: str, device: str, *overrides: str) -> Trainer:
    jobs = {"recipe.lora": TEXT, "augment": IMAGES}
    small = next((jobs[key] for key in jobs if any(override.startswith(key) for override in overrides)), SMALL)
    config = compose(*small, *STEPS, f"parallel={mode}", *overrides)
    return Trainer.from_config(config, detect(device), config.parallel.world(device))
