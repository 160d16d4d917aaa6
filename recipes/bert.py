"""BERT that fills in masked tokens of a text (Devlin et al. 2018); new or pretrained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from recipes.data.text.tokenizers import Tokenizer
from recipes.data.text.tokens import Ids, TextDatasets, Windows
from recipes.sized import SizedRecipe
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.recipe import LossOutput, Sizes

MASKED, REPLACED, KEPT = 0.15, 0.8, 0.1
"""The share of a text that is predicted; of it the shares that become [MASK], and that stay as they are. The rest
becomes random tokens (Devlin et al. 2018, section 3.1)."""
SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
TEMPLATE = "{cls_token} $A {sep_token} | {cls_token} $A {sep_token} $B:1 {sep_token}:1"


class Shape(NamedTuple):
    """The numbers that make one BERT."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    context: int


# Devlin et al. 2018; nano is BERT-Tiny of Turc et al. 2019. Feed-forward layers are 4 × wider.
SHAPES = {"nano": Shape(2, 128, 2, 64), "base": Shape(12, 768, 12, 512), "large": Shape(24, 1024, 16, 512)}


class MaskedWindows(Windows):
    """Windows of a text with tokens masked: [CLS] window [SEP], each of ``context`` tokens, as many of them masked.

    Args:
        tokens: a text's ids.
        context: length of a sample.
        vocabulary: number of the text's token ids, of which random ones are drawn.
        cls: id of [CLS]; likewise ``sep`` and ``mask``.
    """

    def __init__(self, tokens: Ids, context: int, vocabulary: int, cls: int, sep: int, mask: int) -> None:
        super().__init__(tokens, context - 2)
        self.vocabulary, self.cls, self.sep, self.mask = vocabulary, cls, sep, mask
        self.masked = max(1, round(self.window * MASKED))

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``tokens`` (B × context), and of the masked ones ``places`` and ``labels`` (B × masked), all int64."""
        tokens = np.empty((len(samples), self.window + 2), dtype=np.int64)
        places = np.empty((len(samples), self.masked), dtype=np.int64)
        labels = np.empty_like(places)
        tokens[:, 0], tokens[:, -1] = self.cls, self.sep
        for row, (index, seed) in enumerate(samples):
            rng = np.random.default_rng(index if seed is None else seed)
            tokens[row, 1:-1] = self.cut(index, seed)
            places[row] = 1 + np.sort(rng.choice(self.window, self.masked, replace=False))
            labels[row] = tokens[row, places[row]]
            kind, other = rng.random(self.masked), rng.integers(self.vocabulary, size=self.masked)
            seen = np.where(kind < REPLACED, self.mask, np.where(kind < REPLACED + KEPT, labels[row], other))
            tokens[row, places[row]] = seen
        arrays = {"tokens": tokens, "places": places, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass
class Bert(SizedRecipe):
    """The ``recipe=bert`` config. A target is a masked token."""

    name: ClassVar[str] = "bert"
    known_sum = True
    model_class = "BertForMaskedLM"
    unit: ClassVar[str] = "tokens"
    architecture = ("size", "pretrained")
    adjustable = ("context", "dropout")
    shapes = SHAPES
    on_cpu = "nano"
    on_gpu = "base"
    cpu_sizes = Sizes(steps=1500, batch_size=32, micro_batch_size=32)  # a minute or two
    gpu_sizes = Sizes(steps=500, batch_size=32, micro_batch_size=32)  # the published batch is 256
    fine_tuning_lr = 0.05  # 5e-5, the highest of Devlin et al. 2018 (appendix A.3)
    least_context = 16
    size: str = "auto"
    """nano, base or large; auto: nano on a CPU, base on a GPU."""
    context: int | str = "auto"
    """Tokens of a sample, [CLS] and [SEP] among them; auto: the published 512, fewer in nano."""
    dropout: float = 0.1
    """Dropout probability in training."""

    def sampling(self, tokenizer: Tokenizer) -> tuple[Tokenizer, Callable[[Ids], Dataset], str]:
        context, known = self.tokens_per_sample, tokenizer.vocab_size
        tokenizer = tokenizer.with_special(SPECIAL, TEMPLATE)
        ids: list[Any] = [tokenizer.token_id(role) for role in ("cls_token", "sep_token", "mask_token")]
        about = f", {MASKED:.0%} of the tokens masked"
        return tokenizer, lambda part: MaskedWindows(part, context, known, *ids), about

    def config_options(self) -> dict[str, Any]:
        """Return the dropouts."""
        return dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout)

    def own_config(self, datasets: TextDatasets) -> dict[str, Any]:
        """Return four token ids more than the text has, [CLS], [SEP], padding and [MASK], and the rest of the shape."""
        ids = {f"{role}_id": datasets.tokenizer.token_id(role) for role in SPECIAL if role != "mask_token"}
        return ids | {
            "intermediate_size": 4 * self.shape.hidden_size,
            "max_position_embeddings": max(512, self.tokens_per_sample),
        }

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.bert.encoder.layer)

    def count_targets(self, batch: Batch) -> int:
        """Return the number of masked tokens."""
        return batch["labels"].numel()

    def count_units(self, batch: Batch) -> int:
        """Return the number of tokens that are read."""
        return batch["tokens"].numel()

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        """Predict the masked tokens from all others; add up the cross-entropies in fp32."""
        labels = batch["labels"].flatten()
        logits = model(input_ids=batch["tokens"]).logits
        rows = torch.arange(len(logits), device=logits.device)[:, None]
        masked = logits[rows, batch["places"]].flatten(0, 1).float()
        right = (masked.detach().argmax(1) == labels).sum()
        return LossOutput(F.cross_entropy(masked, labels, reduction="sum"), {"accuracy": right})
