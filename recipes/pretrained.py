"""``recipe.pretrained``: the config and the weights of one of transformers' models, from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipes.data.text.pretrained import located
from trainer.errors import UserError, first_line
from trainer.files import TOKENIZER

RECIPES = ("gpt2", "llama", "bert", "t5")
"""The recipes that open such folders; a recipe's name is transformers' own for the type of model."""
_REMEDY = "give a folder written by save_pretrained, or leave it out to train from random weights"


def pretrained_config(source: str, kind: str) -> Any:
    """Return transformers' config of the model in a folder or under a hub id; no weights are read.

    Args:
        source: the folder, or the hub id.
        kind: what the model must be: ``gpt2``, ``llama``, ``bert`` or ``t5``.

    Raises:
        UserError: there is none, or it is of another kind.
    """
    from transformers import AutoConfig

    with _opening(source, kind) as place:
        config = AutoConfig.from_pretrained(**place)
    if config.model_type != kind:
        other = config.model_type
        use = f"use recipe={other}" if other in RECIPES else f"recipes open {', '.join(RECIPES)}"
        raise UserError(f"recipe.pretrained={source} is of type {other}, not {kind}; {use}")
    return config


def open_pretrained(source: str, kind: str, cls: Any, vocabulary: int, attention: str, **options: Any) -> Any:
    """Return the model of a hub id or folder in fp32, its tables of token ids resized to ``vocabulary``.

    Rows that are added get the mean of the others. Their logits then lie where the others' do: the published
    GPT-2's are near -35, and a row of small random numbers, whose logit is near 0, would take all the probability.

    Args:
        source: see ``pretrained_config``.
        kind: see there.
        cls: transformers' class of the model. Layers that the source lacks, such as a head, are random.
        vocabulary: rows of the tables.
        attention: transformers' name of its form.
        options: of the config, such as dropout.

    Raises:
        UserError: it cannot be opened.
    """
    if torch.get_default_device().type == "meta" or is_kept(source):  # only the shapes are needed
        config = pretrained_config(source, kind)
        config.vocab_size, config._attn_implementation = vocabulary, attention
        for name, value in options.items():
            setattr(config, name, value)
        config.dtype = torch.float32
        return cls(config)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with _opening(source, kind) as place:
        # Transformers would load the weights in whatever dtype they were saved.
        model = cls.from_pretrained(**place, dtype=torch.float32, attn_implementation=attention, **options)
    own = model.config.vocab_size
    if vocabulary == own:
        return model
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    with torch.no_grad():
        for layer in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
            layer.weight[own:] = layer.weight[:own].mean(0)
    return model


def is_kept(source: str) -> bool:
    """Return whether a folder is what a run keeps of a pretrained model to be resumed: config and tokenizer.

    The weights are those of the run's checkpoint.
    """
    folder = Path(source).expanduser()
    return folder.name == TOKENIZER and (folder / "config.json").is_file()


@contextmanager
def _opening(source: str, kind: str) -> Iterator[dict[str, Any]]:
    """Give the arguments of ``from_pretrained``, whose errors become the user's."""
    place = located(source, f"recipe.pretrained={source}", _REMEDY)
    try:
        yield place
    except (OSError, ValueError) as error:
        raise UserError(
            f"recipe.pretrained={source} cannot be opened as a {kind} ({first_line(error)}); {_REMEDY}"
        ) from error
