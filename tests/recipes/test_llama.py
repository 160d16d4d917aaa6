from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from recipes.llama import Llama
from tests.helpers import CPU, compose, fit, gradients, reopened, same_bits, trainer_of
from trainer.errors import UserError
from trainer.hardware import Hardware

GPU = Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))
TINY = ["recipe=llama", "recipe.layers=2", "recipe.width=32", "recipe.heads=4", "recipe.kv_heads=2", "recipe.ffn=48"]
TINY += ["recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16"]


@pytest.mark.parametrize(
    ("size", "layers", "parameters"),
    [("1B", None, 1_235_814_400), ("8B", None, 8_030_261_248), ("8B", 4, 8_030_261_248 - 28 * 218_112_000)],
)
def test_published_sizes_have_their_parameters(size: str, layers: int | None, parameters: int) -> None:
    recipe = Llama(size=size, layers=layers)
    with torch.device("meta"):
        llama = recipe.network(128256, recipe.own_context())
    assert sum(parameter.numel() for parameter in llama.parameters()) == parameters
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.float32}
    assert llama.model.layers[0].mlp.up_proj.weight.shape == ((8192, 2048) if size == "1B" else (14336, 4096))


def test_auto_is_nano_on_a_cpu_and_1b_on_a_gpu() -> None:
    for hardware, size, context in ((CPU, "nano", 64), (GPU, "1B", 8192)):
        config = compose("recipe=llama", "data=synthetic")
        _, choices = config.recipe.resolve(hardware, config.data)
        found = [(choice.key, choice.value) for choice in choices]
        assert found == [
            ("recipe.size", size),
            ("recipe.context", context),
        ]


def test_numbers_replace_those_of_the_size_and_the_facts_say_so() -> None:
    trainer = trainer_of(*TINY)
    config = trainer.model.llama.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 32, 48)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (4, 2, 128)
    assert config.rope_parameters["rope_theta"] == 500_000
    assert (
        trainer.recipe.facts(trainer.model, trainer.datasets)["size"]
        == "nano, layers 2, width 32, heads 4, kv_heads 2, ffn 48"
    )
    assert trainer.recipe.blocks(trainer.model) == list(trainer.model.llama.model.layers)


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_is_summed_over_all_tokens_but_the_first(attention: str, multiple: int) -> None:
    trainer = trainer_of(*TINY, f"recipe.attention={attention}", f"recipe.vocabulary_multiple={multiple}")
    llama = trainer.model.llama
    assert llama.config._attn_implementation.removesuffix("_causal") == attention
    assert llama.config.vocab_size == (90 if multiple == 1 else 128)
    tokens = torch.randint(90, (3, 17))
    loss = trainer.recipe.loss(trainer.model, {"tokens": tokens}).loss_sum
    logits = llama(tokens[:, :-1], use_cache=False).logits[..., :90]  # the rest is padding
    expected = F.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.recipe.count_targets({"tokens": tokens}) == 48
    assert loss.item() / 48 == pytest.approx(math.log(90), abs=0.2)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_few_steps_learn_which_token_follows(mode: str) -> None:
    trainer = trainer_of(*TINY, f"precision={mode}", "steps=40", "micro_batch_size=4", "optimizer.lr=0.01")
    before = trainer.evaluate()["loss"]
    records = fit(trainer)
    assert not any(record.skipped for record in records[5:])
    assert trainer.evaluate()["loss"] < before - 0.8


def test_the_output_layer_is_not_tied_in_8b() -> None:
    trainer = trainer_of("recipe=llama", "recipe.size=8B", *TINY[1:], "steps=1")
    llama = trainer.model.llama
    before = llama.lm_head.weight.clone()
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight
    fit(trainer)
    assert not torch.equal(llama.lm_head.weight, before)


def test_activation_checkpointing_does_not_change_the_gradients() -> None:
    none, *others = (gradients(*TINY, f"activation_checkpointing={mode}") for mode in ("none", "blocks", "selective"))
    assert all(same_bits(none, other) for other in others)


def test_the_export_opens_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = trainer_of(*TINY)
    exported = reopened(trainer, tmp_path, AutoModelForCausalLM)
    tokens = torch.randint(90, (2, 16))
    with torch.no_grad():
        assert torch.allclose(exported(tokens).logits, trainer.model.llama(tokens).logits[..., :90], atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.size=8b"], r"recipe.size=8b is unknown; did you mean '8B'"),
        (["recipe.layers=0"], r"recipe.layers=0 must be at least 1, or null"),
        (["recipe.width=100", "recipe.heads=8"], r"recipe.width=100 .*recipe.heads=8; use recipe.width=96"),
        (["recipe.heads=4", "recipe.kv_heads=3"], r"kv_heads=3 must divide recipe.heads=4; use recipe.kv_heads=2"),
        (
            ["recipe.attention=flash"],
            r"recipe.attention=flash is unknown; use recipe.attention=sdpa\|eager",
        ),
        (["recipe.context=1"], r"recipe.context=1 must be at least 2"),
        (["recipe.vocabulary_multiple=0"], r"recipe.vocabulary_multiple=0 must be at least 1"),
        (["data=digits"], r"recipe=llama cannot read data=digits"),
    ],
)
def test_values_that_cannot_work_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose("recipe=llama", "data=synthetic", *overrides).resolve(CPU)
