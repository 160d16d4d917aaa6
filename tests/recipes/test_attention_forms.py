from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes import attention
from recipes.attention import Shape, choose, measure
from tests.helpers import CPU, compose, fit, trainer_of
from trainer.config.registration import flatten
from trainer.hardware import Hardware, detect
from trainer.recipe import Choice
from trainer.run.start import train
from trainer.trainer import Trainer

BASE = ["recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=2", "steps=2", "eval_samples=2"]
MODELS = {
    "gpt2": ["recipe=gpt2", "recipe.size=nano", *BASE],
    "llama": ["recipe=llama", "recipe.size=nano", *BASE],  # two heads of queries to one of keys
}
H100 = Hardware(torch.device("cuda", 0), "H100", 2**36, 8, (9, 0))
SHAPE = Shape(2, 4, 16, 32, 0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """The times that a measurement finds; ``calls`` counts the measurements."""
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    times = {"sdpa": 1.0, "sdpa_fp32": 0.5, "calls": 0.0}

    def found(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
        times["calls"] += 1
        return {name: times[name] for name in ("sdpa", "sdpa_fp32")}

    monkeypatch.setattr(attention, "measure", found)
    monkeypatch.setattr(attention, "choose", choose)
    return times


def formats(trainer: Trainer) -> list[tuple[torch.dtype, bool]]:
    """What fused attention gets in a step, and whether autocast would change it."""
    seen: list[tuple[torch.dtype, bool]] = []
    fused = F.scaled_dot_product_attention

    def noted(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return fused(query, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", noted)
        fit(trainer, trainer.step + 1)
    return seen


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", ["bf16", "fp16", "bf16_master"])
def test_sdpa_fp32_computes_in_fp32_and_returns_16_bits(model: str, mode: str) -> None:
    one, other = (trainer_of(*MODELS[model], f"precision={mode}", f"recipe.attention={form}")
                  for form in ("sdpa_fp32", "sdpa"))  # fmt: skip
    assert one.model.network.config._attn_implementation == "sdpa_fp32_causal"
    batch = next(one.batches())[0]
    with torch.no_grad(), one.config.precision.autocast(one.device):
        losses = [trainer.recipe.loss(trainer.model, batch).loss_sum.item() for trainer in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    seen = formats(one)
    assert len(seen) == 4
    assert set(seen) == {(torch.float32, False)}
    assert set(formats(other)) != set(seen)


def test_it_is_exactly_attention_of_the_rounded_values_in_fp32() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 16, 8).bfloat16() for _ in range(3))
    trainer = trainer_of(*MODELS["gpt2"], "precision=bf16", "recipe.attention=sdpa_fp32")
    module = trainer.recipe.blocks(trainer.model)[0].attn
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = attention._attention_in_fp32(module, query, key, value, None, is_causal=True)
    expected = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected.transpose(1, 2).bfloat16())


def test_auto_is_what_is_clearly_faster_and_measures_once(measured: dict[str, float]) -> None:
    for _ in range(2):
        choice = choose(SHAPE, torch.bfloat16, CPU, False)
        assert choice[:2] == ("recipe.attention", "sdpa_fp32")
        assert choice.why == "measured at 2 × 4 × 16 × 32, forward and backward: sdpa 1e+03 ms and sdpa_fp32 500 ms"
    assert measured["calls"] == 1
    measured["sdpa_fp32"] = 0.95
    assert choose(SHAPE, torch.float16, CPU, False).value == "sdpa"
    assert measured["calls"] == 2


@pytest.mark.parametrize(
    ("dtype", "hardware", "deterministic"),
    [(None, CPU, False), (torch.bfloat16, H100, False), (torch.bfloat16, CPU, True)],
    ids=["fp32", "GPU", "deterministic"],
)
def test_auto_is_sdpa_without_a_measurement(
    dtype: Any, hardware: Hardware, deterministic: bool, measured: dict[str, float]
) -> None:
    assert choose(SHAPE, dtype, hardware, deterministic).value == "sdpa"
    assert measured["calls"] == 0


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (Shape(12, 4, 64, 32, 0.0), (12, 4)),
        (Shape(512, 4, 64, 32, 0.0), (32, 4)),
        (Shape(16, 12, 1024, 64, 0.0), (1, 1)),
        (Shape(3, 8, 512, 64, 0.0), (1, 2)),
    ],
)
def test_a_measurement_takes_a_part_of_a_large_microbatch(
    shape: Shape, part: tuple[int, int], monkeypatch: pytest.MonkeyPatch, measured: dict[str, float]
) -> None:
    asked: list[Shape] = []
    monkeypatch.setattr(attention, "measure", lambda shape, dtype: asked.append(shape) or {"sdpa": 1, "sdpa_fp32": 1})
    choose(shape, torch.bfloat16, CPU, False)
    assert asked == [shape._replace(samples=part[0], heads=part[1])]


def test_a_real_measurement_times_both_and_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    times = measure(Shape(1, 2, 16, 8, 0.1), torch.bfloat16)
    assert list(times) == ["sdpa", "sdpa_fp32"]
    assert all(0 < seconds < 60 for seconds in times.values())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_trains_and_records_and_reports_the_choice(model: str, measured: dict[str, float]) -> None:
    trainer = trainer_of(*MODELS[model], "precision=bf16")
    assert [choice[:2] for choice in trainer.choices] == [("recipe.attention", "sdpa_fp32")]
    assert flatten(trainer.config)["recipe.attention"] == "sdpa_fp32"
    assert trainer.model.network.config._attn_implementation == "sdpa_fp32_causal"
    assert trainer_of(*MODELS[model], "precision=bf16", "recipe.attention=sdpa").choices == []


def test_a_resumed_run_keeps_what_was_chosen_and_measures_nothing(
    measured: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [*MODELS["gpt2"], "precision=bf16", "device=cpu", "tracking=local", "resume=auto", "checkpoint.every=1"]
    train(compose(*command))
    path = tmp_path / "outputs" / "gpt2-bf16-s0" / "config.json"
    assert json.loads(path.read_text())["recipe.attention"] == "sdpa_fp32"
    measured["sdpa_fp32"], calls = 9.0, measured["calls"]
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "another"))
    train(compose(*command, "steps=4"))
    assert json.loads(path.read_text())["recipe.attention"] == "sdpa_fp32"
    # A run of a version that knew no other form.
    path.write_text(path.read_text().replace("sdpa_fp32", "sdpa"))
    measured["sdpa_fp32"] = 0.1
    train(compose(*command, "steps=6"))
    assert json.loads(path.read_text())["recipe.attention"] == "sdpa"
    assert measured["calls"] == calls
    assert json.loads(path.with_name("summary.json").read_text())["steps"] == 6


def test_every_rank_takes_what_rank_0_measured(measured: dict[str, float]) -> None:
    from trainer.parallel.world import World

    class Second(World):
        rank, size = 1, 1

        def on_first(self, work: Any) -> Any:
            return [Choice("recipe.attention", "sdpa_fp32", "")]

    config, plan, *_ = compose(*MODELS["gpt2"], "precision=bf16", "device=cpu").resolve(detect("cpu"))
    assert config.recipe.attention == "auto"
    trainer = Trainer.__new__(Trainer)
    trainer.world, trainer.plan, trainer.hardware = Second(), plan, detect("cpu")
    trainer.datasets = config.recipe.datasets(config.data, 0)
    settled, _ = trainer._with_data(config)
    assert settled.recipe.attention == "sdpa_fp32"
    assert measured["calls"] == 0
