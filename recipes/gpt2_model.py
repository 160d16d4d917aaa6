"""GPT-2 as transformers has it: the published sizes, smaller ones, and pretrained weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes.data.text.pretrained import hub_reachable, in_hub_cache
from trainer.errors import UserError, first_line


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


def new_gpt2(shape: Shape, vocabulary: int, context: int, dropout: float, attention: str = "sdpa") -> Any:
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
        attn_implementation=attention,
        activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel, where transformers takes eight
        **_dropouts(dropout),
    )
    return GPT2LMHeadModel(config)


def pretrained_config(source: str) -> Any:
    """Return transformers' config of the GPT-2 in a folder or under a hub id; no weights are read.

    Raises:
        UserError: there is none, or it is of another model.
    """
    from transformers import AutoConfig

    folder = Path(source).expanduser()
    if not folder.is_dir():
        if source.startswith(("/", ".", "~")) or source.count("/") > 1:
            raise UserError(f"recipe.pretrained={source}: there is no such folder; {_REMEDY}")
        if not hub_reachable() and not in_hub_cache(source):
            raise UserError(f"recipe.pretrained={source}: the Hugging Face hub cannot be reached; {_REMEDY}")
    with _opening(source):
        config = AutoConfig.from_pretrained(**_where(source))
        if config.model_type != "gpt2":
            raise ValueError(f"it is of type {config.model_type}")
        return config


def open_pretrained(source: str, vocabulary: int, dropout: float, attention: str = "sdpa") -> Any:
    """Return the GPT-2 of a hub id or folder in fp32, its embedding resized to ``vocabulary``.

    Rows that are added get the mean of the others. Their logits then lie where the others' do: the published
    GPT-2's are near -35, and a row of small random numbers, whose logit is near 0, would take all the probability.

    Raises:
        UserError: it cannot be opened.
    """
    from transformers import GPT2LMHeadModel

    if torch.get_default_device().type == "meta":  # a forecast needs only the shapes
        config = pretrained_config(source)
        config.vocab_size, config._attn_implementation = vocabulary, attention
        return GPT2LMHeadModel(config)
    with _opening(source):
        # Transformers would load the weights in whatever dtype they were saved.
        gpt2 = GPT2LMHeadModel.from_pretrained(
            **_where(source), dtype=torch.float32, attn_implementation=attention, **_dropouts(dropout)
        )
    own = gpt2.config.vocab_size
    gpt2.resize_token_embeddings(vocabulary, mean_resizing=False)
    if vocabulary > own:
        with torch.no_grad():
            rows = gpt2.get_input_embeddings().weight  # the output layer's, too
            rows[own:] = rows[:own].mean(0)
    return gpt2


_REMEDY = "give a folder written by save_pretrained, or leave it out to train from random weights"


@contextmanager
def _opening(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(
            f"recipe.pretrained={source} cannot be opened as a GPT-2 ({first_line(error)}); {_REMEDY}"
        ) from error


def _where(source: str) -> dict[str, Any]:
    folder = Path(source).expanduser()
    return {
        "pretrained_model_name_or_path": str(folder) if folder.is_dir() else source,
        "local_files_only": folder.is_dir() or in_hub_cache(source),
    }


def _dropouts(dropout: float) -> dict[str, float]:
    return {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
