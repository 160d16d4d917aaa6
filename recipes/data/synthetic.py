"""``data=synthetic``: generated data for every recipe; it is cheap and can be learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from recipes.data.images.pixels import ArrayImages
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.data.text.labelled import EncodedTexts, Encoding, LabelledDatasets, LabelledSource
from recipes.data.text.tokenizers import Tokenizer, word_level
from recipes.data.text.tokens import TextSource, TokenData
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.errors import check_number

TRAIN_TOKENS, VALID_TOKENS = 2**20, 2**16
IMAGE_POOL = 256
PATTERN_CELLS = 4
TEACHER_RANK = 8


@dataclass
class Synthetic(TextSource, ImageSource, LabelledSource):
    """Tokens, labelled texts, images or vectors, whichever the recipe requests; always the same ones."""

    kind: ClassVar[str] = "synthetic"
    vocab_size: int = 50257
    """Number of token ids."""
    classes: int = 1000
    """Number of classes; the pool of 256 images has at most the first 256."""
    samples: int = 8192
    """Images or vectors per epoch."""

    def __post_init__(self) -> None:
        check_number("data.vocab_size", self.vocab_size, 2)
        check_number("data.classes", self.classes, 2)
        check_number("data.samples", self.samples, 8)

    def tokens(self, tokenizer: str | None) -> TokenData:
        """Return pairs of tokens: the first drawn, rare ones seldom; the second a function of the first.

        Ids lie below ``vocab_size`` whatever the tokenizer is, which is not opened.
        """
        kind = np.uint16 if self.vocab_size <= 2**16 else np.uint32

        def draw(seed: int, count: int) -> np.ndarray:
            skewed = np.random.default_rng(seed).random(count // 2) ** 4
            first = (skewed * self.vocab_size).astype(np.int64)
            return np.stack([first, (7 * first + 3) % self.vocab_size], axis=1).reshape(-1).astype(kind)

        description = f"synthetic: {TRAIN_TOKENS:,} tokens, vocabulary {self.vocab_size:,}"
        # ``<123>`` stands for 123.
        numbers = word_level({f"<{number}>": number for number in range(self.vocab_size)}, r"<\d+>")
        return TokenData(draw(0, TRAIN_TOKENS), draw(1, VALID_TOKENS), Tokenizer(numbers, "numbers"), description)

    def labelled(self, encoding: Encoding) -> LabelledDatasets:
        """Return windows of the tokens, as long as the model takes; the first token decides the class."""
        from datasets import Dataset

        data, length = self.tokens(None), encoding.length
        tokenizer = data.tokenizer.with_special(dict(encoding.special), encoding.template)
        pad = tokenizer.token_id("pad_token")
        assert pad is not None

        def windows(tokens: np.ndarray) -> EncodedTexts:
            rows = tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.int32)
            labels = torch.from_numpy(rows[:, 0] % np.int64(self.classes))
            return EncodedTexts(Dataset.from_dict({"ids": rows}), labels, np.arange(len(rows)), pad, length)

        return LabelledDatasets(
            windows(data.train),
            windows(data.valid),
            f"{data.description} in texts of {length}, {self.classes:,} classes",
            classes=[str(label) for label in range(self.classes)],
            multi_label=False,
            tokenizer=tokenizer,
            pad=pad,
            vocabulary=max(tokenizer.vocab_size, encoding.vocabulary),
        )

    def images(self, image_size: int | None) -> ImageDatasets:
        """Return noise over a coarse pattern that depends on the class; by default 224 × 224 pixels.

        An epoch repeats a pool of 256 images, so a batch takes one copy.
        """
        size = image_size or 224
        pattern = np.random.default_rng(0).integers(0, 128, (self.classes, 3, PATTERN_CELLS, PATTERN_CELLS), np.uint8)
        cells = np.arange(size) * PATTERN_CELLS // size

        def pool(seed: int, count: int, length: int) -> ArrayImages:
            labels = np.arange(count) % self.classes
            images = np.random.default_rng(seed).integers(0, 128, (count, 3, size, size), np.uint8)
            images += pattern[labels][:, :, cells[:, None], cells]
            return ArrayImages(images, labels, length)

        parts = {
            "training": pool(1, IMAGE_POOL, self.samples),
            "validation": pool(2, IMAGE_POOL // 4, self.samples // 8),
        }
        names = [str(label) for label in range(self.classes)]
        half, spread = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
        return self.opened(self.kind, self.kind, parts, names, size, None, mean=half, std=spread)

    def vectors(self, width: int) -> Datasets:
        """Return normal inputs ``x`` and a smooth low-rank teacher's targets ``y``: float32, B × width."""
        teacher = torch.Generator().manual_seed(0)
        inward = torch.randn(width, TEACHER_RANK, generator=teacher) / width**0.5
        outward = torch.randn(TEACHER_RANK, width, generator=teacher) / TEACHER_RANK**0.5
        level = torch.randn(width, generator=teacher)

        def pool(seed: int, count: int) -> Vectors:
            x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
            return Vectors(x, torch.tanh(x @ inward) @ outward + level)

        description = f"synthetic: {self.samples:,} vectors of width {width:,}"
        return Datasets(pool(1, self.samples), pool(2, self.samples // 8), description)


class Vectors:
    """A dataset of vectors in memory and their targets, both N × width."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``x`` and ``y``, float32, B × width."""
        rows = torch.tensor([sample.index for sample in samples])
        return {"x": self.x[rows], "y": self.y[rows]}
