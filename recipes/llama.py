"""Llama language modelling: Llama 3's layers in its own widths or any other, or a pretrained folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import nn

from recipes.causal_lm import CausalLM
from recipes.data.text.tokens import TextDatasets
from recipes.sized import SizedRecipe
from trainer.errors import UserError, check_number, no_effect
from trainer.hardware import Hardware
from trainer.recipe import NO_OPTION, Decision, Sizes


class Shape(NamedTuple):
    """The numbers that make one Llama."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    """The output layer's weight is the embedding's."""
    context: int
    """Context length that it was trained with at first."""


# 8B: Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3. 1B: Meta's model card of Llama 3.2. nano is ours.
SHAPES = {
    "nano": Shape(4, 128, 4, 2, 384, True, 64),
    "1B": Shape(16, 2048, 32, 8, 8192, True, 8192),
    "8B": Shape(32, 4096, 32, 8, 14336, False, 8192),
}
ROPE_BASE = 500_000.0
"""Base of Llama 3's rotary positions; the stretching of them that Llama 3.1 added for longer texts is left out."""
NUMBERS = dict(zip(("layers", "width", "heads", "kv_heads", "ffn"), Shape._fields, strict=False))
"""The options that replace a number of the size, and transformers' names of them."""


@dataclass
class Llama(SizedRecipe, CausalLM):
    """The ``recipe=llama`` config: a size, any number of which can be replaced."""

    name: ClassVar[str] = "llama"
    model_class = "LlamaForCausalLM"
    architecture = ("size", "pretrained", *NUMBERS)
    adjustable = ("context",)
    longest = 8192
    shapes = SHAPES
    on_cpu = "nano"
    on_gpu = "1B"
    cpu_sizes = Sizes(steps=200, batch_size=16, micro_batch_size=16)  # a minute or two
    gpu_sizes = Sizes(steps=50, batch_size=8, micro_batch_size=1)  # one sample of 8192 tokens at a time
    model_type: str | None = field(default=None, metadata=NO_OPTION)
    config: dict[str, Any] = field(default_factory=dict, metadata=NO_OPTION)
    size: str = "auto"
    """nano, 1B or 8B; auto: nano on a CPU, 1B on a GPU."""
    layers: int | None = None
    """Number of blocks; null: that of the size, as for the next four options."""
    width: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads, each shared by ``heads`` / ``kv_heads`` query heads."""
    ffn: int | None = None
    """Hidden width of the feed-forward layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in NUMBERS:
            check_number(f"recipe.{key}", getattr(self, key))

    def choose_model(self, hardware: Hardware) -> list[Decision]:
        """Choose the size, and refuse numbers that do not fit each other."""
        decisions = super().choose_model(hardware)
        if self.pretrained:
            if self._changed:
                raise no_effect(f"recipe.{next(iter(self._changed))}", "init_from sets the size")
            return decisions
        width, heads, kv_heads = self.with_options(decisions).shape[1:4]
        if width % (2 * heads):
            raise UserError(
                f"recipe.width={width} must be a multiple of 2 × recipe.heads={heads}; "
                f"use recipe.width={max(1, round(width / (2 * heads))) * 2 * heads}"
            )
        if heads % kv_heads:
            fitting = max(n for n in range(1, min(kv_heads, heads) + 1) if heads % n == 0)
            raise UserError(
                f"recipe.kv_heads={kv_heads} must divide recipe.heads={heads}; use recipe.kv_heads={fitting}"
            )
        return decisions

    def own_config(self, datasets: TextDatasets) -> dict[str, Any]:
        return {
            "max_position_embeddings": self.tokens_per_sample,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def summary_fields(self, model: nn.Module, datasets: TextDatasets) -> dict[str, Any]:
        """Return the size, and what was changed of it."""
        if self.pretrained:
            return super().summary_fields(model, datasets)
        return {"size": ", ".join([self.size, *(f"{key} {value}" for key, value in self._changed.items())])}

    @property
    def shape(self) -> Shape:
        """The numbers of the size, those that the user set in their place."""
        return SHAPES[self.size]._replace(**{NUMBERS[key]: value for key, value in self._changed.items()})

    @property
    def _changed(self) -> dict[str, Any]:
        return {key: value for key in NUMBERS if (value := getattr(self, key)) is not None}
