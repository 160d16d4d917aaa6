"""``recipe.lora``: only the adapters train, and what is exported is what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from recipes.lora import LoRA
from tests.helpers import compose, fit, same_bits, trainer_of
from trainer.errors import UserError
from trainer.run.forecast import forecast
from trainer.trainer import Trainer

SMALL = ("recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=4", "eval_samples=4", "steps=3")
RANK = "recipe.lora.rank=2"
CLASSES = {
    "gpt2": AutoModelForCausalLM,
    "llama": AutoModelForCausalLM,
    "bert": AutoModelForMaskedLM,
    "t5": AutoModelForSeq2SeqLM,
}


def tiny(recipe: str, *more: str) -> Trainer:
    size = "recipe.width=32" if recipe == "llama" else "recipe.size=nano"
    size = "recipe.layers=2" if recipe == "llama" else size
    return trainer_of(f"recipe={recipe}", size, *SMALL, "optimizer.lr=0.05", *more)


def adapters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters() if ".lora_" in name}


def others(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters() if ".lora_" not in name}


@torch.no_grad()
def outputs(recipe: str, model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(90, (2, 12))
    if recipe == "t5":
        found = model(input_ids=tokens, decoder_input_ids=tokens[:, :5]).logits
    else:
        found = model(tokens).logits
    return found[..., :90]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize("recipe", CLASSES)
def test_the_merged_export_and_the_adapter_give_what_was_trained(recipe: str, tmp_path: Path) -> None:
    trainer = tiny(recipe, RANK, "recipe.lora.alpha=8")
    base = others(trainer)
    trainer.model.eval()
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "base")  # the adapters' product is 0 at first
    fit(trainer)
    network = trainer.model.eval().network if hasattr(trainer.model, "network") else trainer.model.eval()
    trained = outputs(recipe, network)
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "best")
    assert same_bits(outputs(recipe, network), trained)  # the export changes nothing

    opened, merged = (CLASSES[recipe].from_pretrained(tmp_path / name).eval() for name in ("base", "best"))
    assert (outputs(recipe, merged) - trained).abs().max() < 1e-5 * trained.abs().max()
    assert (outputs(recipe, opened) - trained).abs().max() > 1e-3 * trained.abs().max()
    with_adapter = PeftModel.from_pretrained(opened, str(tmp_path / "best" / "adapter")).eval()
    assert (outputs(recipe, with_adapter) - trained).abs().max() < 1e-5 * trained.abs().max()

    assert same_bits(others(trainer), base)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mixture_of_experts_has_adapters_beside_experts_and_routers(precision: str, tmp_path: Path) -> None:
    shape = ("hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2", "num_key_value_heads=2",
             "num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=16")  # fmt: skip
    given = ("recipe=causal_lm", "recipe.model_type=qwen3_moe", *(f"recipe.config.{option}" for option in shape))
    trainer = trainer_of(*given, *SMALL, "optimizer.lr=0.05", RANK, f"precision={precision}")
    adapted = {
        name.partition(".lora_")[0].rpartition(".")[2] for name in trainer.model.state_dict() if ".lora_" in name
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "base")
    fit(trainer)
    trained = outputs("causal_lm", trainer.model.eval().network)
    trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "best")
    opened, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("base", "best"))
    assert (outputs("causal_lm", merged) - trained).abs().max() < 1e-5 * trained.abs().max()
    with_adapter = PeftModel.from_pretrained(opened, str(tmp_path / "best" / "adapter")).eval()
    assert (outputs("causal_lm", with_adapter) - trained).abs().max() < 1e-5 * trained.abs().max()


@pytest.mark.parametrize("mode", ["fp16", "bf16_master", "bf16_sr"])
def test_only_the_adapters_change_in_every_precision(mode: str, tmp_path: Path) -> None:
    trainer = tiny("gpt2", RANK, f"precision={mode}", "scaler.init=1024" if mode == "fp16" else "seed=0")
    base, before = others(trainer), adapters(trainer)
    fit(trainer)
    assert same_bits(others(trainer), base)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in adapters(trainer).items())
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert sum(tensor.numel() for tensor in held) == sum(tensor.numel() for tensor in before.values())
    if trainer.masters and mode == "bf16_master":
        assert {name for name, _ in trainer.masters.persistent_weights()} == before.keys()
        trainer.model.eval()
        trained = outputs("gpt2", trainer.model.network).float()
        trainer.recipe.export(trainer.model, trainer.datasets, tmp_path / "best")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
        assert merged.dtype == torch.float32
        assert (outputs("gpt2", merged) - trained).norm() < 0.02 * trained.norm()


def test_the_forecast_knows_that_only_adapters_have_gradients_and_optimizer_state() -> None:
    adapted = forecast(compose("recipe=gpt2", "recipe.size=nano", *SMALL, "device=cpu", RANK)).highest
    assert 0 < adapted["optimizer"] < 0.04 * adapted["weights"]
    assert 0 < adapted["gradients"] < 0.02 * adapted["weights"]


def test_what_cannot_be_adapted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'wte' is no linear layer.*c_fc"):
        trainer_of("recipe=gpt2", "recipe.size=nano", *SMALL, RANK, "recipe.lora.target=[c_attn,wte]")
    monkeypatch.setattr("recipes.lora.find_spec", lambda name: None)
    assert LoRA().rank == 0
    with pytest.raises(UserError, match="pip install peft"):
        LoRA(rank=2)


def test_chosen_layers_are_adapted_and_auto_is_what_peft_takes() -> None:
    trainer = tiny("gpt2", RANK, "recipe.lora.target=[c_fc,attn.c_proj]")
    found = {".".join(name.split(".")[4:6]) for name in adapters(trainer)}
    assert found == {"mlp.c_fc", "attn.c_proj"}
    assert tiny("t5", RANK).recipe.lora.target == ["q", "v"]
