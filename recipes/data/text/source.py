"""What a source of text gives to the language recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from trainer.data.contract import Datasets
from trainer.recipe import DataSource


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    label: str
    """For the start block, such as ``own BPE of 4096``."""
    separator: list[int]
    """The ids between two documents."""
    special: Mapping[int, str] = {}
    """The special tokens by id, as they are written: where a text has one, it becomes the id, which is no text."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""
        ids: list[int] = np.asarray(self.encode_many([text])[0]).tolist()
        return ids

    def encode_many(self, texts: list[str]) -> Sequence[ArrayLike]:
        """Return the ids of each text: a list or one-dimensional array of integers."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; ids it does not know are left out."""
        ...

    def save(self, folder: Path) -> None:
        """Write what is needed to open it again, beside an exported model."""
        ...


@dataclass
class TokenData:
    """A tokenised corpus: flat arrays of ids (uint16, or uint32 for large vocabularies), memory-mapped."""

    train: np.ndarray
    valid: np.ndarray
    tokenizer: Tokenizer
    description: str
    test: np.ndarray | None = None
    """None: the source has no text for testing."""
    text_bytes: Mapping[str, int] = field(default_factory=dict)
    """The length in UTF-8 of the text of each part, by its name here; empty: it is no text."""


@dataclass(kw_only=True)
class TextDatasets(Datasets):
    """Samples cut from a tokenised corpus, for a model of so many token ids."""

    tokens: TokenData
    vocabulary: int
    """Number of token ids that the model knows: the tokenizer's, and those added to them."""
    special: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Tokens that the recipe adds to the tokenizer's, by role: text and id, in the order of the ids."""

    def keep(self, folder: Path) -> None:
        """Write the tokenizer, without the recipe's own tokens, to ``tokenizer/``."""
        path = folder / "tokenizer"
        path.mkdir(exist_ok=True)
        self.tokens.tokenizer.save(path)


@dataclass
class TextSource(DataSource):
    """Data that can be read as text."""

    def tokens(self, tokenizer: str | None) -> TokenData:
        """Tokenise the corpus, or open it from the cache.

        Args:
            tokenizer: a hub id or folder that overrides the source's own choice (a pretrained model
                brings its tokenizer), or None.

        Raises:
            UserError: the text is missing, empty, binary or cannot be fetched.
        """
        raise NotImplementedError
