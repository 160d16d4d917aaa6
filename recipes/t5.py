"""T5 that fills in removed spans of a text (Raffel et al. 2020); new or pretrained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mantissa.display import counted
from recipes.data.text.tokenizers import Tokenizer
from recipes.data.text.tokens import Ids, TextDatasets, Windows
from recipes.sized import SizedRecipe
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.recipe import LossOutput, Sizes

NOISE, SPAN = 0.15, 3
"""The share of a text that is removed, in spans of so many tokens on average."""
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>"}
"""Beside the sentinels; the first is the start, too."""
TEMPLATE = "$A {eos_token} | $A {eos_token} $B {eos_token}"


class Shape(NamedTuple):
    """The numbers that make one T5, encoder and decoder alike."""

    num_layers: int
    d_model: int
    num_heads: int
    d_kv: int
    d_ff: int
    context: int


# Raffel et al. 2020, as in the published checkpoints; nano is ours.
SHAPES = {
    "nano": Shape(2, 64, 4, 16, 256, 64),
    "small": Shape(6, 512, 8, 64, 2048, 512),
    "base": Shape(12, 768, 12, 64, 3072, 512),
}


class SpanCorruption(Windows):
    """Windows of a text with spans removed: T5's objective.

    In the input a sentinel stands for each span; the target is each sentinel and the span it stands for. Both end with
    EOS. All samples are equally long: from 512 input tokens on, 114 are the target.
    """

    def __init__(self, tokens: Ids, context: int, eos: Any, sentinels: Sequence[Any]) -> None:
        """Make them of a text's ids; ``eos`` and ``sentinels`` are ids of their own, one sentinel for each span."""
        super().__init__(tokens, window(context))
        self.noise, self.spans = _cuts(self.window)
        self.eos, self.sentinels = eos, np.array(sentinels)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``inputs`` and ``labels``, int64, B × the length of each."""
        inputs, labels = zip(*(self._sample(*sample) for sample in samples), strict=True)
        return {name: torch.from_numpy(np.stack(rows)) for name, rows in (("inputs", inputs), ("labels", labels))}

    def _sample(self, index: int, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index if seed is None else seed)
        text = self.cut(index, seed).astype(np.int64)
        lengths = np.stack([_divide(rng, self.window - self.noise, self.spans), _divide(rng, self.noise, self.spans)])
        out = np.repeat(np.arange(2 * self.spans) % 2 == 1, lengths.T.flatten())  # kept, out, kept, out …
        return self._with_sentinels(text, out), self._with_sentinels(text, ~out)

    def _with_sentinels(self, text: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Return ``text`` with a sentinel for each run of tokens that is ``out``, and EOS."""
        begins = out & ~np.concatenate([[False], out[:-1]])
        marked = np.where(begins, self.sentinels[np.cumsum(begins) - 1], text)
        return np.append(marked[begins | ~out], self.eos)


def window(context: int) -> int:
    """Return how many tokens of a text leave room for sentinels and EOS in an input of ``context``, at most."""
    return max(n for n in range(context, 2 * context) if n - _cuts(n)[0] + _cuts(n)[1] + 1 <= context)


def _cuts(tokens: int) -> tuple[int, int]:
    """Return how many of so many tokens are removed, and in how many spans."""
    noise = max(1, round(tokens * NOISE))
    return noise, max(1, round(noise / SPAN))


def _divide(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """Return ``parts`` positive lengths that add up to ``total``, all ways to do so equally likely."""
    borders = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(borders, prepend=0, append=total)


@dataclass
class T5(SizedRecipe):
    """The ``recipe=t5`` config."""

    name: ClassVar[str] = "t5"
    known_sum = True
    model_class = "T5ForConditionalGeneration"
    vocabulary_multiple = 128  # as in the published 32,128
    architecture = ("size", "pretrained", "context")
    adjustable = ("dropout",)
    shapes = SHAPES
    on_cpu = "nano"
    on_gpu = "small"
    cpu_sizes = Sizes(steps=500, batch_size=32, micro_batch_size=32)  # a minute or two
    gpu_sizes = Sizes(steps=500, batch_size=32, micro_batch_size=32)  # the published batch is 128
    masks_attention = True
    generates = True
    least_context = 16
    size: str = "auto"
    """nano, small or base; auto: nano on a CPU, small on a GPU."""
    context: int | str = "auto"
    """Maximum length of the encoder's input, in tokens; auto: the published 512, fewer in nano."""
    dropout: float = 0.1
    """Dropout probability in training."""

    def shown_by(self, datasets: TextDatasets) -> list[str]:
        return ["generate.py", f"prompt={datasets.first_words} <extra_id_0>"]

    def sampling(self, tokenizer: Tokenizer) -> tuple[Tokenizer, Callable[[Ids], Dataset], str]:
        context = self.tokens_per_sample
        noise, spans = _cuts(window(context))
        names = [f"<extra_id_{number}>" for number in range(spans)]
        tokenizer = tokenizer.with_special(SPECIAL | {name: name for name in names}, TEMPLATE)
        eos, *sentinels = (tokenizer.token_id(role) for role in ("eos_token", *names))
        about = f", {counted(noise, 'token')} in {counted(spans, 'span')} removed from each {window(context)}"
        return tokenizer, lambda part: SpanCorruption(part, context, eos, sentinels), about

    def config_options(self) -> dict[str, Any]:
        """Return the dropout."""
        return {"dropout_rate": self.dropout}

    def own_config(self, datasets: TextDatasets) -> dict[str, Any]:
        """Return the token ids beside the text's: start, which pads, and EOS."""
        start, eos = (datasets.tokenizer.token_id(role) for role in SPECIAL)
        return {"pad_token_id": start, "decoder_start_token_id": start, "eos_token_id": eos}

    def new_model(self, datasets: TextDatasets) -> Any:
        """Return the model, which knows how many of its rows are token ids; the others pad the vocabulary."""
        model: Any = super().new_model(datasets)
        model.vocabulary = datasets.vocabulary
        return model

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return the layers of encoder and decoder."""
        return [*model.encoder.block, *model.decoder.block]

    def count_targets(self, batch: Batch) -> int:
        """Return the number of tokens to fill in, sentinels and EOS among them."""
        return batch["labels"].numel()

    def count_units(self, batch: Batch) -> int:
        """Return the number of windows."""
        return len(batch["labels"])

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        """Predict each token of the target from the input and the target before it; add up in fp32.

        The padding of the vocabulary is left out: it is not exported, and nothing else would predict it.
        """
        labels, start = batch["labels"], model.config.decoder_start_token_id
        before = F.pad(labels[:, :-1], (1, 0), value=start)
        logits = model(input_ids=batch["inputs"], decoder_input_ids=before, use_cache=False).logits.flatten(0, 1)
        known = logits[:, : getattr(model, "vocabulary", None)]
        loss = F.cross_entropy(known.float(), labels.flatten(), reduction="sum")
        return LossOutput(loss, {})
