"""What the recipes of transformers' models share: a named size, the kind of attention, a folder to export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from recipes.data.text.source import TextDatasets, TextSource
from recipes.export import save_model, save_tokenizer
from trainer.errors import UserError, nearest
from trainer.hardware import Hardware
from trainer.recipe import Choice, DataSource, Recipe

ATTENTION = ("sdpa", "eager")
"""torch's fused kernels, or a product, a softmax and a product, which keep scores of T × T."""


def text_source(data: DataSource, recipe: str) -> TextSource:
    """Return ``data``, or refuse what cannot be read as text."""
    if not isinstance(data, TextSource):
        raise UserError(f"recipe={recipe} cannot read data={data.kind}; use data=python_docs, text, hub or synthetic")
    return data


def check_attention(attention: str, known: tuple[str, ...] = ATTENTION) -> None:
    """Refuse a kind of attention that is not ``known``."""
    if attention not in known:
        raise UserError(f"recipe.attention={attention} is unknown; use recipe.attention={'|'.join(known)}")


def check_dropout(dropout: float) -> None:
    """Refuse a probability that is not in [0, 1)."""
    if not 0 <= dropout < 1:
        raise UserError(f"recipe.dropout={dropout} must be at least 0 and below 1")


def check_context(context: int | str, least: int) -> None:
    """Refuse a number of tokens that is neither auto nor a whole number of at least ``least``."""
    if isinstance(context, str):
        if context != "auto":
            raise UserError(f"recipe.context={context} must be a whole number of tokens, or auto")
    elif context < least:
        raise UserError(f"recipe.context={context} must be at least {least} tokens")


def with_padding(weights: dict[str, Tensor], model: nn.Module, network: Any, vocabulary: int, about: Any) -> None:
    """Give the tables of token ids among ``weights`` the padding of this model, in place.

    Args:
        weights: of another run; exported without padding, or those of a checkpoint with any padding.
        model: what the names are those of.
        network: transformers' model in it.
        vocabulary: how many token ids there are.
        about: the config beside exported weights; empty for those of a checkpoint.
    """
    tables = {id(layer.weight) for layer in (network.get_input_embeddings(), network.get_output_embeddings()) if layer}
    for name, own in model.named_parameters(remove_duplicate=False):
        if id(own) not in tables or name not in weights:
            continue
        rows = weights[name]
        if len(rows) == vocabulary or (not about and len(rows) > vocabulary):
            weights[name] = torch.cat([rows[:vocabulary], own[vocabulary:].detach().to(rows.dtype)])


class SizedRecipe(Recipe):
    """A model of a named size on any text: what becomes of ``auto``.

    A subclass names its sizes and the defaults among them. It declares the options ``size`` and ``context`` itself:
    a config shows options in the order in which they are declared.
    """

    shapes: ClassVar[Mapping[str, Any]] = {}
    """By name, in ascending order."""
    on_cpu: ClassVar[str] = ""
    on_gpu: ClassVar[str] = ""
    context_is: ClassVar[str] = "tokens per sample"
    size: str
    """A name out of ``shapes``; auto: ``on_cpu`` or ``on_gpu``."""
    context: int | str
    """Tokens, see ``context_is``; auto: the size's own."""

    def choose_model(self, hardware: Hardware) -> list[Choice]:
        """Return what ``recipe.size=auto`` becomes; nothing for a size that the user set.

        Raises:
            UserError: there is no such size, or the options make no model.
        """
        if self.size == "auto":
            if hardware.is_gpu:
                return [Choice("recipe.size", self.on_gpu, "GPU default")]
            return [Choice("recipe.size", self.on_cpu, "CPU default")]
        if self.size not in self.shapes:
            raise UserError(
                f"recipe.size={self.size} is unknown{nearest(self.size, self.shapes)} ({', '.join(self.shapes)})"
            )
        return []

    def resolve(self, hardware: Hardware, data: DataSource) -> tuple[Self, list[Choice]]:
        """Choose the size and the context."""
        text_source(data, self.name)
        choices = self.choose_model(hardware)
        if self.context == "auto":
            tokens = self.chosen(choices).tokens_per_sample
            choices.append(Choice("recipe.context", tokens, f"{self.context_is}, the size's own"))
        return self.chosen(choices), choices

    def own_context(self) -> int:
        """Return the size's own number of tokens."""
        return int(self.shapes[self.size].context)

    @property
    def tokens_per_sample(self) -> int:
        """``context``, where it is not auto, else the size's own."""
        return self.own_context() if isinstance(self.context, str) else self.context

    def smaller(self) -> list[str]:
        names = list(self.shapes)
        below = names[: names.index(self.size)] if self.size in names else []
        return [f"recipe.size={name}" for name in reversed(below)]

    def facts(self, model: nn.Module, datasets: TextDatasets) -> dict[str, Any]:
        return {"size": self.size}


@dataclass
class SizedTextRecipe(SizedRecipe):
    """What the models of text that are not causal share: their options, and their export."""

    template: ClassVar[str] = ""
    """Where the special tokens stand, see ``recipes.export.save_tokenizer``."""
    size: str = "auto"
    context: int | str = "auto"
    dropout: float = 0.1
    attention: str = "sdpa"
    """sdpa: torch's fused kernels, as far as they take the model's mask and bias; eager: scores of T × T in memory."""

    def __post_init__(self) -> None:
        check_attention(self.attention)
        check_dropout(self.dropout)
        check_context(self.context, least=16)

    def fitted(
        self, weights: dict[str, Tensor], model: Any, datasets: TextDatasets, about: dict[str, Any]
    ) -> tuple[dict[str, Tensor], list[Choice]]:
        """Return the weights with this model's padding of the vocabulary."""
        with_padding(weights, model, model, datasets.vocabulary, about)
        return weights, []

    def export(self, model: nn.Module, datasets: TextDatasets, folder: Path) -> None:
        """Write a folder that transformers' auto classes open, the tokenizer beside the weights."""
        save_model(model, folder, datasets.vocabulary)
        save_tokenizer(datasets.tokens.tokenizer, folder, datasets.special, self.template)
