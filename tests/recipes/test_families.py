"""``recipe=causal_lm`` on one tiny model of each family, opened from a hub: the loss, training, export and resuming.

docs/recipes.md has the table of them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.language import NO_TARGET
from tests.helpers import PROJECT, compose, fit, old_transformers, same_bits, trainer_of
from tests.hub import Hub, ask_at, served
from tests.parity.test_kill_and_resume import AtStep, interrupt
from tests.parity.test_kill_and_resume import at_step as at_step
from tests.recipes.test_pretrained import WORDS, words
from trainer.checkpoint.reader import load
from trainer.errors import Interrupted
from trainer.run.start import train

CONTEXT = 16
COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2, "num_experts_per_tok": 2,
    "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 24, "sliding_window": CONTEXT // 2,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {"logit_scale": 0.25},
    "falcon": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {"tie_word_embeddings": False},
    "gpt_oss": {},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"router_aux_loss_coef": 0.5},
    "mistral": {},
    "mixtral": {"router_aux_loss_coef": 0.5, "sliding_window": None},
    "olmo2": {},
    "phi": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"router_aux_loss_coef": 0.5},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
"""What makes a family special in small, beside ``COMMON``."""
CAPPED_OR_SCALED = {"cohere", "gemma2", "granite", "granitemoe", "phi"}
SAVED_IN_BF16 = {"qwen3", "gemma3_text", "mixtral"}
PADDED = {"qwen3", "phi", "mistral"}
"""Their models know more token ids than their tokenizers."""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with served(Hub()) as hub:
        yield hub


@pytest.fixture(
    params=[pytest.param(name, marks=old_transformers) if name == "granitemoe" else name for name in FAMILIES]
)
def family(request: pytest.FixtureRequest, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The type of a model that the hub serves as ``tiny/<type>``; its folder is ``model``."""
    kind: str = request.param
    ask_at(hub.address, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    words(tmp_path / "model", {"eos_token": "<|end|>"})
    known = inspect.signature(type(AutoConfig.for_model(kind))).parameters
    options = {key: value for key, value in COMMON.items() if key in known} | FAMILIES[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=WORDS + 1 + 8 * (kind in PADDED), **options)
    model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16 if kind in SAVED_IN_BF16 else torch.float32).save_pretrained(tmp_path / "model")
    hub.add_model(f"tiny/{kind}", tmp_path / "model")
    return kind


def options(family: str, path: Path) -> list[str]:
    text = path / "text.txt"
    text.write_text(" ".join(f"w{(index * index) % WORDS}" for index in range(1500)))
    data = ["data=text", f"data.path={text}", f"data.cache_dir={path / 'cache'}", "device=cpu", "deterministic=true"]
    sizes = [f"recipe.context={CONTEXT}", "batch_size=4", "micro_batch_size=2", "steps=3", "eval_samples=4"]
    return ["recipe=causal_lm", f"init_from=tiny/{family}", *sizes, *data]


def test_a_family_has_transformers_loss_trains_and_exports(family: str, tmp_path: Path) -> None:
    trainer = trainer_of(*options(family, tmp_path))
    check_loss(family, trainer.model, trainer.recipe, tmp_path / "model")
    assert all(math.isfinite(float(record.loss)) for record in fit(trainer))
    check_export(family, trainer, tmp_path)


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"], indirect=True)
def test_a_run_in_bf16_that_is_stopped_and_resumed_has_the_same_bits(
    family: str, tmp_path: Path, at_step: AtStep
) -> None:
    run = [*options(family, tmp_path), "precision=bf16", "tracking=local", "profiler=none"]
    whole = [*run, f"output_dir={tmp_path}", "run_name=whole"]
    train(compose(*whole))
    stopped = [*run, f"output_dir={tmp_path}", "run_name=stopped"]
    at_step(2, interrupt)
    with pytest.raises(Interrupted):
        train(compose(*stopped))
    at_step(-1, interrupt)
    assert train(compose(*stopped, "resume=auto")).summary["status"] == "FINISHED"
    ends = [load(tmp_path / name / "checkpoints", 3).tensors() for name in ("whole", "stopped")]
    assert same_bits(*ends)


def check_loss(family: str, model: Any, recipe: Any, folder: Path) -> None:
    """The summed loss and its gradients are those of transformers' ``labels=``, with the balance of experts."""
    assert model.has_loss_head == (family not in CAPPED_OR_SCALED)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    tokens = torch.randint(WORDS, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    balanced = {"output_router_logits": True} if model.balance else {}
    assert bool(balanced) == (family in ("granitemoe", "mixtral", "qwen3_moe", "gpt_oss"))
    expected = other(input_ids=tokens, labels=tokens, use_cache=False, **balanced).loss
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), NO_TARGET)], 1)
    batch = {"tokens": tokens, "targets": targets}
    loss = recipe.loss(model.train(), batch).loss_sum / recipe.count_targets(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    loss.backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.network.named_parameters():
        grad = theirs[name].grad
        if grad is None or parameter.grad is None:  # of an expert that no token went to
            assert not any(one.any() for one in (grad, parameter.grad) if one is not None)
            continue
        torch.testing.assert_close(parameter.grad[: len(grad)], grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()))
    model.zero_grad()


def check_export(family: str, trainer: Any, folder: Path) -> None:
    """Transformers opens what it exports, with the logits of the model that was trained."""
    trainer.recipe.export(trainer.model, trainer.datasets, folder / "best")
    opened = AutoModelForCausalLM.from_pretrained(folder / "best", dtype=torch.float32).eval()
    assert opened.config.vocab_size == WORDS + 1 + 8 * (family in PADDED)
    tokens = trainer.datasets.tokens.valid[:CONTEXT].astype("int64")
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        logits = trainer.model.eval().network(input_ids=ids, use_cache=False).logits
        theirs = opened(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits[..., : theirs.shape[-1]], theirs, rtol=1e-4, atol=1e-5)


def test_the_page_names_the_families_that_are_tried() -> None:
    page = (PROJECT / "docs" / "recipes.md").read_text()
    assert not [family for family in FAMILIES if f"| `{family}` |" not in page]
