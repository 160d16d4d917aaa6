"""Tiny models of some families of transformers, with weights that are as large as published ones are.

What is known of the published ones, and where from:

- T5: ``DenseReluDense.wo`` of t5-base reaches 66,246 (transformers issue 5651).
- Llama: in Llama 2, the gate reaches 255.9 and ``up_proj`` 261.75, so that their product, which is the input of
  ``down_proj``, is above 65,504 (transformers issue 27179).
- Gemma 3: norms after attention and MLP have large weights, and the residual stream reaches 696,320 in 27B (arXiv
  2605.15572) and 800,000 in EmbeddingGemma (unsloth pull request 4014).
- Qwen 2: queries and keys with their biases are so large that the scores overflow in eager attention; in bf16, its
  perplexity is 7.99 instead of 7.13 (QwenLM/Qwen3 issue 910, transformers pull request 33317).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.commands.checkup import CAUSAL, IMAGES, MASKED, SEQ2SEQ, image_batches, text_batches

hf = pytest.importorskip("transformers")

WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
USUAL: dict[str, Any] = {**WIDE, "vocab_size": 200, "intermediate_size": 128, "max_position_embeddings": 64}
SHARED: dict[str, Any] = {**USUAL, "num_key_value_heads": 2}
GROUPED: dict[str, Any] = {**SHARED, "head_dim": 16}
LAYER = "model.layers.1"

Plant = Callable[[Any, list[dict[str, Tensor]]], None]


@dataclass(frozen=True)
class Family:
    """A model, and what must be said of it; an empty string: nothing is found."""

    config: Callable[[], Any]
    fp16: str = ""
    """The module that overflows."""
    bf16: str = ""
    """That whose gradients are wrong in bf16."""
    plant: Plant = lambda model, batches: None
    """Makes weights as large as published ones."""
    islands: str = ""
    """The fewest modules that have to compute in fp32; empty: that which overflows."""
    attention: str | None = None
    task: str = CAUSAL

    def save(self, folder: Path, seed: int = 0, *, steps: int = 2, rows: int = 2, length: int = 16) -> None:
        """Make the model, let its weights be large for the batches that it will be checked with, and save it."""
        torch.manual_seed(seed)
        loader = getattr(hf, f"AutoModelFor{self.task}")
        model = loader.from_config(self.config(), dtype=torch.float32, attn_implementation=self.attention).train()
        images = self.task == IMAGES
        batches = (
            image_batches(model, steps, rows)
            if images
            else text_batches(model, self.task, None, "", (steps, rows, length))
        )
        self.plant(model, batches)
        model.save_pretrained(folder)


def outputs(model: Any, module: str, batches: list[dict[str, Tensor]]) -> Tensor:
    """What a module returns in fp32: a row for each token."""
    seen: list[Tensor] = []
    watched = model.get_submodule(module)
    hook = watched.register_forward_hook(lambda _, args, output: seen.append(output.flatten(0, -2)))
    with torch.no_grad(), torch.random.fork_rng():
        for batch in batches:
            model(**batch)
    hook.remove()
    return torch.cat(seen)


def reaching(module: str, amax: float) -> Plant:
    """Scale the weight of a linear layer, so that its largest output is this."""

    @torch.no_grad()
    def plant(model: Any, batches: list[dict[str, Tensor]]) -> None:
        model.get_submodule(module).weight.mul_(amax / outputs(model, module, batches).abs().max())

    return plant


def norms_reaching(amax: float, *layers: int) -> Plant:
    """Let one channel of the norms after the MLPs of Gemma, whose weights are added to 1, reach this."""

    @torch.no_grad()
    def plant(model: Any, batches: list[dict[str, Tensor]]) -> None:
        for name in (f"model.layers.{layer}.post_feedforward_layernorm" for layer in layers):
            largest, channel = outputs(model, name, batches).abs().amax(0).max(0)
            model.get_submodule(name).weight[channel] = amax / largest - 1

    return plant


@torch.no_grad()
def gated(model: Any, batches: list[dict[str, Tensor]]) -> None:
    """One channel in which the gate reaches 255.9 and the layer beside it 261.75, of the same token."""
    mlp = model.model.layers[1].mlp
    row = mlp.gate_proj.weight[0] * 255.9 / outputs(model, f"{LAYER}.mlp.gate_proj", batches)[:, 0].max()
    mlp.gate_proj.weight[0], mlp.up_proj.weight[0] = row, row * 261.75 / 255.9


def biased(*names: str) -> Plant:
    """Queries and keys with biases of 200 in two channels of each head."""

    @torch.no_grad()
    def plant(model: Any, batches: list[dict[str, Tensor]]) -> None:
        for name in names:
            model.get_submodule(name).bias.view(-1, 16)[:, [7, 15]] = 200.0

    return plant


FAMILIES = {
    "gemma3": Family(
        lambda: hf.Gemma3TextConfig(**GROUPED),
        fp16="model.layers.0.post_feedforward_layernorm",
        plant=norms_reaching(696320 / 2, 0, 1),
        islands="model.layers.0.post_feedforward_layernorm and 1 more",
    ),
    "llama": Family(lambda: hf.LlamaConfig(**USUAL), fp16=f"{LAYER}.mlp", plant=gated),
    "qwen2": Family(
        lambda: hf.Qwen2Config(**SHARED),
        fp16=f"{LAYER}.self_attn",
        bf16=f"{LAYER}.self_attn",
        plant=biased(f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj"),
        attention="eager",
    ),
    "t5": Family(
        lambda: hf.T5Config(
            vocab_size=200,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        fp16="encoder.block.1.layer.1.DenseReluDense.wo",
        plant=reaching("encoder.block.1.layer.1.DenseReluDense.wo", 66246),
        task=SEQ2SEQ,
    ),
    "bert": Family(lambda: hf.BertConfig(**USUAL), task=MASKED),
    "vit": Family(
        lambda: hf.ViTConfig(**WIDE, intermediate_size=128, image_size=32, patch_size=8, num_labels=10), task=IMAGES
    ),
}
