"""GPT-2 as the recipe trains it: transformers' model with the loss inside, in the published sizes and a mini one."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.text_pretrained import first_line, hub_reachable, in_hub_cache
from trainer.errors import UserError


class Shape(NamedTuple):
    """The numbers that make one GPT-2."""

    layers: int
    heads: int
    width: int
    context: int


# Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2; mini is ours, nano is that of
# nanoGPT's example for a CPU (README of karpathy/nanoGPT).
SHAPES = {
    "nano": Shape(4, 4, 128, 64),
    "mini": Shape(6, 6, 384, 256),
    "124M": Shape(12, 12, 768, 1024),
    "350M": Shape(24, 16, 1024, 1024),
    "774M": Shape(36, 20, 1280, 1024),
    "1558M": Shape(48, 25, 1600, 1024),
}


class LossHead(nn.Linear):
    """GPT-2's output layer, which can go straight to the summed loss.

    Args:
        embedding: vocabulary × width, shared as the weight.
        chunked: let torch compute the loss in pieces, so that the logits (tokens × vocabulary, in fp32)
            never exist as a whole; costs a second product with the weight in the backward pass.

    """

    def __init__(self, embedding: nn.Parameter, chunked: bool) -> None:
        super().__init__(embedding.shape[1], embedding.shape[0], bias=False, device="meta")
        self.weight = embedding
        self.chunked = chunked

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or with ``targets`` (int64, same leading shape) the loss summed over them, fp32."""
        if targets is None:
            return super().forward(hidden)
        hidden, targets = hidden.flatten(0, -2), targets.flatten()
        if not self.chunked:
            return F.cross_entropy(super().forward(hidden), targets, reduction="sum")
        device = hidden.device.type
        weight = self.weight
        if torch.is_autocast_enabled(device):
            hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
        options = torch.nn.LinearCrossEntropyOptions()
        # One loss per token, summed in fp32: torch's own sum would be in fp16, where it overflows.
        losses = F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)
        return losses.float().sum()


class LanguageModel(nn.Module):
    """transformers' GPT-2 with the loss inside forward."""

    def __init__(self, gpt2: Any) -> None:
        super().__init__()
        self.gpt2: Any = gpt2

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss (fp32 scalar) of predicting ``targets`` from ``tokens``, both int64 B × T."""
        hidden = self.gpt2.transformer(tokens, use_cache=False).last_hidden_state
        loss: Tensor = self.gpt2.lm_head(hidden, targets)
        return loss


def torch_can_chunk() -> bool:
    """Tell whether torch has linear_cross_entropy with chunking (2.13 and later)."""
    function = getattr(F, "linear_cross_entropy", None)
    return function is not None and "options" in inspect.signature(function).parameters


def new_gpt2(shape: Shape, vocabulary: int, context: int, dropout: float) -> Any:
    """Return transformers' GPT-2 of this shape with random weights in fp32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel, where transformers takes eight
        **_dropouts(dropout),
    )
    return GPT2LMHeadModel(config)


def open_pretrained(source: str, vocabulary: int, context: int, dropout: float) -> Any:
    """Return the GPT-2 of a hub id or folder in fp32, its embedding resized to ``vocabulary``.

    Raises:
        UserError: it cannot be opened, or its context is shorter than ``context``.

    """
    from transformers import GPT2LMHeadModel

    remedy = "give a folder written by save_pretrained, or leave it out to train from random weights"
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if source.startswith(("/", ".", "~")) or source.count("/") > 1:
            raise UserError(f"recipe.pretrained={source}: there is no such folder; {remedy}")
        if not hub_reachable() and not in_hub_cache(source):
            raise UserError(f"recipe.pretrained={source}: the Hugging Face hub cannot be reached; {remedy}")
    try:
        # Transformers would load the weights in whatever dtype they were saved.
        gpt2 = GPT2LMHeadModel.from_pretrained(
            str(folder) if folder.is_dir() else source,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=folder.is_dir() or in_hub_cache(source),
            **_dropouts(dropout),
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"recipe.pretrained={source} cannot be opened as a GPT-2 ({first_line(error)}); {remedy}"
        ) from error
    if gpt2.config.n_positions < context:
        raise UserError(
            f"recipe.context={context} is longer than the pretrained model's {gpt2.config.n_positions}; "
            f"use recipe.context={gpt2.config.n_positions}"
        )
    gpt2.resize_token_embeddings(vocabulary, mean_resizing=False)
    return gpt2


def _dropouts(dropout: float) -> dict[str, float]:
    return {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
