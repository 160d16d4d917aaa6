"""Predict the next token: what the recipes of causal language models share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from recipes.data.text.source import TextDatasets
from recipes.huggingface import SizedRecipe
from recipes.language_model import LanguageModel, torch_can_chunk
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.recipe import DataSource, Decision, LossOutput

_SAMPLE_TOKENS = 120


class TokenWindows(Dataset):
    """Windows of ``context`` + 1 tokens cut from one long array, B × (context + 1) int64.

    In training each window starts at a random offset within its stretch, so that epochs differ.
    """

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        last = len(self.tokens) - self.context - 1
        rows = []
        for index, seed in samples:
            start = index * self.context + (0 if seed is None else seed % self.context)
            start = min(start, last)
            rows.append(self.tokens[start : start + self.context + 1])
        return {"tokens": torch.from_numpy(np.stack(rows).astype(np.int64))}


@dataclass
class LanguageRecipe(SizedRecipe):
    """Text to next tokens. A subclass names its sizes and its model (``network``, ``blocks``)."""

    unit = "tokens"
    predictor = "text_generation"
    chunked_loss: bool | str = "auto"
    """Never hold the fp32 logits as a whole; auto: on a GPU, where torch offers it (2.13 and later)."""
    vocabulary_multiple: int = 64
    """The vocabulary is padded to a multiple of this, which tensor cores like; 1: as it is. Changes no loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.chunked_loss, str) and self.chunked_loss != "auto":
            raise UserError(f"recipe.chunked_loss={self.chunked_loss} must be true, false or auto")
        if self.vocabulary_multiple < 1:
            raise UserError(f"recipe.vocabulary_multiple={self.vocabulary_multiple} must be at least 1, such as 64")

    def network(self, vocabulary: int, context: int) -> Any:
        """Return transformers' model in fp32, for so many token ids and positions."""
        raise NotImplementedError

    def resolve(self, hardware: Hardware, data: DataSource) -> tuple[Self, list[Decision]]:
        """Choose the size, the context and the form of the loss."""
        resolved, decisions = super().resolve(hardware, data)
        if self.chunked_loss is True and not torch_can_chunk():
            raise UserError(f"recipe.chunked_loss=true needs a newer torch than {torch.__version__}; use false or auto")
        chunked = hardware.is_gpu and torch_can_chunk() if self.chunked_loss == "auto" else self.chunked_loss
        return replace(resolved, chunked_loss=chunked), decisions

    def datasets(self, data: DataSource, seed: int) -> TextDatasets:
        """Tokenise and cut into windows."""
        tokens, context = self.open_tokens(data), self.tokens_per_sample
        return self.cut(tokens, lambda part: TokenWindows(part, context), f"samples of {context} tokens")

    def new_model(self, datasets: TextDatasets) -> LanguageModel:
        """Return the model with its vocabulary padded."""
        multiple, vocabulary = self.vocabulary_multiple, datasets.vocabulary
        network = self.network(math.ceil(vocabulary / multiple) * multiple, self.tokens_per_sample)
        return LanguageModel(network, self.name, self.chunked_loss is True, vocabulary)

    def count_targets(self, batch: Batch) -> int:
        """Every token but each sample's first is predicted."""
        tokens = batch["tokens"]
        return tokens.shape[0] * (tokens.shape[1] - 1)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Predict each token from those before it."""
        tokens = batch["tokens"]
        return LossOutput(model(tokens[:, :-1], tokens[:, 1:]), {})

    def metrics(self, loss: float, sums: dict[str, float], targets: int) -> dict[str, float]:
        """Report the loss in nats per token, and its exponential."""
        return {"loss": loss, "perplexity": math.inf if loss > 700 else math.exp(loss)}

    def exported(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that ``export`` wrote, by their names in the model."""
        return {f"{self.name}.{name}": tensor for name, tensor in super().exported(folder).items()}

    def example(self, datasets: TextDatasets) -> str:
        """Return the beginning of the validation text."""
        return datasets.tokens.tokenizer.decode(datasets.tokens.valid[: min(16, self.tokens_per_sample // 2)].tolist())

    def epilogue(self, model: LanguageModel, datasets: TextDatasets, device: torch.device) -> str:
        """Show a short sample of generated text."""
        tokenizer = datasets.tokens.tokenizer
        start = datasets.tokens.valid[: min(16, self.tokens_per_sample // 2)].astype(np.int64)
        prompt = torch.from_numpy(start)[None].to(device)
        length = min(_SAMPLE_TOKENS, self.tokens_per_sample - prompt.shape[1])
        torch.manual_seed(0)
        for _ in range(length):  # a cache would be faster; a hundred tokens do not need one
            hidden = model.network.base_model(prompt, use_cache=False).last_hidden_state[:, -1]
            logits = model.network.lm_head(hidden)[:, : tokenizer.vocab_size].float()
            if not logits.isfinite().all():
                return "no generated sample: the model's outputs are not finite"
            top, ids = logits.topk(min(40, logits.shape[-1]))
            prompt = torch.cat([prompt, ids.gather(1, torch.multinomial(top.softmax(-1), 1))], dim=1)
        written = prompt[0, len(start) :].tolist()
        return f"a generated sample after {tokenizer.decode(start.tolist())!r}:\n{tokenizer.decode(written)}"
