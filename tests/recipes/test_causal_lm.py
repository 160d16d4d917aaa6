"""What ``recipe=causal_lm`` takes and refuses, and what it finds in a model; each family is in test_families.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.causal_lm import CausalLM
from recipes.language import balance_of, needs_logits, routers
from tests.helpers import CPU, compose, context, fit, needs_chunks, old_transformers, same_bits, trainer_of
from trainer.config.compose import compose as compose_line
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.precision.modes import Precision

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
DATA = ("data=synthetic", "data.vocab_size=90", "batch_size=4", "recipe.context=16", "eval_samples=4", "steps=3")


def new(kind: str, *more: str, **config: object) -> list[str]:
    """The options of a small new model."""
    options = [f"recipe.config.{key}={value}" for key, value in (SMALL | config).items()]
    return ["recipe=causal_lm", f"recipe.model_type={kind}", *options, *DATA, *more]


QWEN3 = new("qwen3", num_key_value_heads=2, head_dim=8)
MIXTRAL = new("mixtral", num_key_value_heads=2, num_local_experts=4)


@pytest.mark.parametrize(
    ("given", "problem", "remedy"),
    [
        ([], "none is named: set init_from to a hub id or a folder, or recipe.model_type", None),
        (["recipe.model_type=qwen3-moe"], "is no type of this transformers; did you mean 'qwen3_moe'", None),
        (["recipe.model_type=t5"], "t5 encodes one text and decodes another", "recipe=t5"),
        (["recipe.model_type=gemma3"], "gemma3 takes images or other inputs", "recipe.model_type=gemma3_text"),
        (["recipe.model_type=qwen2_5_vl"], "qwen2_5_vl takes images or other inputs", None),
        (["recipe.model_type=vit"], "vit does not continue a text", None),
        (new("bert")[1:], "bert sees later tokens", "recipe=bert"),
        (["recipe.model_type=qwen3", "recipe.config.num_hidden_layer=2"],
         "no option of transformers' Qwen3Config; did you mean 'recipe.config.num_hidden_layers'", None),
        (["recipe.model_type=qwen3", "recipe.config.dtype=bfloat16"], "dtype is no option of", None),
        (["recipe.model_type=qwen3", "recipe.config.vocab_size=9"], "vocab_size=9 has no effect", ""),
        (["recipe.model_type=qwen3", "recipe.config.num_hidden_layers=two"], "makes no qwen3: .*hidden_layers", None),
        ([*QWEN3[1:], "recipe.config.num_attention_heads=3"], "this config makes no qwen3 that runs", None),
        ([*QWEN3[1:], "recipe.config.max_position_embeddings=8"], "recipe.context=16 is longer than the model's 8",
         "recipe.config.max_position_embeddings=16"),
    ],
)  # fmt: skip
def test_what_makes_no_model_is_a_sentence(given: list[str], problem: str, remedy: str | None) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        trainer_of("recipe=causal_lm", "data=synthetic", "data.vocab_size=90", *given)
    assert list(refused.value.remedies[:1]) == [remedy] * (remedy is not None)


def test_a_vocabulary_of_a_few_characters_is_tried_out() -> None:
    small = [option for option in QWEN3 if not option.startswith("data.")]
    trainer_of(*small, "data.vocab_size=3", "recipe.vocabulary_multiple=1")


def test_options_go_by_the_names_of_the_config_and_by_those_that_all_models_share() -> None:
    bloom = trainer_of("recipe=causal_lm", "recipe.model_type=bloom", "recipe.config.num_hidden_layers=3",
                       "recipe.config.n_head=4", "recipe.config.hidden_size=32", *DATA)  # fmt: skip
    assert len(bloom.recipe.blocks(bloom.model)) == 3


def test_special_tokens_are_the_tokenizers_and_dropout_of_a_folder_can_be_set(tmp_path: Path) -> None:
    """OPT's config has padding at 1 and the end at 2, whatever the text's tokenizer has there."""
    opt = new("opt", ffn_dim=48, word_embed_proj_dim=32)
    opt = [option for option in opt if "intermediate" not in option]
    trainer = trainer_of(*opt)
    assert [getattr(trainer.model.network.config, f"{role}_token_id") for role in ("bos", "eos", "pad")] == [None] * 3
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path)
    folder = ["recipe=causal_lm", f"init_from={tmp_path}", *DATA]
    assert trainer_of(*folder, "recipe.config.dropout=0.25").model.network.config.dropout == 0.25
    for keys in (["ffn_dim=64"], ["num_hidden_layers=1", "dropout=0.25"], ["num_hidden_layers=3"]):
        given = [f"recipe.config.{key}" for key in keys]
        with pytest.raises(UserError, match=f"has no weights for {' '.join(given)}") as refused:
            trainer_of(*folder, *given)
        assert set(refused.value.mistake.split()) == {key.partition("=")[0] for key in given}


def test_models_without_sdpa_compute_attention_eagerly_and_it_is_said() -> None:
    for kind, attention in (("qwen3", "sdpa"), ("bloom", "eager")):
        plan = plan_of(compose("recipe=causal_lm", f"recipe.model_type={kind}", "data=synthetic"), CPU)
        assert plan.config.recipe.attention == attention  # type: ignore[attr-defined]
        assert "recipe.attention" in [decision.key for decision in plan.decisions]
    with pytest.raises(UserError, match=r"has no recipe.attention=sdpa"):
        trainer_of(*new("gpt_oss", "recipe.attention=sdpa", num_key_value_heads=2, num_local_experts=4))


@pytest.mark.parametrize(("window", "made"), [(8, True), (16, False)])
def test_masks_are_made_where_a_window_is_shorter_than_a_sample(window: int, made: bool) -> None:
    model: Any = trainer_of(*new("mistral", num_key_value_heads=2, sliding_window=window)).model
    assert (model.network.config._attn_implementation == "sdpa") == made
    assert torch.backends.cuda.cudnn_sdp_enabled() != made  # its gradients can be NaN beside a mask


@needs_chunks
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (QWEN3, ""),
        (new("gemma2", num_key_value_heads=2, head_dim=8), "capped, scaled"),
        (MIXTRAL, "the balance of its experts"),
        ([*MIXTRAL, "recipe.config.router_aux_loss_coef=0"], ""),
    ],
    ids=["plain", "capped", "experts", "experts-alone"],
)
def test_the_loss_is_chunked_where_that_is_what_the_model_computes(model: list[str], why: str) -> None:
    chunked = [*model, "recipe.chunked_loss=true"]
    if not why:
        trainer_of(*chunked)
        return
    with pytest.raises(UserError, match=f"recipe.chunked_loss=true: .*{why}"):
        trainer_of(*chunked)


def test_logits_that_are_scaled_before_the_output_layer_are_found() -> None:
    """MiniCPM's hidden states are divided on their way to the layer; Qwen's are not."""
    for kind, plain in (("minicpm3", False), ("qwen3", True)):
        with torch.device("meta"):
            config = AutoConfig.for_model(kind, num_hidden_layers=1)
            assert bool(needs_logits(AutoModelForCausalLM.from_config(config))) != plain


class Products(TorchDispatchMode):
    """The dtypes of operands whose result has as many columns as there are experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts, self.dtypes = experts, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        products = ("mm", "linear", "addmm", "matmul")
        if func.overloadpacket.__name__ in products and result.shape[-1] == self.experts:
            self.dtypes |= {one.dtype for one in (result, *args) if isinstance(one, torch.Tensor)}
        return result


@pytest.mark.parametrize("mode", ["bf16", "bf16_pure"])
def test_routers_multiply_in_fp32(mode: str) -> None:
    trainer = trainer_of(*MIXTRAL, f"precision={mode}")
    assert trainer.fp32_modules == [f"causal_lm.model.layers.{layer}.mlp.gate" for layer in (0, 1)]
    batch = next(trainer.batches())[0]
    with Products(4) as products, trainer.config.precision.autocast(trainer.device):
        trainer.recipe.loss(trainer.model, batch).loss_sum.backward()
    assert products.dtypes == {torch.float32}
    assert trainer_of(*MIXTRAL).fp32_modules == []  # all of it is


@pytest.mark.parametrize(
    ("kind", "config", "factor", "found"),
    [
        pytest.param("llama4_text", {"num_local_experts": 4}, 0, ["model.layers.0.feed_forward.router"],
                     marks=old_transformers),
        ("jetmoe", {"num_local_experts": 4, "kv_channels": 8, "aux_loss_coef": 0.5}, 0.5,
         ["model.layers.0.mlp.router", "model.layers.0.self_attention.experts.router"]),
        pytest.param("dbrx", {"ffn_config": {"moe_loss_weight": 0.5}, "attn_config": {"rope_theta": 1e4}}, 0.5,
                     ["transformer.blocks.0.ffn.router"], marks=old_transformers),
    ],
)  # fmt: skip
def test_routers_and_their_balance_are_found_under_other_names(
    kind: str, config: dict[str, Any], factor: float, found: list[str]
) -> None:
    layers = "n_layers" if kind == "dbrx" else "num_hidden_layers"
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{layers: 1}, **config))
    assert balance_of(network) == factor
    assert routers(network) == found


def test_padding_has_no_part_in_the_balance_of_experts() -> None:
    """The loss of short samples is the same with and without padding behind them."""
    trainer = trainer_of(*MIXTRAL, "recipe.config.router_aux_loss_coef=10")
    model: Any = trainer.model.train()
    model.padded = True
    tokens = next(trainer.batches())[0]["tokens"][:, :9]
    short, targets = tokens[:, :-1], tokens[:, 1:]
    longer = nn.functional.pad(short, (0, 5), value=3), nn.functional.pad(targets, (0, 5), value=-100)
    torch.testing.assert_close(model(*longer), model(short, targets), rtol=1e-5, atol=0)
    assert float(model(short, targets).detach()) > 1.02 * float(model.eval()(short, targets).detach())


def packed(kind: str, **config: object) -> Any:
    """A small model whose samples hold several texts."""
    recipe = CausalLM(model_type=kind, config=config, context=16)
    recipe, _ = recipe.resolve(context(compose("recipe=gpt2", "data=synthetic").data))
    tokens = SimpleNamespace(packing=True, samples={})
    tokenizer = SimpleNamespace(token_id=lambda role: None)
    return recipe.new_model(SimpleNamespace(vocabulary=90, tokens=tokens, tokenizer=tokenizer))  # type: ignore[arg-type]


def test_a_packed_sample_has_the_loss_of_its_texts_alone() -> None:
    model = packed("qwen3", **SMALL, num_key_value_heads=2, head_dim=8)
    tokens = torch.randint(90, (1, 13), generator=torch.Generator().manual_seed(0))
    targets, positions = tokens.roll(-1, 1), torch.cat([torch.arange(5), torch.arange(8)])[None]
    together = model(tokens, targets, positions)
    alone = model(tokens[:, :5], targets[:, :5]) + model(tokens[:, 5:], targets[:, 5:])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "takes no positions"),
        ("mamba", {"num_hidden_layers": 2, "state_size": 4}, "takes no positions"),
        ("falcon", {"num_hidden_layers": 2, "num_attention_heads": 4}, "lets a text see the one before it"),
    ],
)
def test_packing_is_refused_where_texts_would_see_each_other(kind: str, config: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"data.packing=true: .*{why}") as refused:
        packed(kind, hidden_size=32, **config)
    assert refused.value.remedies == ("data.packing=false",)


def test_adapters_of_a_model_that_peft_does_not_know_are_on_all_linear_layers() -> None:
    trainer = trainer_of(*new("smollm3", "recipe.lora.rank=2", num_key_value_heads=2))
    assert trainer.recipe.lora.target == ["all-linear"]
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in trainer.model.named_parameters()
               if ".lora_" in name}  # fmt: skip
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    fit(trainer)


@pytest.mark.parametrize(
    ("given", "loss"), [(QWEN3, False), (MIXTRAL, True), (new("gemma2", num_key_value_heads=2, head_dim=8), True)]
)
def test_that_the_loss_takes_all_logits_is_said_with_the_reason(given: list[str], loss: bool) -> None:
    trainer = trainer_of(*given)
    facts = trainer.recipe.summary_fields(trainer.model, trainer.datasets)
    assert ("of all logits (" in facts.get("loss", "")) == loss
    assert ("routers" in facts) == (given is MIXTRAL)


def test_another_run_begins_with_the_model_and_the_weights_of_a_run(tmp_path: Path) -> None:
    from trainer.run.start import train

    here = (f"output_dir={tmp_path}", "tracking=local", "profiler=none", "device=cpu")
    train(compose(*QWEN3, *here, "run_name=first"))
    first = f"init_from={tmp_path / 'first'}"
    second = trainer_of("recipe=causal_lm", *DATA, first)
    assert second.recipe.config == compose(*QWEN3).recipe.config  # type: ignore[attr-defined]
    repeated = trainer_of(*QWEN3, first)
    assert same_bits(second.model.state_dict(), repeated.model.state_dict())
    other = ["recipe=causal_lm", *DATA, first, "recipe.model_type=qwen3", "recipe.config.hidden_size=64"]
    with pytest.raises(UserError, match=r"recipe.config=.*, but the run .* has recipe.config="):
        compose_line(other)


def test_the_experts_of_a_run_are_taken_over(tmp_path: Path) -> None:
    """Its folder has them one by one, and the model all in one tensor."""
    from transformers import AutoModelForCausalLM

    from trainer.run.start import train

    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    given = [*new("qwen3_moe", **own), *DATA]
    train(compose(*given, f"output_dir={tmp_path}", "tracking=local", "profiler=none", "device=cpu", "run_name=first"))
    model = trainer_of(*given, f"init_from={tmp_path / 'first'}").model
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "first/best").state_dict()
    taken = model.network.state_dict()  # type: ignore[operator,union-attr]
    assert taken.keys() == best.keys()
    assert all(torch.equal(taken[name][: len(tensor)], tensor) for name, tensor in best.items())


def test_precision_leaves_modules_of_the_recipe_alone_in_fp32() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = Precision("bf16_pure").convert(net, torch.device("cpu"), fp32_of=lambda model: ["1"])
    assert kept == ["1"]
    assert [parameter.dtype.itemsize for parameter in net.parameters()] == [2, 2, 4, 4]
