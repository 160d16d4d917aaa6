"""GPT-2 language modelling: the published sizes, a mini one that trains on a laptop, or a pretrained folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from recipes.gpt2_model import SHAPES, new_gpt2, open_pretrained, pretrained_config
from recipes.huggingface import check_dropout, choose_size, smaller_sizes
from recipes.language import LanguageRecipe
from recipes.language_model import LanguageModel
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.recipe import Choice, Sizes


@dataclass
class GPT2(LanguageRecipe):
    """The ``recipe=gpt2`` config."""

    name: ClassVar[str] = "gpt2"
    size: str = "auto"
    """nano, mini, 124M, 350M, 774M, 1558M; auto: mini on a CPU, 124M on a GPU."""
    pretrained: str | None = None
    """A hub id or folder to fine-tune instead of training from random weights; brings its own tokenizer."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._label = ""  # the size of a pretrained model
        self._own: Any = None  # its config
        check_dropout(self.dropout)

    def choose_model(self, hardware: Hardware) -> list[Choice]:
        """Choose the size, unless a pretrained model brings it."""
        if self.pretrained:
            if self.size != "auto":
                raise UserError(
                    "recipe.size has no effect with recipe.pretrained, which brings its size; drop one of them"
                )
            self._own = pretrained_config(self.pretrained)
            if isinstance(self.context, int) and self.context > self._own.n_positions:
                raise UserError(
                    f"recipe.context={self.context} is longer than the pretrained model's {self._own.n_positions}; "
                    f"use recipe.context={self._own.n_positions}, or auto"
                )
            return []
        choices = choose_size(self.size, SHAPES, hardware, "mini", "124M")
        self.size = str(choices[0].value) if choices else self.size
        return choices

    def smaller(self) -> list[str]:
        """Return the smaller sizes; none of a pretrained model."""
        return [] if self.pretrained else smaller_sizes(self.size, SHAPES)

    def own_context(self) -> int:
        """Return the published 1024 tokens, or fewer where the model takes fewer."""
        return min(1024, self._own.n_positions) if self.pretrained else SHAPES[self.size].context

    def sizes(self, hardware: Hardware) -> Sizes:
        """A few minutes of a CPU, or the published half a million tokens a step on a GPU."""
        if not hardware.is_gpu:
            return Sizes(steps=200, batch_size=16, micro_batch_size=16)
        return Sizes(steps=2000, batch_size=480, micro_batch_size=16)

    def network(self, vocabulary: int, context: int) -> Any:
        """Return GPT-2 with random weights, or the pretrained one."""
        if not self.pretrained:
            return new_gpt2(SHAPES[self.size], vocabulary, context, self.dropout, self._implementation)
        gpt2 = open_pretrained(self.pretrained, vocabulary, self.dropout, self._implementation)
        self._label = f"{sum(parameter.numel() for parameter in gpt2.parameters()) / 1e6:.0f}M pretrained"
        return gpt2

    def attention_heads(self) -> tuple[int, int]:
        """Return the number of attention's heads and the width of one."""
        if self.pretrained:
            return self._own.n_head, self._own.n_embd // self._own.n_head
        return SHAPES[self.size].heads, SHAPES[self.size].width // SHAPES[self.size].heads

    def vocabulary(self) -> int:
        """Return the pretrained model's own number of token ids, unless its tokenizer has more."""
        return max(super().vocabulary(), self._own.vocab_size if self._own else 0)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the transformer blocks."""
        assert isinstance(model, LanguageModel)
        return list(model.network.transformer.h)

    def facts(self) -> dict[str, Any]:
        """Return the size."""
        return {"size": self._label or self.size}

    def _tokenizer(self) -> str | None:
        return self.pretrained
