"""What the recipes of transformers' models share: a named size, the kind of attention, a folder to export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from recipes.data.text.source import TextDatasets, TextSource
from recipes.export import save_model, save_tokenizer
from trainer.errors import UserError, nearest
from trainer.hardware import Hardware
from trainer.recipe import Choice, DataSource, Recipe

ATTENTION = ("sdpa", "eager")
"""torch's fused kernels, or a product, a softmax and a product, which keep scores of T × T."""


def choose_size(size: str, known: Iterable[str], hardware: Hardware, on_cpu: str, on_gpu: str) -> list[Choice]:
    """Return what ``recipe.size=auto`` becomes; nothing for a size that the user set.

    Raises:
        UserError: a size that is not ``known``.

    """
    known = list(known)
    if size == "auto":
        if hardware.is_gpu:
            return [Choice("recipe.size", on_gpu, "GPU default")]
        return [Choice("recipe.size", on_cpu, "CPU default")]
    if size not in known:
        raise UserError(f"recipe.size={size} is unknown{nearest(size, known)} ({', '.join(known)})")
    return []


def smaller_sizes(size: str, known: Iterable[str]) -> list[str]:
    """Return the overrides that choose the sizes before ``size`` in ``known``, which are in ascending order."""
    names = list(known)
    below = names[: names.index(size)] if size in names else []
    return [f"recipe.size={name}" for name in reversed(below)]


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


@dataclass
class SizedTextRecipe(Recipe):
    """A model of a named size on any text: the options, and what becomes of ``auto``.

    A subclass names its sizes, the defaults among them, and what its context counts.
    """

    unit: ClassVar[str] = "samples"
    shapes: ClassVar[Mapping[str, Any]] = {}
    on_cpu: ClassVar[str] = ""
    on_gpu: ClassVar[str] = ""
    context_is: ClassVar[str] = ""
    template: ClassVar[str] = ""
    """Where the special tokens stand, see ``recipes.export.save_tokenizer``."""
    size: str = "auto"
    """A name out of ``shapes``; auto: ``on_cpu`` or ``on_gpu``."""
    context: int | str = "auto"
    """Tokens, see ``context_is``; auto: the size's own."""
    dropout: float = 0.1
    attention: str = "sdpa"
    """sdpa: torch's fused kernels, as far as they take the model's mask and bias; eager: scores of T × T in memory."""

    def __post_init__(self) -> None:
        check_attention(self.attention)
        check_dropout(self.dropout)
        check_context(self.context, least=16)

    def resolve(self, hardware: Hardware, data: DataSource) -> tuple[Self, list[Choice]]:
        """Choose the size and the context."""
        text_source(data, self.name)
        choices = choose_size(self.size, self.shapes, hardware, self.on_cpu, self.on_gpu)
        if self.context == "auto":
            tokens = self.chosen(choices).tokens_per_sample
            choices.append(Choice("recipe.context", tokens, f"{self.context_is}, the size's own"))
        return self.chosen(choices), choices

    @property
    def tokens_per_sample(self) -> int:
        """``context``, where it is not auto, else the size's own."""
        return self.shapes[self.size].context if isinstance(self.context, str) else self.context

    def smaller(self) -> list[str]:
        """Return the smaller sizes."""
        return smaller_sizes(self.size, self.shapes)

    def export(self, model: nn.Module, datasets: TextDatasets, folder: Path) -> None:
        """Write a folder that transformers' auto classes open, the tokenizer beside the weights."""
        save_model(model, folder, datasets.vocabulary)
        save_tokenizer(datasets.tokens.tokenizer, folder, datasets.special, self.template)

    def facts(self, model: nn.Module, datasets: TextDatasets) -> dict[str, Any]:
        """Return the size."""
        return {"size": self.size}
