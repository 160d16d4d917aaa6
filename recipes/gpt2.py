"""GPT-2 language modelling: the published sizes, a mini one that trains on a laptop, or a pretrained folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from recipes.gpt2_model import ACTIVATIONS, SHAPES, dropouts, new_gpt2
from recipes.huggingface import check_dropout
from recipes.language import LanguageRecipe
from recipes.language_model import LanguageModel
from trainer.errors import UserError
from trainer.recipe import Sizes


@dataclass
class GPT2(LanguageRecipe):
    """The ``recipe=gpt2`` config."""

    name: ClassVar[str] = "gpt2"
    architecture = ("size", "pretrained", "context")
    adjustable = ("gelu",)
    shapes = SHAPES
    on_cpu = "mini"
    on_gpu = "124M"
    cpu_sizes = Sizes(steps=200, batch_size=16, micro_batch_size=16)  # a few minutes
    gpu_sizes = Sizes(steps=2000, batch_size=480, micro_batch_size=16)  # the published half a million tokens a step
    longest = 1024
    dropout: float = 0.0
    gelu: str = "tanh"
    """Of a new model: tanh, GPT-2's approximation, or erf, the exact function, in a third of the time on a CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dropout(self.dropout)
        if self.gelu not in ACTIVATIONS:
            raise UserError(f"recipe.gelu={self.gelu} is unknown; use recipe.gelu={'|'.join(ACTIVATIONS)}")
        if self.pretrained and self.gelu != "tanh":
            raise UserError(
                f"recipe.gelu={self.gelu} has no effect with recipe.pretrained, which has its own; remove it"
            )

    def network(self, vocabulary: int, context: int) -> Any:
        """Return GPT-2 with random weights, or the pretrained one."""
        if self.pretrained:
            from transformers import GPT2LMHeadModel

            own = self.pretrained_config().activation_function
            activation = ACTIVATIONS["tanh"] if own == "gelu_new" else own  # the same function
            options = {**dropouts(self.dropout), "activation_function": activation}
            return self.open_pretrained(GPT2LMHeadModel, vocabulary, **options)
        activation = ACTIVATIONS[self.gelu]
        return new_gpt2(SHAPES[self.size], vocabulary, context, self.dropout, self.attention, activation)

    def blocks(self, model: LanguageModel) -> list[nn.Module]:
        return list(model.network.transformer.h)
