"""Folders that transformers opens without this project: weights, config and a tokenizer with the same ids."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.data.text.tokenizers import Tokenizer
from recipes.lora import merged_state

log = logging.getLogger("mantissa")


def save_model(model: Any, folder: Path, vocabulary: int, eos: int | None = None) -> None:
    """Write config.json and model.safetensors for ``from_pretrained``.

    Args:
        model: one of transformers', in any dtype, which the files keep; adapters in it are merged, in fp32.
        folder: exists.
        vocabulary: how many token ids there are. Rows of padding above them are left out: nothing decodes those ids.
        eos: the id that ends a text, for a model that generates and whose config names none.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    exported = _without_padding(model, vocabulary)
    if eos is not None and exported.can_generate() and exported.config.eos_token_id is None:
        exported.config.eos_token_id = exported.generation_config.eos_token_id = eos
        exported.generation_config.pad_token_id = eos
    exported.save_pretrained(folder)


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, special: Mapping[str, tuple[str, int]] | None = None, template: str = ""
) -> int | None:
    """Write the tokenizer for ``AutoTokenizer``; return the id that ends a text, if it has one.

    Args:
        tokenizer: of the training data.
        folder: exists.
        special: tokens that the recipe added to the vocabulary: by role, text and id, in the order of the ids. Roles
            that end in ``_token`` are transformers' (``cls_token``). A text that the tokenizer has already gets an
            underscore.
        template: what is encoded for one text and, after a ``|``, for two, as in tokenizers' TemplateProcessing, with
            ``{role}`` for a special token.
    """
    tokenizer.save(folder)
    if special and (folder / "tokenizer.json").exists():  # not in a form of its own, such as sentencepiece's
        _add_special(folder, special, template)
    from transformers import AutoTokenizer

    eos: int | None = AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id
    return eos


def token_tables(network: Any) -> set[int]:
    """Return Python's ids of the weights of a transformers' model that have a row for each token id."""
    return {id(layer.weight) for layer in (network.get_input_embeddings(), network.get_output_embeddings()) if layer}


def _without_padding(model: Any, vocabulary: int) -> Any:
    """Return the same model with ``vocabulary`` token ids; it shares the memory of the weights."""
    config = copy.deepcopy(model.config)
    config.vocab_size = vocabulary
    if config._attn_implementation not in ("sdpa", "eager"):
        config._attn_implementation = "sdpa"
    with torch.device("meta"):
        exported = type(model)(config)
    tables = token_tables(model)
    owners = dict(model.named_parameters(remove_duplicate=False))
    exported.load_state_dict(
        {
            name: tensor[:vocabulary] if id(owners.get(name)) in tables else tensor
            for name, tensor in merged_state(model).items()
        },
        assign=True,
    )
    exported.tie_weights()
    if model.can_generate():
        exported.generation_config = copy.deepcopy(model.generation_config)
    return exported


def _add_special(folder: Path, special: Mapping[str, tuple[str, int]], template: str) -> None:
    import tokenizers
    from tokenizers import AddedToken, processors

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = backend.get_vocab()
    names = {}
    for role, (name, _) in special.items():
        while name in known:
            name += "_"  # a pretrained tokenizer may have one of its own
        names[role] = name
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
    ids = {role: backend.token_to_id(name) for role, name in names.items()}
    if ids != {role: id for role, (_, id) in special.items()}:
        log.warning("%s: the tokenizer's ids have gaps, so the recipe's own tokens are not in it", folder)
        return
    single, pair = (part.strip().format(**names) for part in template.split("|"))
    used = [(names[role], id) for role, id in ids.items() if f"{{{role}}}" in template]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    backend.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    roles = {role: name for role, name in names.items() if role.endswith("_token")}
    path.write_text(json.dumps(json.loads(path.read_text()) | roles, indent=2))
