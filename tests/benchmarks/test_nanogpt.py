from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.jobs import shakespeare
from benchmarks.nanogpt import DEFAULT, PLAIN, Contest, PlainShape, _plain, nanogpt
from benchmarks.rows import Bench
from trainer.hardware import detect
from trainer.trainer import Trainer

SHAPE = PlainShape(context=8, layers=2, heads=2, width=16, batch_size=4, steps=8, warmup=2)


@pytest.fixture
def contest(tmp_path: Path) -> Contest:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    small = ("recipe.context=8", "batch_size=4", "steps=8", "eval_samples=4")
    job = replace(shakespeare(str(text)), steps=1)
    job = replace(job, overrides=(*job.overrides, *small))
    settings = {DEFAULT: (), "ours, other options": ("steps=4",)}
    return Contest(job, SHAPE, settings, rounds=4, windows=6, judged_from=0.5)


def test_the_models_are_the_same_function(contest: Contest) -> None:
    trainer = Trainer.from_config(contest.job.config("recipe.vocabulary_multiple=1", "recipe.context=64"))
    plain = _plain(replace(contest, shape=PlainShape()), trainer, seed=0).model
    ours = dict(trainer.model.named_parameters())
    biases = sum(parameter.numel() for name, parameter in ours.items() if name.endswith("bias"))
    assert sum(parameter.numel() for parameter in plain.parameters()) == sum(map(torch.numel, ours.values())) - biases
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # else all blocks add next to nothing
        _copy(plain, ours)
    for block in plain.blocks:
        block.gelu = nn.GELU(approximate="tanh")
    batch = next(trainer.batches())[0]
    tokens = batch["tokens"]
    ours_loss = trainer.recipe.loss(trainer.model, batch).loss_sum / trainer.recipe.count_targets(batch)
    assert plain(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(ours_loss.item(), rel=1e-6)


def _copy(plain: nn.Module, ours: dict[str, nn.Parameter]) -> None:
    names = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "attended": "attn.c_proj"}
    names |= {"wide": "mlp.c_fc", "narrow": "mlp.c_proj"}
    outer = {"tokens.weight": "wte.weight", "positions.weight": "wpe.weight", "norm.weight": "ln_f.weight"}
    for name, parameter in plain.named_parameters():
        if name in outer:
            own = ours[f"gpt2.transformer.{outer[name]}"]
        else:
            _, number, layer, _ = name.split(".")
            own = ours[f"gpt2.transformer.h.{number}.{names[layer]}.weight"]
        # transformers keeps weights of layers as inputs × outputs
        own.copy_(parameter.T if parameter.ndim == 2 and name not in outer else parameter)


def test_the_rows_of_a_small_contest(contest: Contest, tmp_path: Path) -> None:
    rows = list(nanogpt(Bench(detect("cpu"), 1, tmp_path, modes=frozenset({"bf16"})), contest))
    assert [row.name for row in rows] == [f"shakespeare, time to the loss, {name} / {PLAIN}" for name in contest.ours]
    assert all(min(row.values) > 0 for row in rows)
