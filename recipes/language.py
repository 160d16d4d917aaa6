"""Predict the next token: samples, models with the loss inside of forward, and what GPT-2 and Llama share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.text.samples import NO_TARGET, sample_datasets
from recipes.data.text.tokenizers import Tokenizer
from recipes.data.text.tokens import TextDatasets, TokenData, Windows
from recipes.huggingface import SizedRecipe, generated
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.errors import UserError, check_number
from trainer.hardware import threads
from trainer.recipe import Context, Decision, LossOutput

_SAMPLE_TOKENS = 64
_SAMPLE_S = 2.0
_CAUSAL = "sdpa_causal"


class LossHead(nn.Linear):
    """The output layer, which can go straight to the summed loss.

    Args:
        weight: padded vocabulary × width; may be the embedding's.
        chunked: let torch compute the loss in pieces, so that the logits (tokens × vocabulary, in fp32)
            never exist completely; needs a second matmul with the weight in the backward pass.
        vocabulary: how many rows of ``weight`` are token ids; the rest are padding, which the loss leaves out.
            None: all.
    """

    def __init__(self, weight: nn.Parameter, chunked: bool, vocabulary: int | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.chunked = chunked
        self.vocabulary = vocabulary or weight.shape[0]

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or with ``targets`` (int64, same leading shape) the loss summed over them, fp32.

        The loss is that of the vocabulary without its padding, exactly; only the logits include the padding.
        """
        if targets is None:
            return super().forward(hidden)
        hidden, targets = hidden.flatten(0, -2), targets.flatten()
        if not self.chunked:
            logits = super().forward(hidden)
            if self.vocabulary < logits.shape[-1]:
                # In place and without autograd: the gradient of a logit of -inf is 0 anyway.
                logits.detach()[:, self.vocabulary :].fill_(-math.inf)
            # Autocast does it too; a model of 16-bit weights has none, and its sum would be 16-bit.
            return F.cross_entropy(logits.float(), targets, reduction="sum")
        device = hidden.device.type
        weight = self.weight
        if torch.is_autocast_enabled(device):
            hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
        # Of 16-bit logits one loss per token, summed in fp32, though that takes the matmul once more: torch's own sum
        # is 16-bit, which overflows in fp16 and in bf16 was wrong by 16 % of 4,096 tokens (torch 2.15, on a CPU).
        reduction = "sum" if hidden.dtype == torch.float32 else "none"
        losses = F.linear_cross_entropy(
            hidden,
            weight,
            targets,
            linear_bias=self._padding_bias(hidden),
            reduction=reduction,
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        return losses.float().sum()

    def _padding_bias(self, hidden: Tensor) -> Tensor | None:
        """Return a bias that makes the logits of padding -inf: the logits of the chunks are not accessible."""
        rows = self.weight.shape[0]
        if self.vocabulary == rows:
            return None
        bias = hidden.new_zeros(rows)
        bias[self.vocabulary :] = -math.inf
        return bias


class LanguageModel(nn.Module):
    """One of transformers' causal language models, kept under ``name``, its output layer made a LossHead.

    Args:
        network: transformers' model, its vocabulary padded.
        name: of the submodule.
        chunked, vocabulary: see ``LossHead``.
        packed: whether rows of a batch hold several texts, so that transformers has to make a mask of their positions.
    """

    def __init__(
        self, network: Any, name: str, chunked: bool, vocabulary: int | None = None, packed: bool = False
    ) -> None:
        super().__init__()
        if not packed:
            use_causal_kernels(network)
        network.lm_head = LossHead(network.lm_head.weight, chunked, vocabulary)
        self._name = name
        self.add_module(name, network)

    @property
    def network(self) -> Any:
        """The model as transformers has it."""
        return getattr(self, self._name)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the summed loss (fp32 scalar) of predicting ``targets`` from ``tokens``, both int64 B × T.

        A target of -100 is none. ``positions``, int64 B × T, begin anew with each of several texts in a row, which do
        not attend to each other.
        """
        at = {} if positions is None else {"position_ids": positions}
        hidden = self.network.base_model(tokens, use_cache=False, **at).last_hidden_state
        loss: Tensor = self.network.lm_head(hidden, targets)
        return loss


def use_causal_kernels(network: Any) -> None:
    """Let a causal model with sdpa's attention call it without a mask: every sample is one text.

    Otherwise transformers checks in every forward pass whether texts are packed into a sample: the host waits for
    the device, and where it cannot read the values (a forecast of memory) a mask of T × T is made.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if network.config._attn_implementation == "sdpa":
        AttentionInterface.register(_CAUSAL, sdpa_attention_forward)  # there is no mask of this name, so none is made
        network.config._attn_implementation = _CAUSAL


def torch_can_chunk() -> bool:
    """Return whether torch has linear_cross_entropy with chunking (2.13 and later)."""
    function = getattr(F, "linear_cross_entropy", None)
    return function is not None and "options" in inspect.signature(function).parameters


class TokenWindows(Windows):
    """Windows of ``context`` tokens with the next one, B × (context + 1) int64."""

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        super().__init__(tokens, context, 1)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        return {"tokens": torch.from_numpy(np.stack([self.cut(*sample) for sample in samples]).astype(np.int64))}


@dataclass
class LanguageRecipe(SizedRecipe):
    """Text to next tokens. A subclass names its sizes and its model (``new_config``, ``blocks``)."""

    known_sum = True
    unit = "tokens"
    chunked_loss: bool | str = "auto"
    """Compute the loss in chunks: slower, but the fp32 logits never exist as a whole. auto: on a GPU, if they and
    their gradients take more than the free memory (torch 2.13 and later)."""
    vocabulary_multiple: int = 64
    """Pad the vocabulary to a multiple of this, for tensor cores; 1, or with ``lora``: no padding. The loss is the
    same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.chunked_loss, str) and self.chunked_loss != "auto":
            raise UserError(f"recipe.chunked_loss={self.chunked_loss} must be true, false or auto")
        check_number("recipe.vocabulary_multiple", self.vocabulary_multiple)

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        """Choose the size, the context and the form of the loss."""
        resolved, decisions = super().resolve(context)
        if self.chunked_loss is True and not torch_can_chunk():
            raise UserError(
                f"recipe.chunked_loss=true needs a newer torch than {torch.__version__}", "recipe.chunked_loss=auto"
            )
        if self.chunked_loss != "auto":
            return resolved, decisions
        before = context.recorded.get("recipe.chunked_loss", False)
        if context.recorded or not context.hardware.is_gpu or not torch_can_chunk():
            return replace(resolved, chunked_loss=before is True and torch_can_chunk()), decisions
        if context.datasets is None:
            return resolved, decisions
        # fp32 logits, log-probabilities and gradients: 12 bytes for each token and entry of the vocabulary
        tokens = context.micro_batch_size * resolved.tokens_per_sample
        chunked = 12 * tokens * context.datasets.vocabulary > context.free_bytes
        why = "the logits take more than the free memory"
        decisions += [Decision("recipe.chunked_loss", True, why)] if chunked else []
        return replace(resolved, chunked_loss=chunked), decisions

    def sampling(self, tokenizer: Tokenizer) -> tuple[Tokenizer, Callable[[np.ndarray], Dataset], str]:
        context = self.tokens_per_sample
        return tokenizer, lambda part: TokenWindows(part, context), ""

    def sample_datasets(self, tokens: TokenData) -> TextDatasets:
        known = int(self.pretrained_config().vocab_size) if self.pretrained else 0
        if self.lora.rank and known and tokens.added:
            problem = "adapters cannot learn the tokens of a chat template, and this model's tokenizer has none"
            raise UserError(f"{problem}; train all weights, or a model with a chat template", "recipe.lora.rank=0")
        return sample_datasets(tokens, self.tokens_per_sample, known, self._positions() if self.pretrained else None)

    def new_model(self, datasets: TextDatasets) -> LanguageModel:
        """Return the model with the loss inside of forward."""
        network, chunked, packed = super().new_model(datasets), self.chunked_loss is True, datasets.tokens.packing
        return LanguageModel(network, self.name, chunked, datasets.vocabulary, packed)

    def count_targets(self, batch: Batch) -> int:
        """Every token but each sample's first is predicted, or those that ``targets`` has."""
        if "targets" in batch:
            return int((batch["targets"] != NO_TARGET).sum())
        tokens = batch["tokens"]
        return tokens.shape[0] * (tokens.shape[1] - 1)

    def count_units(self, batch: Batch) -> int:
        """Count tokens, without padding, whether they are to be predicted or not."""
        return int(batch["lengths"].sum()) if "lengths" in batch else self.count_targets(batch)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Predict each token from those before it.

        A batch has ``tokens``, int64 B × (T + 1); or B × T with the ``targets`` of each, perhaps ``positions``, and
        ``lengths``, int64 B: the tokens of each row that are no padding.
        """
        tokens = batch["tokens"]
        if "targets" in batch:
            return LossOutput(model(tokens, batch["targets"], batch.get("positions")), {})
        return LossOutput(model(tokens[:, :-1], tokens[:, 1:]), {})

    def report(self, loss: float, sums: dict[str, float], targets: int) -> dict[str, float]:
        """Report the loss in nats per token, and its exponential."""
        return {"loss": loss, "perplexity": math.inf if loss > 700 else math.exp(loss)}

    def exported(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that ``export`` wrote, by their names in the model."""
        return {f"{self.name}.{name}": tensor for name, tensor in super().exported(folder).items()}

    def shown_by(self, datasets: TextDatasets) -> list[str]:
        words = datasets.first_words
        chat = ["chat=true"] * bool(datasets.tokens.samples)
        return ["generate.py", *chat, f"prompt={words}"] if words else super().shown_by(datasets)

    def closing_text(self, model: LanguageModel, datasets: TextDatasets, device: torch.device) -> str:
        """Show a short sample of generated text in one line: as much as fits into two seconds."""
        tokenizer = datasets.tokens.tokenizer
        start = datasets.beginning(self.tokens_per_sample // 2).astype(np.int64)
        prompt = torch.from_numpy(start)[None].to(device)
        length = min(_SAMPLE_TOKENS, self.tokens_per_sample - prompt.shape[1])
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 40, "top_p": 1.0}
        ends = {"max_new_tokens": length, "max_time": _SAMPLE_S, "eos_token_id": None}
        torch.manual_seed(0)
        try:
            with threads(1):  # a token is little work to share: where CPUs are busy, threads wait for each other
                ids = generated(model.network, prompt, tokenizer.vocab_size, **drawn, **ends)
        except FloatingPointError as error:
            return f"no sample: {error}"
        written = ids[0, len(start) :].tolist()
        cut = f" ({len(written)} of {length} tokens in {_SAMPLE_S:g} s)" * (len(written) < length)
        text = f"‹{tokenizer.decode(start.tolist())}›{tokenizer.decode(written)}"
        return f"sample{cut}  {' '.join(text.split())}"
