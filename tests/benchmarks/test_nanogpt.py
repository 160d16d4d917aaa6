from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import nanogpt as module
from benchmarks.jobs import shakespeare
from benchmarks.nanogpt import DEFAULT, PLAIN, Contest, Contestant, PlainShape, Point, _plain, nanogpt, race, race_rows
from benchmarks.rows import Bench
from recipes.gpt2 import SHAPES
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
    return Contest(job, SHAPE, settings, rounds=4, windows=6, judged_from=0.5, compiled=(False,))


def test_the_recipes_are_the_same_run(shared_data: Path) -> None:
    job = shakespeare(str(shared_data / "tinyshakespeare.txt"))
    config = job.config().resolve(detect("cpu"))
    shape, plan = PlainShape(), config.plan
    own = SHAPES[config.config.recipe.size]  # type: ignore[attr-defined]
    for name in ("layers", "heads", "width", "context"):
        assert getattr(own, name) == getattr(shape, name)
    assert (plan.steps, plan.batching.batch_size, plan.batching.accumulation) == (shape.steps, shape.batch_size, 1)
    optimizer, schedule = config.config.optimizer, config.config.schedule
    for step in (0, 50, 99, 100, 1000, 1999):
        assert optimizer.lr * schedule.factor(step, plan.steps) == pytest.approx(shape.lr_at(step), rel=0.02)
    assert shape.lr_at(5000) == shape.final_lr


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


def _row(steps: int, losses: list[float], seconds_a_step: float) -> Contestant:
    left = iter(losses)
    return Contestant(steps, lambda count: count * seconds_a_step, lambda: next(left))


def test_each_takes_its_share_of_its_steps_in_every_round(contest: Contest) -> None:
    one, other = _row(1000, [3.0, 1.8, 1.7], 1.0), _row(500, [2.0, 1.95, 1.89], 2.0)
    race([one, other], contest)
    assert one.curve == [Point(500, 500, 3.0), Point(750, 750, 1.8), Point(1000, 1000, 1.7)]
    assert other.curve == [Point(500, 250, 2.0), Point(750, 375, 1.95), Point(1000, 500, 1.89)]
    assert (one.reached(1.89), other.reached(1.89)) == (Point(750, 750, 1.8), Point(1000, 500, 1.89))
    assert other.reached(1.5) is None


def test_the_rows_of_a_small_contest(contest: Contest, tmp_path: Path) -> None:
    rows = list(nanogpt(Bench(detect("cpu"), 1, tmp_path, modes=frozenset({"bf16"})), contest))
    assert [row.name.removeprefix("shakespeare, ") for row in rows] == [
        f"step, ours fp32 / {PLAIN} fp32",
        "step, ours fp32 / a bare loop fp32",
        f"step, ours bf16 / {PLAIN} bf16",
        "step, ours bf16 / a bare loop bf16",
        f"step, ours bf16 / {PLAIN} fp32",
        *(f"time to the loss, {name} / {PLAIN}" for name in contest.ours),
    ]
    assert all(min(row.values) > 0 for row in rows)


def test_a_run_that_does_not_reach_the_loss_counts_as_infinite(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [1.8, 1.95, 1.8]  # the loss at the end, with each seed the next one
    monkeypatch.setattr(module, "_ours", lambda *_: _row(400, [2.5, 2.0, ends.pop(0)], 1.0))
    monkeypatch.setattr(module, "_baseline", lambda *_: _row(1000, [2.5, 1.8, 1.7], 1.0))
    (row,) = race_rows(Bench(detect("cpu"), 3, tmp_path), replace(contest, ours={"ours": ("steps=400",)}))
    assert row.values == [400 / 750, math.inf, 400 / 750]
    missed = "1.950 (not reached) after 400 steps and 400.0 s against 1.800 after 750 steps"
    assert str(row).count(missed) == str(row).count("not reached") == 1
