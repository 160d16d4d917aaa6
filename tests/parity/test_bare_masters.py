"""16-bit weights against a bare PyTorch loop, by bit: pure, and with fp32 masters as apex's O2 kept them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import compose, copied, fit, same_bits, start, without_padding

STEPS = 9
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("mode", "batch", "accumulation"),
    [(mode, 8, accumulation) for mode in ("bf16_master", "fp16_master", "bf16_pure") for accumulation in (1, 2)]
    + [("bf16_master", 6, 3), ("fp16_master", 6, 3)],
)
def test_gpt2_is_bitwise_the_bare_loop(mode: str, batch: int, accumulation: int) -> None:
    clip = mode.endswith("_master")
    divisor = 8 * 16  # targets, or where these are 6 * 16, the power of two above them
    trainer = start(
        compose(
            *["recipe=gpt2", "recipe.size=tiny", "recipe.context=16", "data=synthetic", "data.vocab_size=90"],
            *[
                f"precision={mode}",
                f"steps={STEPS}",
                f"batch_size={batch}",
                f"micro_batch_size={batch // accumulation}",
            ],
            *["device=cpu", f"clip={'norm' if clip else 'none'}", f"scaler.init={2.0**19}", "scaler.interval=3"],
        )
    )
    config = trainer.config
    torch.manual_seed(config.seed)
    model = config.recipe.build_model(trainer.datasets).train().to(DTYPES[mode[:4]])
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights] if clip else weights
    groups = [
        {"params": [master for master in masters if master.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [master for master in masters if master.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3, enabled=mode == "fp16_master")

    assert same_bits(dict(model.state_dict()), dict(trainer.model.state_dict()))
    before = copied(dict(model.state_dict()))
    steps = list(trainer.batches())
    records = fit(trainer)
    for number, (microbatches, record) in enumerate(zip(steps, records, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * config.schedule.factor(number, STEPS)
        assert record.loss_scale.item() == scaler.get_scale()
        for microbatch in microbatches:
            tokens = microbatch["tokens"]
            logits = without_padding(model.gpt2(tokens[:, :-1], use_cache=False).logits.float(), 90)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / divisor
            scaler.scale(loss).backward()
            for weight, master in zip(weights, masters, strict=True) if clip else ():
                assert weight.grad is not None
                master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad
                weight.grad = None
        if clip:
            scaler.unscale_(optimizer)
            for master in masters if batch == 6 else ():
                master.grad *= divisor / (6 * 16)
            assert same_bits(torch.nn.utils.clip_grad_norm_(masters, 1.0), record.grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if clip:
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
        optimizer.zero_grad()

    skipped = [bool(record.skipped) for record in records]
    assert (skipped[0], skipped.count(False) >= 4) == (mode == "fp16_master", True)
    assert not same_bits(before, dict(model.state_dict()))
    assert same_bits(dict(trainer.model.state_dict()), dict(model.state_dict()))
    assert same_bits(trainer.optimizer.state_dict()["state"], optimizer.state_dict()["state"])
    if clip:
        assert trainer.masters is not None
        held = [master.detach() for _, master in trainer.masters.held()]
        assert same_bits(held, [master.detach() for master in masters])
