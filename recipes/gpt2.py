"""GPT-2 language modelling: the published sizes, a mini one that trains on a laptop, or a pretrained folder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from mantissa.formats import BF16
from recipes.causal_lm import CausalLM
from recipes.data.text.tokens import TextDatasets
from recipes.sized import SizedRecipe
from trainer.errors import check_choice, no_effect
from trainer.hardware import NATIVE, Hardware
from trainer.recipe import NO_OPTION, Sizes


class Shape(NamedTuple):
    """The numbers that make one GPT-2."""

    n_layer: int
    n_head: int
    n_embd: int
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

LARGE_BYTES = 80 * 10**9
"""Memory of a GPU on which a microbatch of 64 × 1024 tokens fits, with 124M in bf16; elsewhere it is of 32."""
MANY_CORES = 8
"""With so many, 200 steps of 16 samples take minutes; with two, where the CPU has instructions for bf16."""

# In one kernel each, where transformers' gelu_new, the name that GPT-2's own config has, takes eight.
ACTIVATIONS = {"tanh": "gelu_pytorch_tanh", "erf": "gelu"}


@dataclass
class GPT2(SizedRecipe, CausalLM):
    """The ``recipe=gpt2`` config."""

    name: ClassVar[str] = "gpt2"
    model_class = "GPT2LMHeadModel"
    architecture = ("size", "pretrained", "context")
    adjustable = ("gelu",)
    shapes = SHAPES
    on_cpu = "mini"
    on_gpu = "124M"
    cpu_sizes = Sizes(200, 16, 16, why="minutes on a CPU with bf16 instructions or 8 cores")
    slow_cpu_sizes = Sizes(200, 4, 16, why="minutes on a CPU of few cores without bf16 instructions")
    gpu_sizes = Sizes(steps=300, batch_size=32, micro_batch_size=32)  # minutes; the published batch is 480
    longest = 1024
    model_type: str | None = field(default=None, metadata=NO_OPTION)
    config: dict[str, Any] = field(default_factory=dict, metadata=NO_OPTION)
    size: str = "auto"
    """nano, mini, 124M, 350M, 774M or 1558M; auto: mini on a CPU, 124M on a GPU."""
    dropout: float = 0.0
    """Dropout probability in training."""
    gelu: str = "tanh"
    """GELU of a new model: tanh, GPT-2's approximation; erf, exact, takes a third of its time on a CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("recipe.gelu", self.gelu, ACTIVATIONS)
        if self.pretrained and self.gelu != "tanh":
            raise no_effect(f"recipe.gelu={self.gelu}", "init_from brings its own")

    def sizes(self, hardware: Hardware) -> Sizes:
        """Return those of the size; on a CPU the same in all precisions, so that all train the same."""
        sizes = super().sizes(hardware)
        fits = not self.pretrained and self.size in [*SHAPES][: [*SHAPES].index(self.on_gpu) + 1]
        if hardware.is_gpu and hardware.memory_bytes >= LARGE_BYTES and fits:
            return replace(sizes, micro_batch_size=64)
        if hardware.device.type != "cpu" or self.pretrained or self.size != self.on_cpu:
            return sizes
        fast = hardware.support(BF16.name) == NATIVE or hardware.cpu_cores >= MANY_CORES
        return self.cpu_sizes if fast else self.slow_cpu_sizes

    def config_options(self) -> dict[str, Any]:
        """Return the dropouts and the activation: the option's, or a pretrained model's own."""
        activation = ACTIVATIONS[self.gelu]
        if self.pretrained and (own := self.pretrained_config().activation_function) != "gelu_new":  # which is tanh
            activation = own
        return dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout) | {
            "activation_function": activation
        }

    def own_config(self, datasets: TextDatasets) -> dict[str, Any]:
        return {"n_positions": self.tokens_per_sample, "bos_token_id": None, "eos_token_id": None}
