"""BERT that answers questions about a passage (Devlin et al. 2018), trained on any text; new or pretrained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from recipes.data.text.tokens import TextDatasets
from recipes.huggingface import SizedRecipe
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.recipe import DataSource, LossOutput, Sizes

IGNORED = -100
"""An end that lies beyond the passage: not a target."""
LONGEST_QUESTION = 16


class Shape(NamedTuple):
    """The numbers that make one BERT."""

    layers: int
    width: int
    heads: int
    context: int


# Devlin et al. 2018 with SQuAD's 384 tokens; nano is BERT-Tiny of Turc et al. 2019. Feed-forward layers are 4 × wider.
SHAPES = {"nano": Shape(2, 128, 2, 64), "base": Shape(12, 768, 12, 384), "large": Shape(24, 1024, 16, 384)}


class Quotations(Dataset):
    """Questions made of a text: at which position in the passage are these words?

    A sample is [CLS] question [SEP] passage [SEP] and padding, as in SQuAD, and the question quotes 8 to 16 tokens of
    the passage (fewer where ``context`` is small). Passages fill half of the room to all of it. If the answer
    continues beyond the passage, it has no end.
    """

    def __init__(self, tokens: np.ndarray, context: int, cls: int, sep: int, pad: int) -> None:
        """Make them of a text's ids; ``cls``, ``sep`` and ``pad`` are the ids of [CLS], [SEP] and padding."""
        self.tokens, self.context = tokens, context
        self.cls, self.sep, self.pad = cls, sep, pad
        self.longest = min(LONGEST_QUESTION, context // 8)
        self.room = context - 3 - self.longest

    def __len__(self) -> int:
        return (len(self.tokens) - self.longest) // self.room

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``tokens`` and ``segments`` (B × context) and ``start`` and ``end`` (B), all int64."""
        size = len(samples)
        tokens = np.full((size, self.context), self.pad, dtype=np.int64)
        segments = np.zeros_like(tokens)
        start, end = np.empty(size, dtype=np.int64), np.full(size, IGNORED, dtype=np.int64)
        for row, (index, seed) in enumerate(samples):
            rng = np.random.default_rng(index if seed is None else seed)
            text = self.tokens[index * self.room :][: self.room + self.longest]
            passage = int(rng.integers(self.room // 2, self.room + 1))
            quoted = int(rng.integers((self.longest + 1) // 2, self.longest + 1))
            first = int(rng.integers(passage))
            offset = quoted + 2  # of the passage
            tokens[row, 0] = self.cls
            tokens[row, 1 : offset - 1] = text[first : first + quoted]
            tokens[row, [offset - 1, offset + passage]] = self.sep
            tokens[row, offset : offset + passage] = text[:passage]
            segments[row, offset : offset + passage + 1] = 1
            start[row] = offset + first
            if first + quoted <= passage:
                end[row] = offset + first + quoted - 1
        arrays = {"tokens": tokens, "segments": segments, "start": start, "end": end}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass
class Bert(SizedRecipe):
    """The ``recipe=bert`` config. A target is where an answer starts, or where it ends."""

    name: ClassVar[str] = "bert"
    architecture = ("size", "pretrained")
    adjustable = ("context", "dropout")
    shapes = SHAPES
    on_cpu = "nano"
    on_gpu = "base"
    cpu_sizes = Sizes(steps=1500, batch_size=32, micro_batch_size=32)  # a minute or two
    gpu_sizes = Sizes(steps=2000, batch_size=32, micro_batch_size=32)  # the batch that fine-tuning is published with
    fine_tuning_lr = 0.05  # 5e-5, the highest of Devlin et al. 2018 for SQuAD (appendix A.3)
    masks_attention = True
    template = "{cls_token} $A {sep_token} | {cls_token} $A {sep_token} $B:1 {sep_token}:1"
    predictor = "question_answering"
    least_context = 16
    size: str = "auto"
    """nano, base or large; auto: nano on a CPU, base on a GPU."""
    context: int | str = "auto"
    """Tokens of question and passage together; auto: the published 384, fewer in nano."""
    dropout: float = 0.1
    """Dropout probability in training."""

    def datasets(self, data: DataSource, seed: int) -> TextDatasets:
        """Tokenise, and make questions of passages."""
        tokens, context = self.open_tokens(data), self.tokens_per_sample
        known = tokens.tokenizer.vocab_size
        own = self.own_special(tokens.tokenizer, ("cls_token", "sep_token", "pad_token"))
        cls, sep, pad = own or range(known, known + 3)
        special = {"cls_token": ("[CLS]", cls), "sep_token": ("[SEP]", sep), "pad_token": ("[PAD]", pad)}
        text = f"questions about passages of {Quotations(tokens.train, context, cls, sep, pad).room} tokens"
        return self.cut(tokens, lambda part: Quotations(part, context, cls, sep, pad), text, None if own else special)

    def new_model(self, datasets: Any) -> Any:
        """Return transformers' BERT in fp32: the pretrained one, or a new one.

        A new one has three token ids more than the text, for [CLS], [SEP] and padding.
        """
        from transformers import BertConfig, BertForQuestionAnswering

        if self.pretrained:
            dropouts = {"hidden_dropout_prob": self.dropout, "attention_probs_dropout_prob": self.dropout}
            vocabulary, pad = datasets.vocabulary, datasets.train.pad
            return self.open_pretrained(BertForQuestionAnswering, vocabulary, pad_token_id=pad, **dropouts)
        shape = SHAPES[self.size]
        config = BertConfig(
            vocab_size=datasets.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.width,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=max(512, self.tokens_per_sample),
            **{f"{role}_id": id for role, (_, id) in datasets.special.items()},
            attn_implementation=self.attention,
        )
        return BertForQuestionAnswering(config)

    def example(self, datasets: TextDatasets) -> dict[str, str]:
        """Return the beginning of the validation text as the passage, and words of it as the question."""
        decode, text = datasets.tokens.tokenizer.decode, datasets.tokens.valid[:32].tolist()
        return {"question": decode(text[8:16]), "context": decode(text)}

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.bert.encoder.layer)

    def count_targets(self, batch: Batch) -> int:
        """Return the number of starts and of ends within the passage."""
        return len(batch["start"]) + int((batch["end"] != IGNORED).sum())

    def count_units(self, batch: Batch) -> int:
        """Return the number of questions."""
        return len(batch["start"])

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        """Add up the cross-entropies of starts and ends over all positions, in fp32."""
        tokens = batch["tokens"]
        dtype = next(model.parameters()).dtype
        # What is added to the scores, B × 1 × 1 × T. With a mask of B × T transformers would read its values, and wait.
        mask = torch.zeros_like(tokens, dtype=dtype).masked_fill_(
            tokens == model.config.pad_token_id, torch.finfo(dtype).min
        )
        output = model(input_ids=tokens, token_type_ids=batch["segments"], attention_mask=mask[:, None, None])
        loss = right = torch.zeros((), device=tokens.device)
        for logits, place in ((output.start_logits, batch["start"]), (output.end_logits, batch["end"])):
            loss = loss + F.cross_entropy(logits.float(), place, reduction="sum", ignore_index=IGNORED)
            right = right + (logits.detach().argmax(1) == place).sum()
        return LossOutput(loss, {"accuracy": right})
