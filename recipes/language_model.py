"""Causal language models as the recipes train them: transformers' model with the summed loss inside forward."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CAUSAL = "sdpa_causal"


class LossHead(nn.Linear):
    """The output layer, which can go straight to the summed loss.

    Args:
        weight: padded vocabulary × width; may be the embedding's.
        chunked: let torch compute the loss in pieces, so that the logits (tokens × vocabulary, in fp32)
            never exist completely; needs a second product with the weight in the backward pass.
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
        options = torch.nn.LinearCrossEntropyOptions()
        # One loss per token, summed in fp32: torch's own sum would be in fp16, where it overflows.
        losses = F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=self._padding_bias(hidden), reduction="none", options=options
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
    """

    def __init__(self, network: Any, name: str, chunked: bool = False, vocabulary: int | None = None) -> None:
        super().__init__()
        use_causal_kernels(network)
        network.lm_head = LossHead(network.lm_head.weight, chunked, vocabulary)
        self._name = name
        self.add_module(name, network)

    @property
    def network(self) -> Any:
        """The model as transformers has it."""
        return getattr(self, self._name)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss (fp32 scalar) of predicting ``targets`` from ``tokens``, both int64 B × T."""
        hidden = self.network.base_model(tokens, use_cache=False).last_hidden_state
        loss: Tensor = self.network.lm_head(hidden, targets)
        return loss


def use_causal_kernels(network: Any) -> None:
    """Let a causal model with sdpa's attention call it without a mask: every sample is one text.

    Otherwise transformers checks in every forward pass whether texts are packed into a sample: the host waits for
    the device, and where it cannot read the values (a forecast of memory) a mask of T × T is made.

    Args:
        network: transformers' model.
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
