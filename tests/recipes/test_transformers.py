"""What holds for every recipe of one of transformers' models: sizes, gradients, learning, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.gpt2 import GPT2
from tests.helpers import CPU, GPU, compose, context, fit, gradients, same_bits, trainer_of
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.recipe import Sizes

DATA = ("data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16")
TINY = {
    "llama": ("recipe=llama", "recipe.layers=2", "recipe.width=32", "recipe.heads=4", "recipe.kv_heads=2",
              "recipe.ffn=48", "recipe.context=16", *DATA),
    "bert": ("recipe=bert", "recipe.context=24", *DATA),
    "t5": ("recipe=t5", "recipe.context=24", *DATA),
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "size", "more", "vocabulary", "blocks", "parameters"),
    [
        ("gpt2", "124M", "vocabulary_multiple=1", 50257, 12, 124_439_808),
        ("gpt2", "350M", "vocabulary_multiple=1", 50257, 24, 354_823_168),
        ("gpt2", "774M", "vocabulary_multiple=1", 50257, 36, 774_030_080),
        ("gpt2", "1558M", "vocabulary_multiple=1", 50257, 48, 1_557_611_200),
        ("llama", "1B", "ffn=null", 128256, 16, 1_235_814_400),
        ("llama", "8B", "ffn=null", 128256, 32, 8_030_261_248),
        ("llama", "8B", "layers=4", 128256, 4, 8_030_261_248 - 28 * 218_112_000),
        ("bert", "base", "context=512", 30518, 12, 109_514_298),
        ("bert", "large", "context=512", 30518, 24, 335_174_458),
        ("t5", "small", "context=512", 32000, 12, 60_506_624),
        ("t5", "base", "context=512", 32000, 24, 222_903_552),
    ],
)
def test_published_sizes_have_their_parameters(
    recipe: str, size: str, more: str, vocabulary: int, blocks: int, parameters: int
) -> None:
    job = (f"recipe={recipe}", f"recipe.size={size}", f"recipe.{more}", "data=synthetic")
    config = plan_of(compose(*job, f"data.vocab_size={vocabulary}"), CPU).config
    datasets = config.open_datasets()
    with torch.device("meta"):
        model = config.recipe.build_model(datasets)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(config.recipe.blocks(model)) == blocks


@pytest.mark.parametrize(
    ("recipe", "on_cpu", "on_gpu"),
    [
        ("gpt2", ("mini", 256, (200, 16, 16)), ("124M", 1024, (300, 32, 32))),
        ("llama", ("nano", 64, (200, 16, 16)), ("1B", 8192, (50, 8, 1))),
        ("bert", ("nano", 64, (1500, 32, 32)), ("base", 512, (500, 32, 32))),
        ("t5", ("nano", 64, (500, 32, 32)), ("small", 512, (500, 32, 32))),
    ],
)
def test_auto_is_small_on_a_cpu_and_published_on_a_gpu(
    recipe: str, on_cpu: tuple[str, int, tuple[int, int, int]], on_gpu: tuple[str, int, tuple[int, int, int]]
) -> None:
    for hardware, (size, length, sizes) in ((CPU, on_cpu), (GPU, on_gpu)):
        config = compose(f"recipe={recipe}", "data=synthetic")
        _, choices = config.recipe.resolve(context(config.data, hardware))
        found = [(choice.key, choice.value) for choice in choices]
        assert found == [("recipe.size", size), ("recipe.context", length)]
        assert replace(config.recipe.sizes(hardware), why="") == Sizes(*sizes)


@pytest.mark.parametrize(("flags", "cores", "batch_size"), [((), 2, 4), ((), 8, 16), (("avx512_bf16",), 2, 16)])
def test_a_slow_cpu_has_smaller_batches(flags: tuple[str, ...], cores: int, batch_size: int) -> None:
    hardware = replace(CPU, cpu_flags=frozenset(flags), cpu_cores=cores)
    plan = plan_of(compose("recipe=gpt2", "data=synthetic"), hardware)
    assert (plan.config.batch_size, plan.batching.batch_size, plan.steps) == (batch_size, batch_size, 200)
    other = plan_of(compose("recipe=gpt2", "recipe.size=nano", "data=synthetic"), hardware)
    assert other.batching.batch_size == 16  # takes seconds anyway


def test_a_few_steps_of_t5_learn_in_fp16() -> None:
    """The model and the format that overflow; the others learn from pretrained weights, in bf16."""
    sizes = ("batch_size=4", "micro_batch_size=2", "optimizer.lr=0.01", "steps=40")
    trainer = trainer_of(*TINY["t5"], "precision=fp16", *sizes)
    before = trainer.evaluate()["loss"]
    records = fit(trainer)
    assert not any(record.skipped for record in records[5:])
    assert trainer.evaluate()["loss"] < before - 1.5


@pytest.mark.parametrize("recipe", TINY)
def test_recomputed_blocks_do_not_change_the_gradients(recipe: str) -> None:
    none, blocks = (gradients(*TINY[recipe], f"activation_checkpointing={mode}") for mode in ("none", "blocks"))
    assert same_bits(none, blocks)


def test_a_text_shorter_than_one_sample_is_refused_with_a_context_that_fits(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words. " * 8)
    text = ["recipe=gpt2", "recipe.size=nano", "data=text", f"data.path={tmp_path}/short.txt", "data.tokenizer=bytes",
            f"data.cache_dir={tmp_path}"]  # fmt: skip
    with pytest.raises(UserError, match=r"text has \d+ tokens, one sample needs 17; give a longer text") as refused:
        trainer_of(*text, "recipe.context=16")
    (remedy,) = refused.value.remedies
    trainer_of(*text, remedy)


def test_a_python_without_docstrings_is_named_before_transformers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    with pytest.raises(UserError, match="leave out python -OO and PYTHONOPTIMIZE=2"):
        GPT2().new_model(None)  # type: ignore[arg-type]
