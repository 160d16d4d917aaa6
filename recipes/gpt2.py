"""GPT-2 language modelling: the published sizes, a mini one that trains on a laptop, or a pretrained folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from recipes.data.text.source import TextDatasets
from recipes.gpt2_model import SHAPES, new_gpt2, open_pretrained, pretrained_config
from recipes.huggingface import check_dropout
from recipes.language import LanguageRecipe
from recipes.language_model import LanguageModel
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.recipe import Choice, Sizes


@dataclass
class GPT2(LanguageRecipe):
    """The ``recipe=gpt2`` config."""

    name: ClassVar[str] = "gpt2"
    architecture = ("size", "pretrained", "context")
    shapes = SHAPES
    on_cpu = "mini"
    on_gpu = "124M"
    size: str = "auto"
    """nano, mini, 124M, 350M, 774M, 1558M; auto: mini on a CPU, 124M on a GPU."""
    pretrained: str | None = None
    """A hub id or folder to fine-tune instead of training from random weights; brings its own tokenizer."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dropout(self.dropout)

    def choose_model(self, hardware: Hardware) -> list[Choice]:
        """Choose the size, unless a pretrained model brings it."""
        if self.pretrained:
            if self.size != "auto":
                raise UserError(
                    "recipe.size has no effect with recipe.pretrained, which sets the size; remove one of them"
                )
            longest = pretrained_config(self.pretrained).n_positions
            if isinstance(self.context, int) and self.context > longest:
                raise UserError(
                    f"recipe.context={self.context} is longer than the pretrained model's {longest}; "
                    f"use recipe.context={longest}, or auto"
                )
            return []
        return super().choose_model(hardware)

    def own_context(self) -> int:
        """Return the published 1024 tokens, or fewer where the model takes fewer."""
        return min(1024, pretrained_config(self.pretrained).n_positions) if self.pretrained else super().own_context()

    def sizes(self, hardware: Hardware) -> Sizes:
        """A few minutes of a CPU, or the published half a million tokens a step on a GPU."""
        if not hardware.is_gpu:
            return Sizes(steps=200, batch_size=16, micro_batch_size=16)
        return Sizes(steps=2000, batch_size=480, micro_batch_size=16)

    def network(self, vocabulary: int, context: int) -> Any:
        """Return GPT-2 with random weights, or the pretrained one."""
        if self.pretrained:
            return open_pretrained(self.pretrained, vocabulary, self.dropout, self._implementation)
        return new_gpt2(SHAPES[self.size], vocabulary, context, self.dropout, self._implementation)

    def attention_heads(self) -> tuple[int, int]:
        if self.pretrained:
            config = pretrained_config(self.pretrained)
            return config.n_head, config.n_embd // config.n_head
        return SHAPES[self.size].heads, SHAPES[self.size].width // SHAPES[self.size].heads

    def own_vocabulary(self) -> int:
        return int(pretrained_config(self.pretrained).vocab_size) if self.pretrained else 0

    def blocks(self, model: LanguageModel) -> list[nn.Module]:
        return list(model.network.transformer.h)

    def facts(self, model: nn.Module, datasets: TextDatasets) -> dict[str, Any]:
        if self.pretrained:
            return {"size": f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f}M pretrained"}
        return super().facts(model, datasets)

    def _tokenizer(self) -> str | None:
        return self.pretrained
