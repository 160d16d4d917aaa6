"""GPT-2 language modelling: the published sizes, a mini one that trains on a laptop, or a pretrained folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from mantissa.formats import BF16, FP32
from recipes.language import LanguageModel, LanguageRecipe
from trainer.errors import UserError
from trainer.hardware import NATIVE, Hardware, threads
from trainer.profiling.rates import matmul_rates
from trainer.recipe import Sizes


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

FAST_TFLOPS = 0.2
"""From this rate of a CPU's matmuls on, 200 steps of 16 samples take minutes. Of two cores those with instructions for
bf16 were above it, others below."""

# In one kernel each, where transformers' gelu_new, the name that GPT-2's own config has, takes eight.
ACTIVATIONS = {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}


@dataclass
class GPT2(LanguageRecipe):
    """The ``recipe=gpt2`` config."""

    name: ClassVar[str] = "gpt2"
    architecture = ("size", "pretrained", "context")
    adjustable = ("gelu",)
    shapes = SHAPES
    on_cpu = "mini"
    on_gpu = "124M"
    cpu_sizes = Sizes(steps=200, batch_size=16, micro_batch_size=16)  # a few minutes, where matmuls are fast
    slow_cpu_sizes = Sizes(steps=200, batch_size=4, micro_batch_size=16)  # a few minutes, where they are not
    gpu_sizes = Sizes(steps=2000, batch_size=480, micro_batch_size=16)  # the published half a million tokens a step
    longest = 1024
    size: str = "auto"
    """nano, mini, 124M, 350M, 774M or 1558M; auto: mini on a CPU, 124M on a GPU."""
    dropout: float = 0.0
    """Dropout probability in training."""
    gelu: str = "tanh"
    """GELU of a new model: tanh, GPT-2's approximation; erf, exact, takes a third of its time on a CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gelu not in ACTIVATIONS:
            raise UserError(f"recipe.gelu={self.gelu} is unknown; use recipe.gelu={'|'.join(ACTIVATIONS)}")
        if self.pretrained and self.gelu != "tanh":
            raise UserError(f"recipe.gelu={self.gelu} has no effect with init_from, which has its own; remove it")

    def sizes(self, hardware: Hardware) -> Sizes:
        """Return those of the device; for the CPU's own model those that suit the measured rate of its matmuls.

        That is bf16's, or fp32's where bf16 uses fp32 arithmetic, of one thread's own time: what else runs here does
        not count. It is the same in all precisions, so that all train the same.
        """
        if hardware.device.type != "cpu" or self.pretrained or self.size != self.on_cpu:
            return super().sizes(hardware)
        name = BF16.name if hardware.support(BF16.name) == NATIVE else FP32.name
        count = torch.get_num_threads()
        with threads(1):
            rate = count * matmul_rates(hardware, [name])[name]
        sizes, found = (self.slow_cpu_sizes, "less than") if rate < FAST_TFLOPS else (self.cpu_sizes, "at least")
        why = f"for a CPU that multiplies at {found} {FAST_TFLOPS} TFLOP/s: {rate:.2g} in {name}"
        return replace(sizes, why=why)

    def network(self, vocabulary: int, context: int) -> Any:
        """Return transformers' GPT-2 in fp32: with random weights, or the pretrained one."""
        from transformers import GPT2Config, GPT2LMHeadModel

        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        activation = ACTIVATIONS[self.gelu]
        if self.pretrained:
            own = self.pretrained_config().activation_function
            activation = activation if own == "gelu_new" else own  # the same function
            return self.open_pretrained(GPT2LMHeadModel, vocabulary, activation_function=activation, **dropouts)
        shape = SHAPES[self.size]
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=context,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=self.attention,
            activation_function=activation,
            **dropouts,
        )
        return GPT2LMHeadModel(config)

    def blocks(self, model: LanguageModel) -> list[nn.Module]:
        return list(model.network.transformer.h)
