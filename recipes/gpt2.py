"""GPT-2 language modelling: the published sizes, a mini one that trains on a laptop, or a pretrained folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from recipes.gpt2_model import SHAPES, LanguageModel, LossHead, new_gpt2, open_pretrained, torch_can_chunk
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.recipe import (
    Batch,
    Choice,
    Dataset,
    Datasets,
    DataSource,
    LossOutput,
    Recipe,
    SampleId,
    Sizes,
    TextSource,
    TokenData,
)
from trainer.suggest import nearest

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
class GPT2(Recipe):
    """The ``recipe=gpt2`` config."""

    name: ClassVar[str] = "gpt2"
    unit: ClassVar[str] = "tokens"
    size: str = "auto"
    """nano, mini, 124M, 350M, 774M, 1558M; auto: mini on a CPU, 124M on a GPU."""
    pretrained: str | None = None
    """A hub id or folder to fine-tune instead of training from random weights; brings its own tokenizer."""
    context: int | str = "auto"
    """Tokens per sample; auto: 256 for mini, else 1024."""
    dropout: float = 0.0
    chunked_loss: bool | str = "auto"
    """Never hold the fp32 logits as a whole; auto: on a GPU, where torch offers it (2.13 and later)."""

    def __post_init__(self) -> None:
        self._tokens: TokenData  # set by datasets()
        self._label = ""  # the size of a pretrained model

    def resolve(self, hardware: Hardware, data: DataSource) -> list[Choice]:
        """Choose the size, the context and the form of the loss."""
        if not isinstance(data, TextSource):
            raise UserError(f"recipe=gpt2 cannot read data={data.kind}; use data=python_docs, text, hub or synthetic")
        if not 0 <= self.dropout < 1:
            raise UserError(f"recipe.dropout={self.dropout} must lie between 0 and 1")
        if isinstance(self.chunked_loss, str) and self.chunked_loss != "auto":
            raise UserError(f"recipe.chunked_loss={self.chunked_loss} must be true, false or auto")
        choices = []
        if self.size != "auto" and self.size not in SHAPES:
            raise UserError(f"recipe.size={self.size} is unknown{nearest(self.size, SHAPES)} ({', '.join(SHAPES)})")
        if self.pretrained and self.size != "auto":
            raise UserError("recipe.size has no effect with recipe.pretrained, which brings its size; drop one of them")
        if self.size == "auto" and not self.pretrained:
            self.size = "124M" if hardware.is_gpu else "mini"
            choices.append(Choice("recipe.size", self.size, f"suits {'a GPU' if hardware.is_gpu else 'this CPU'}"))
        if isinstance(self.context, str):
            if self.context != "auto":
                raise UserError(f"recipe.context={self.context} must be a whole number of tokens, or auto")
            self.context = SHAPES[self.size].context if self.size in SHAPES else 1024
            choices.append(Choice("recipe.context", self.context, "tokens per sample, the size's own"))
        if not self.context >= 2:
            raise UserError(f"recipe.context={self.context} must be at least 2 tokens")
        if self.chunked_loss is True and not torch_can_chunk():
            raise UserError(f"recipe.chunked_loss=true needs a newer torch than {torch.__version__}; use false or auto")
        if self.chunked_loss == "auto":
            self.chunked_loss = hardware.is_gpu and torch_can_chunk()
        return choices

    def sizes(self, hardware: Hardware) -> Sizes:
        """A few minutes of a CPU, or the published half a million tokens a step on a GPU."""
        if not hardware.is_gpu:
            return Sizes(steps=200, batch_size=16, micro_batch_size=16)
        return Sizes(steps=2000, batch_size=480, micro_batch_size=16)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        """Tokenise and cut into windows."""
        assert isinstance(data, TextSource)
        tokens = data.tokens(self.pretrained)
        context = self._context
        for part, array in (("training", tokens.train), ("validation", tokens.valid)):
            if len(array) < context + 1:
                raise UserError(
                    f"data={data.kind}: the {part} text has {len(array)} tokens, one sample needs {context + 1}; "
                    f"use a longer text or recipe.context={max(2, len(array) // 2)}"
                )
        self._tokens = tokens
        description = f"{tokens.description}, samples of {context} tokens"
        return Datasets(TokenWindows(tokens.train, context), TokenWindows(tokens.valid, context), description)

    def build_model(self) -> nn.Module:
        """Build GPT-2 with the vocabulary padded to a multiple of 64, which tensor cores like."""
        vocabulary = math.ceil(self._tokens.tokenizer.vocab_size / 64) * 64
        if self.pretrained:
            gpt2 = open_pretrained(self.pretrained, vocabulary, self._context, self.dropout)
            self._label = f"{sum(parameter.numel() for parameter in gpt2.parameters()) / 1e6:.0f}M pretrained"
        else:
            gpt2 = new_gpt2(SHAPES[self.size], vocabulary, self._context, self.dropout)
        gpt2.lm_head = LossHead(gpt2.transformer.wte.weight, self.chunked_loss is True)
        return LanguageModel(gpt2)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the transformer blocks."""
        assert isinstance(model, LanguageModel)
        return list(model.gpt2.transformer.h)

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

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder that ``AutoModelForCausalLM.from_pretrained`` opens, the tokenizer beside the weights."""
        from transformers.utils import logging

        assert isinstance(model, LanguageModel)
        logging.disable_progress_bar()
        model.gpt2.save_pretrained(folder)
        self._tokens.tokenizer.save(folder)

    def epilogue(self, model: nn.Module, device: torch.device) -> str | None:
        """Show a short sample of generated text."""
        assert isinstance(model, LanguageModel)
        tokenizer = self._tokens.tokenizer
        start = self._tokens.valid[: min(16, self._context // 2)].astype(np.int64)
        prompt = torch.from_numpy(start)[None].to(device)
        length = min(_SAMPLE_TOKENS, self._context - prompt.shape[1])
        torch.manual_seed(0)
        for _ in range(length):  # a cache would be faster; a hundred tokens do not need one
            hidden = model.gpt2.transformer(prompt, use_cache=False).last_hidden_state[:, -1]
            logits = model.gpt2.lm_head(hidden)[:, : tokenizer.vocab_size].float()
            if not logits.isfinite().all():
                return "no sample of text: the model's outputs are not finite"
            top, ids = logits.topk(min(40, logits.shape[-1]))
            prompt = torch.cat([prompt, ids.gather(1, torch.multinomial(top.softmax(-1), 1))], dim=1)
        written = prompt[0, len(start) :].tolist()
        return f"a sample after {tokenizer.decode(start.tolist())!r}:\n{tokenizer.decode(written)}"

    def facts(self) -> dict[str, Any]:
        """Return the size."""
        return {"size": self._label or self.size}

    @property
    def _context(self) -> int:
        assert isinstance(self.context, int)
        return self.context
