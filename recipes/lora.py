"""Low-rank adapters (Hu et al., "LoRA", 2021), which the peft library puts into transformers' models."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from mantissa.tensors import wide_dtype
from recipes.language import routers
from trainer.errors import UserError, check_number, check_range, nearest

ADAPTER = "default"
"""peft's name of the only adapter."""
ALL = "all-linear"
"""peft's word for all linear layers but the output."""


@dataclass
class LoRA:
    """Options ``recipe.lora``: matrices of a low rank are added to some layers, and only they are trained."""

    rank: int = 0
    """Rank of the adapters, such as 8; 0: no adapters, all weights are trained."""
    alpha: float = 16.0
    """Scales the output of the adapters by ``alpha`` / ``rank``; peft's examples use 16 to 32."""
    dropout: float = 0.0
    """Dropout probability of an adapter's inputs."""
    target: Any = "auto"
    """Linear layers to adapt, by name or end of name: [c_attn, c_proj]; auto: peft's choice, attention's input
    layers, or where it has none for the model, all-linear: all linear layers but the output and routers; experts whose
    weights are one tensor stay as they are."""

    def __post_init__(self) -> None:
        check_number("recipe.lora.rank", self.rank, 0)
        check_range("recipe.lora.alpha", self.alpha, "(0, inf)")
        check_range("recipe.lora.dropout", self.dropout, "[0, 1)")
        if isinstance(self.target, str) and self.target != "auto":
            self.target = [self.target]
        if not self.target or not all(isinstance(name, str) for name in self.target):
            raise UserError(f"recipe.lora.target={self.target} must be auto, or names of layers such as [c_attn]")
        if self.rank and find_spec("peft") is None:
            raise UserError("recipe.lora needs peft, which is not installed; pip install peft", "recipe.lora.rank=0")

    def targets(self, kind: str) -> list[str]:
        """Return the names of the layers; ``kind`` is transformers' type of the model."""
        if self.target != "auto":
            return list(self.target)
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as AUTO

        return list(AUTO.get(kind, [ALL]))

    def inject(self, network: Any) -> None:
        """Add the adapters to a model of transformers, in place; nothing but them is trainable.

        Raises:
            UserError: a target that is no linear layer of the model.
        """
        if not self.rank:
            return
        from peft import LoraConfig
        from transformers.pytorch_utils import Conv1D

        targets = self.targets(network.config.model_type)
        if targets != [ALL]:
            _check_targets(network, targets)
        config = LoraConfig(
            task_type=_task_of(network),
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=_linear_layers(network) if targets == [ALL] else targets,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in network.modules()),  # it is transposed
        )
        network.add_adapter(config)


def merged_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model, with its adapters added to the weights they adapt, under transformers' names.

    With adapters all of it is fp32, or fp64: 16 bits would lose part of what they add.
    """
    state = network.state_dict()
    if not any(".lora_" in name for name in state):
        return state
    from peft.tuners.lora import LoraLayer

    dtype = wide_dtype(list(state.values()))
    merged = {plain(name): tensor.to(dtype) for name, tensor in state.items() if ".lora_" not in name}
    for name, layer in network.named_modules():
        if isinstance(layer, LoraLayer):
            down, up = (part[ADAPTER].weight.detach().to(dtype) for part in (layer.lora_A, layer.lora_B))
            change = layer.scaling[ADAPTER] * (up @ down)
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + (change.T if layer.fan_in_fan_out else change)
    return merged


def plain(name: str) -> str:
    """Return the name that a weight has in a model without adapters."""
    return name.replace(".base_layer", "")


def with_adapters(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights of a model without adapters under this model's names, with its own new adapters."""
    state = model.state_dict()
    if not any(".lora_" in name for name in state) or any(".lora_" in name for name in weights):
        return weights
    names = {plain(name): name for name in state if ".lora_" not in name}
    renamed = {names.get(name, name): tensor for name, tensor in weights.items()}
    return renamed | {name: tensor for name, tensor in state.items() if ".lora_" in name}


def _task_of(network: Any) -> str | None:
    """Return peft's name of what a model is for; None: it has none."""
    if type(network).__name__.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    if not network.can_generate():
        return None
    return "SEQ_2_SEQ_LM" if network.config.is_encoder_decoder else "CAUSAL_LM"


def _linear_layers(network: Any) -> list[str]:
    """Return the names of the linear layers of a model without its output or head, and without routers of experts.

    (peft's own all-linear adapts some routers, and experts whose weights are one tensor with ranks of its own choice.)
    """
    from transformers.pytorch_utils import Conv1D

    inside = set(network.base_model.modules()) - {network.get_output_embeddings()}
    left_out = set(routers(network))
    return [
        name
        for name, module in network.named_modules()
        if module in inside and isinstance(module, (nn.Linear, Conv1D)) and name not in left_out
    ]


def _check_targets(network: Any, targets: list[str]) -> None:
    from transformers.pytorch_utils import Conv1D

    output = network.get_output_embeddings()
    modules = {name: module for name, module in network.named_modules() if name and module is not output}
    linear = {name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))}
    endings = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        found = {name for name in modules if f".{name}".endswith(f".{target}")}
        if not found or not found <= linear:
            near = nearest(target, endings)
            raise UserError(f"recipe.lora.target: {target!r} is no linear layer{near}; it can be {', '.join(endings)}")
