"""From an exported folder to the model that the recipe evaluates, in the precision of a setting."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from inference.exported import Exported
from inference.setting import Setting
from recipes.language import LanguageRecipe
from recipes.language_model import LanguageModel
from trainer.checkpoint.weights import fill
from trainer.data.contract import Datasets
from trainer.errors import UserError, first_line
from trainer.recipe import Recipe

_CLASSES = {
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "bert": "AutoModelForQuestionAnswering",
    "t5": "AutoModelForSeq2SeqLM",
}


def load_model(exported: Exported, recipe: Recipe, datasets: Datasets) -> nn.Module:
    """Return the model with its exported weights, fp32 on the CPU, in evaluation mode.

    Raises:
        UserError: the files do not fit the recipe, or cannot be read.
    """
    if "model_type" not in exported.config:
        model = recipe.build_model(datasets)
        fill(model, recipe.exported(exported.folder), f"run={exported.given}")
        return model.eval()
    network = open_transformers(exported, getattr(recipe, "attention", "sdpa"))
    if isinstance(recipe, LanguageRecipe):  # the vocabulary has no padding here
        return LanguageModel(network, recipe.name, recipe.chunked_loss is True).eval()
    return network


def in_precision(model: nn.Module, setting: Setting) -> nn.Module:
    """Return the model on its device, converted as in training, and set torch up for it.

    Raises:
        UserError: see ``Precision.convert``.
    """
    setting.apply()
    device = setting.hardware.device
    setting.config.precision.convert(model.to(device), device)
    return model


def open_tokenizer(exported: Exported) -> Any:
    """Return transformers' tokenizer of an exported folder. Raises UserError where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(exported.folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"run={exported.given}: {exported.folder} has no valid tokenizer ({error}); copy the model's own into it"
        ) from None


def open_transformers(exported: Exported, attention: str = "sdpa") -> Any:
    """Return transformers' model of an exported folder, fp32, in evaluation mode.

    Args:
        exported: whose config.json has a ``model_type``.
        attention: ``sdpa`` or ``eager``.

    Raises:
        UserError: the folder cannot be opened, or lacks weights of the model that the recipe trains.
    """
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what is missing is reported here
    try:
        model, found = getattr(transformers, _CLASSES[exported.recipe]).from_pretrained(
            exported.folder,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"run={exported.given}: {exported.folder} cannot be opened by transformers ({first_line(error)}); "
            "give a folder that save_pretrained wrote"
        ) from error
    finally:
        transformers.logging.set_verbosity(level)
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"run={exported.given}: {exported.folder} has no weights for {missing[0]}, so it is not the model that "
            f"recipe={exported.recipe} trains; give a folder of a {type(model).__name__}"
        )
    return model.eval()
