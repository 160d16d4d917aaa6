"""Predict the next token: samples, and models with the loss inside of forward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.text.samples import NO_TARGET
from recipes.data.text.tokens import Ids, Windows
from trainer.data.contract import Batch, SampleId

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
    """One of transformers' causal language models, kept under ``name``, with the loss inside of forward.

    Where the logits are nothing but the output layer's, this becomes a ``LossHead``, and the loss needs no logits.
    Else, such as where they are capped or scaled, the loss is that of the logits that the model itself computes.

    Args:
        network: transformers' model; its vocabulary may be padded.
        name: of the submodule.
        chunked, vocabulary: see ``LossHead``; ``chunked`` only where ``needs_logits`` has no reason.
        padded: whether rows of a batch end with padding, which the balance of experts leaves out.
    """

    def __init__(
        self, network: Any, name: str, chunked: bool, vocabulary: int | None = None, padded: bool = False
    ) -> None:
        super().__init__()
        self.vocabulary, self.padded = vocabulary, padded
        self.has_loss_head = not _changes_logits(network)
        self.balance = balance_of(network)
        """Factor of the loss of experts that have unequal loads; 0: there are none, or it is not wanted."""
        self.logits_for = _why_logits(self.balance, self.has_loss_head)
        """Why training computes all logits; empty: it does not."""
        if self.has_loss_head:
            network.set_output_embeddings(LossHead(network.get_output_embeddings().weight, chunked, vocabulary))
        self._name = name
        self.add_module(name, network)

    @property
    def network(self) -> Any:
        """The model as transformers has it."""
        return getattr(self, self._name)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the summed loss (fp32 scalar) of predicting ``targets`` from ``tokens``, both int64 B × T.

        A target of -100 is none. ``positions``, int64 B × T, begin anew with each of several texts in a row, which do
        not attend to each other. In training the loss of unequal experts is added, as often as there are targets.
        """
        given: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        balanced = self.training and self.balance > 0
        if self.has_loss_head and not balanced:
            hidden = self.network.base_model(tokens, use_cache=False, **given).last_hidden_state
            loss: Tensor = self.network.get_output_embeddings()(hidden, targets)
            return loss
        valid = targets != NO_TARGET
        if balanced:
            given["output_router_logits"] = True
            if self.padded:  # up to each row's last target
                given["attention_mask"] = valid.flip(1).cumsum(1).flip(1) > 0
        output = self.network(input_ids=tokens, use_cache=False, **given)
        logits = output.logits[..., : self.vocabulary].flatten(0, 1)
        loss = F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
        return loss + self.balance * output.aux_loss * valid.sum() if balanced else loss


def needs_logits(network: Any) -> str:
    """Return why the loss of one of transformers' models is computed from all of its logits; empty: it need not be."""
    return _why_logits(balance_of(network), not _changes_logits(network))


def _why_logits(balance: float, has_loss_head: bool) -> str:
    if balance:
        return "the balance of its experts is part of it"
    return "" if has_loss_head else "its logits are capped, scaled, or more than a product with the output layer"


def balance_of(network: Any) -> float:
    """Return transformers' factor of the loss of unequal experts; 0: the model has none."""
    takes = "output_router_logits" in inspect.signature(network.forward).parameters
    factors = (getattr(network, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    return float(next(filter(None, factors), 0)) if takes else 0.0


class _Outputs(tuple[Tensor, ...]):
    """What a base model returns that has hidden states, and None for everything else, whatever its name."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _changes_logits(network: Any) -> bool:
    """Return whether a model's logits are other than its output layer's product with its base model's hidden states.

    The model's own forward tells: it runs over two made-up states, which have to reach the layer as they are, and what
    that returns has to come out. Works on the meta device, too, and draws no random numbers.
    """
    head, base = network.get_output_embeddings(), network.base_model
    if type(head) is not nn.Linear or head.bias is not None or base is network:
        return True
    states, passed = head.weight.new_zeros(1, 2, head.in_features), []
    hook = head.register_forward_hook(lambda _, inputs, output: passed.extend((*inputs, output)))
    base.forward = lambda *_, **__: _Outputs((states,))
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=states.device)
        logits = network(input_ids=tokens, use_cache=False).logits
    finally:
        del base.forward
        hook.remove()
    # All of the states, perhaps sliced.
    whole = len(passed) == 2 and passed[0].shape == states.shape
    return not whole or all(states is not given for given in (passed[0], passed[0]._base)) or logits is not passed[1]


def routers(network: Any) -> list[str]:
    """Return the names of the routers of a mixture of experts.

    They are what transformers records the router's logits of; where that is more than a router (attention, all
    experts), it is left out.
    """
    kinds: tuple[Any, ...] = ()
    for part in network.modules():  # the model inside, which a prefix does not always name
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        several = recorded if isinstance(recorded, list) else [recorded]
        kinds += tuple(getattr(one, "target_class", one) for one in several)
    found: list[tuple[str, nn.Module]] = [one for one in network.named_modules() if isinstance(one[1], kinds)]
    return [name for name, module in found if not any(list(part.children()) for part in module.children())]


def use_causal_kernels(network: Any, context: int) -> None:
    """Let a causal model with sdpa's attention call it without a mask: every sample is one text of ``context`` tokens.

    Only where each layer attends to all earlier tokens, and nothing is added to its scores. Otherwise transformers
    checks in every forward pass whether texts are packed into a sample: the host waits for the device, and where it
    cannot read the values (a forecast of memory) a mask of T × T is made.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    config = network.config
    windows = [getattr(config, name, None) or context for name in ("sliding_window", "attention_chunk_size")]
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    whole = min(windows) >= context and kinds <= {"full_attention", "sliding_attention", "chunked_attention"}
    if config._attn_implementation == "sdpa" and network._supports_attention_backend and whole:
        AttentionInterface.register(_CAUSAL, sdpa_attention_forward)  # there is no mask of this name, so none is made
        config._attn_implementation = _CAUSAL


def torch_can_chunk() -> bool:
    """Return whether torch has linear_cross_entropy with chunking (2.13 and later)."""
    function = getattr(F, "linear_cross_entropy", None)
    return function is not None and "options" in inspect.signature(function).parameters


class TokenWindows(Windows):
    """Windows of ``context`` tokens with the next one, B × (context + 1) int64."""

    def __init__(self, tokens: Ids, context: int) -> None:
        super().__init__(tokens, context, 1)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        return {"tokens": torch.from_numpy(np.stack([self.cut(*sample) for sample in samples]).astype(np.int64))}
