"""GPT-2 as transformers has it: the published sizes, and smaller ones."""

from __future__ import annotations

from typing import Any, NamedTuple


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

# In one kernel each, where transformers' gelu_new, the name that GPT-2's own config has, takes eight.
ACTIVATIONS = {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}


def new_gpt2(
    shape: Shape,
    vocabulary: int,
    context: int,
    dropout: float,
    attention: str = "sdpa",
    activation: str = ACTIVATIONS["tanh"],
) -> Any:
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
        activation_function=activation,
        **dropouts(dropout),
    )
    return GPT2LMHeadModel(config)


def dropouts(dropout: float) -> dict[str, float]:
    """Return the options of transformers' config that set every dropout."""
    return {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
