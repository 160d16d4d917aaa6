"""The config under which a trained model is used: as it was trained, with other data or another precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from inference.load import Exported
from inference.options import GROUPS, KEYS
from recipes.causal_lm import CausalLM
from recipes.huggingface import check_context
from recipes.text_classifier import TextClassifier
from trainer.config.compose import compose, key_of
from trainer.config.registration import groups
from trainer.config.schema import Config
from trainer.config.settle import MICRO, Plan, plan_of, settle
from trainer.data.contract import Datasets
from trainer.errors import UserError, no_effect
from trainer.files import PRECISION_FILE, read_object
from trainer.hardware import Hardware, detect
from trainer.precision.kernels import convolves

_LONGEST = 1024
"""Tokens of a sample for an exported folder alone, where its model takes more."""
_OF_TRAINING = {
    *("recipe.pretrained", "recipe.class_weights", "recipe.train_image_size", "augment.mixup", "augment.cutmix"),
}
"""Options without an effect on a trained model. What one was fine-tuned from is in its weights."""


@dataclass(frozen=True)
class RunConfig:
    """What using a model needs beside its weights and the data."""

    plan: Plan
    own_data: bool
    """Whether it is the data that the run was trained on."""
    eval_samples: int | None
    """Samples to evaluate; None: all of them."""

    @property
    def config(self) -> Config:
        """The config without ``auto``, but for what the data decides."""
        return self.plan.config

    @property
    def hardware(self) -> Hardware:
        """Where it runs."""
        return self.plan.hardware

    def not_timed(self, model: nn.Module) -> str | None:
        """Return why the model's speed is not that of its formats, see ``not_timed_here``."""
        return self.config.precision.not_timed(self.hardware, convolves(model))

    def with_data(self, datasets: Datasets) -> tuple[RunConfig, Datasets]:
        """Return the config with what the open data decides, and the data as it is to be fetched."""
        settled = settle(replace(self.plan, datasets=datasets))
        return replace(self, plan=settled), settled.datasets

    def in_precision(self, model: nn.Module) -> nn.Module:
        """Return the model on its device, converted as in training, and set torch up for it in this process.

        Raises:
            UserError: see ``Precision.convert``.
        """
        config, device = self.config, self.hardware.device
        config.set_up()
        config.use_kernels(self.hardware, convolves(model))
        config.precision.convert(model.to(device), device, config.recipe.blocks, config.recipe.fp32_modules)
        return model


def configure(exported: Exported, overrides: Sequence[str], with_data: bool = True, split: str = "valid") -> RunConfig:
    """Return the config for these overrides of the command line.

    Args:
        exported: the trained model.
        overrides: of its config.
        with_data: whether samples of a data source are evaluated; else inputs of another kind, such as a prompt.
        split: of the data; of all but ``valid`` every sample is evaluated, as training does with its test data.

    Raises:
        UserError: an override that is unknown or has no effect, or data that is missing or does not suit the recipe.
    """
    typed = {key_of(override) for override in overrides}
    of_the_model = {
        **dict.fromkeys(("data.tokenizer", "data.vocab_size", "recipe.pretrained"), "brings weights and tokenizer"),
        **dict.fromkeys(("recipe.mean", "recipe.std"), "normalises images as it was trained"),
        **dict.fromkeys(("precision.then", "precision.until"), "is used in one precision"),
        "recipe": f"is a {exported.recipe}",
    }
    for key in sorted(typed & of_the_model.keys()):
        raise no_effect(key, f"run={exported.given} {of_the_model[key]}")
    other_data = any(key.partition(".")[0] == "data" for key in typed)
    if exported.run:
        recorded = _of_run(exported, other_data, with_data, split)
    elif with_data and "data" not in typed:
        is_of_images = "image_size" in exported.config
        example = "data=imagefolder data.path=photos" if is_of_images else "data=text data.path=notes.txt"
        raise UserError(
            f"run={exported.given} is an exported model without its run, so its data is not known; "
            f"add data=…, such as {example}"
        )
    else:
        recorded = _of_folder(exported)
    if recorded.get("recipe.model_type", "") is None:  # training began with pretrained weights
        recorded |= _type_of(exported)
    sizes = [override.partition("=")[2] for override in overrides if key_of(override) == MICRO]
    micro_batch_size = sizes[-1] if sizes else recorded.get(MICRO, "auto")
    # Training's batch need not be a multiple of the microbatch.
    fixed = [f"batch_size={micro_batch_size}", "run_name=evaluation"]
    config = compose([*overrides, *fixed], recorded, exported.own)
    # In the format of the step that the weights are of, where training changed it.
    step = read_object(exported.folder / PRECISION_FILE).get("step", 0)
    config = replace(config, precision=config.precision.at(step))
    check_context(getattr(config.recipe, "context", "auto"), exported.positions)
    samples = config.eval_samples if isinstance(config.eval_samples, int) else None
    return RunConfig(plan_of(config, detect(config.device)), exported.run is not None and not other_data, samples)


def _of_run(exported: Exported, other_data: bool, with_data: bool, split: str) -> dict[str, Any]:
    """Return the run's options as far as the model's use needs them, by dotted key."""
    assert exported.run is not None
    other_data = other_data or not with_data
    left_out = set() if with_data else {"data", "augment"}
    left_out |= {"eval_samples"} if other_data or split != "valid" else set()
    dropped = _OF_TRAINING | ({"loader.workers"} if other_data else set())
    recorded = {
        key: value
        for key, value in exported.run.config().items()
        if key.partition(".")[0] in {*GROUPS, *KEYS} - left_out and key not in dropped
    }
    if other_data and "image_size" in exported.config:
        recorded["recipe.image_size"] = exported.config["image_size"]
    return recorded


def _type_of(exported: Exported) -> dict[str, Any]:
    """Return the options that say of which of transformers' types the model is, and how many tokens it takes."""
    takes = {} if exported.positions is None else {"max_position_embeddings": exported.positions}
    return {"recipe.model_type": exported.config["model_type"], "recipe.config": takes}


def _of_folder(exported: Exported) -> dict[str, Any]:
    """Return what an exported folder without its run says about its options, by dotted key."""
    config, recipe = exported.config, groups()["recipe"][exported.recipe]
    options: dict[str, Any] = {}
    if "options" in config:  # of a recipe without a library that knows it
        options = config["options"]
    elif "arch" in config:
        options = {"arch": config["arch"], "image_size": config["image_size"]}
    elif issubclass(recipe, TextClassifier):
        options = {"pretrained": str(exported.folder)}
    elif exported.positions is not None:
        options = {"context": min(exported.positions, _LONGEST)}
    recorded = {"recipe": exported.recipe} | {f"recipe.{key}": value for key, value in options.items()}
    if recipe is CausalLM:  # its presets have one type
        recorded |= _type_of(exported)
    if (part := config.get("evaluated_part")) is not None:
        recorded |= {"augment": "none"} if part == 1 else {"augment": "imagenet", "augment.eval_crop": part}
    return recorded
