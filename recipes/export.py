"""Folders that transformers opens without this project: weights and config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from recipes.lora import merged_state


def save_model(model: Any, folder: Path, vocabulary: int, eos: int | None = None, new_eos: bool = False) -> None:
    """Write config.json and model.safetensors for ``from_pretrained``.

    Args:
        model: one of transformers', in any dtype, which the files keep; adapters in it are merged, in fp32.
        folder: exists.
        vocabulary: how many token ids there are. Rows of padding above them are left out: nothing decodes those ids.
        eos: the id that ends a text, for a model that generates and whose config names none.
        new_eos: whether it is new to the model, so that it takes the place of one that the config names.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = copy.deepcopy(model.config)
    config.vocab_size = vocabulary
    if config._attn_implementation not in ("sdpa", "eager"):
        config._attn_implementation = "sdpa"
    with torch.device("meta"):
        exported = type(model)(config)
    tables = token_tables(model)
    owners = dict(model.named_parameters(remove_duplicate=False))
    state = {
        name: tensor[:vocabulary] if id(owners.get(name)) in tables else tensor
        for name, tensor in merged_state(model).items()
    }
    exported.load_state_dict(state, assign=True)
    exported.tie_weights()
    if model.can_generate():
        exported.generation_config = copy.deepcopy(model.generation_config)
        if eos is not None and (new_eos or getattr(config, "eos_token_id", None) is None):
            exported.config.eos_token_id = exported.generation_config.eos_token_id = eos
            exported.generation_config.pad_token_id = eos
    exported.save_pretrained(folder)


def token_tables(network: Any) -> set[int]:
    """Return Python's ids of the weights of a transformers' model that have a row for each token id, and of biases."""
    layers = filter(None, (network.get_input_embeddings(), network.get_output_embeddings()))
    return {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
