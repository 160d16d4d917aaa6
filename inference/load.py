"""A trained model: where its weights are (a run folder, its ``best/``, an exported folder, a run in MLflow), and what
they open to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from recipes.causal_lm import CausalLM
from recipes.data.text.pretrained import open_tokenizer, opening
from recipes.data.text.tokenizers import Tokenizer
from recipes.data.text.tokens import TextDatasets
from recipes.huggingface import RECIPES, WITH_WEIGHTS, load_whole
from trainer.checkpoint.reader import fill
from trainer.checkpoint.schema import steps
from trainer.config.commands import resume_command
from trainer.config.registration import groups
from trainer.data.contract import Datasets
from trainer.errors import UserError
from trainer.files import BEST, final_status, read_config
from trainer.recipe import Recipe
from trainer.run_folder import RunFolder, run_of
from trainer.terminal import work


@dataclass(frozen=True)
class Exported:
    """The exported weights of a model, and the run that they come from, if that is known."""

    given: str
    """``run=…`` as the user gave it, for messages."""
    folder: Path
    """Holds ``config.json`` and the weights."""
    config: dict[str, Any]
    """The content of that ``config.json``."""
    run: RunFolder | None
    recipe: str
    """The name of the recipe that trained it, or that could have trained it."""
    own: Recipe | None = None
    """The recipe itself, where it is ``Recipe.of`` a program's model and data."""

    @property
    def results(self) -> Path:
        """The folder in which what is found out about the model is written."""
        return self.run.path if self.run else self.folder

    @property
    def positions(self) -> int | None:
        """How many tokens the model takes; None: any number, or it is of no text."""
        longest = self.config.get("n_positions", self.config.get("max_position_embeddings")) or -1
        is_t5 = self.config.get("model_type") == "t5"
        return None if is_t5 or longest < 0 else longest  # T5's are relative; XLNet's are -1

    def model(self, recipe: Recipe, datasets: Datasets, dtype: torch.dtype) -> nn.Module:
        """Return the model that the recipe evaluates with its weights, on the CPU, in evaluation mode.

        Args:
            recipe: of the run.
            datasets: that it evaluates.
            dtype: of the model, fp32 or fp64.

        Raises:
            UserError: the files do not fit the recipe, or cannot be read.
        """
        if "model_type" not in self.config:
            model = recipe.build_model(datasets).to(dtype)
            fill(model, recipe.exported(self.folder), f"run={self.given}")
            return model.eval()
        network = self.network(dtype, getattr(recipe, "attention", "sdpa"))
        if isinstance(recipe, CausalLM):  # the vocabulary has no padding here
            return recipe.with_loss(network, cast(TextDatasets, datasets)).eval()
        return network

    def network(self, dtype: torch.dtype, attention: str = "sdpa") -> Any:
        """Return transformers' model in evaluation mode; ``config`` has a ``model_type``.

        Args:
            dtype: of the model, fp32 or fp64.
            attention: ``sdpa`` or ``eager``.

        Raises:
            UserError: the folder cannot be opened, or lacks weights of the model that the recipe trains.
        """
        import transformers

        cls: Any = groups()["recipe"][self.recipe]
        wanted, key = f"give a folder {WITH_WEIGHTS}", f"run={self.given}: {self.folder}"
        failure = "cannot be opened by transformers"
        with work("loading the model"), opening(str(self.folder), key, failure, wanted) as place:
            kind = getattr(transformers, getattr(cls, "model_class", self.config["architectures"][0]))
            model, missing = load_whole(kind, key, place, dtype, attn_implementation=attention)
        if missing:
            raise UserError(
                f"{key} has no weights for {missing[0]}, so it is not the model that recipe={self.recipe} trains; "
                f"give a folder of a {kind.__name__}"
            )
        return model.eval()

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer beside the weights. Raises UserError where there is none."""
        return open_tokenizer(str(self.folder), f"run={self.given}")

    def check_tokens(self, what: str, count: int) -> None:
        """Refuse, with a UserError, ``what`` needs more token ids, ``count``, than the model has."""
        if count > (known := self.config.get("vocab_size", 0)):
            raise UserError(
                f"{what} needs {count} token ids, the model of run={self.given} knows {known}; give it the tokenizer "
                "that it was trained with"
            )


def open_exported(given: str, path: Path) -> Exported:
    """Return the weights in a folder, which ``given`` names.

    Raises:
        UserError: it holds no exported weights, or those of a model that no recipe has.
    """
    if run := run_of(path):
        return _of_run(given, run)
    config = read_config(path / "config.json")
    if not config:
        raise UserError(
            f"run={given}: the folder has no config.json, so it is no run and no exported model; "
            "give a run folder, its best/, or a folder that save_pretrained wrote"
        )
    classifier = "arch" in config and "classes" in config
    name = str(config.get("recipe", "resnet" if classifier else config.get("model_type")))
    recipes = groups()["recipe"]
    known = list(recipes) if "recipe" in config else [*RECIPES, *["resnet"] * classifier]
    made = next(iter(config.get("architectures") or []), "")  # transformers' class
    for end, other in (("ForSequenceClassification", "text_classifier"), ("ForCausalLM", "causal_lm")):
        if made.endswith(end) and other in recipes and (name not in known or other == "text_classifier"):
            return Exported(given, path, config, None, other)
    if name not in known:  # such as transformers' own ResNet, or timm's folders
        kind = (config.get("architectures") or [config.get("architecture", f"a model of type {name}")])[0]
        raise UserError(f"run={given}: config.json is of {kind:.60}, which is not read here; give a run or its best/")
    return Exported(given, path, config, None, name)


def _of_run(given: str, run: RunFolder) -> Exported:
    best, recorded = run.path / BEST, run.config()
    config = read_config(best / "config.json")
    if not config or not any(best.glob("[!.]*.safetensors")):
        if recorded.get("checkpoint.enabled") is False:
            remedy = "it was trained with checkpoint=none, which keeps none: train it again without that option"
        elif not steps(run.checkpoints):
            remedy = "it has no checkpoint either, so its weights are gone: train it again"
        else:
            ends = {
                "FINISHED": "it had them when it ended; export them again",
                "FAILED": "it failed, and summary.json says why; once that is mended, finish it",
            }
            what = ends.get(str(final_status(run.path)), "it has not ended; finish it")
            remedy = f"{what} with:\n  {resume_command(run.path)}"
        raise UserError(f"run={given} has no whole model in {best}: {remedy}")
    return Exported(given, best, config, run, str(recorded.get("recipe")))
