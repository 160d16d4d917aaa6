"""Where the weights of a trained model are: a run folder, its ``best/``, an exported folder, or a run in MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.huggingface import RECIPES
from trainer.config.registration import groups
from trainer.errors import UserError
from trainer.files import BEST, read_object
from trainer.run_folder import RunFolder


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

    @property
    def evaluation(self) -> Path:
        """Where the results of evaluating the model are written."""
        return (self.run.path if self.run else self.folder) / "evaluation"

    def recorded(self) -> dict[str, Any]:
        """Return the run's options by dotted key; of an exported folder alone, none."""
        return self.run.config() if self.run else {}


@dataclass
class RunOptions:
    """Which weights: options of every script that uses a trained model."""

    run: str = ""
    """A run folder, its ``best/``, another exported folder, or ``mlflow:RUN_ID``."""
    uri: str = ""
    """``tracking.uri``, for a run in MLflow."""
    output_dir: str = "outputs"
    """The folder that a run in MLflow is downloaded to."""

    def find(self) -> Exported:
        """Return the weights that ``run`` names.

        Raises:
            UserError: there is no such folder, it holds no exported weights, or those of a model that no recipe has.
        """
        if not self.run:
            raise UserError("missing required option: run; set a run folder, such as run=outputs/gpt2-bf16-s0")
        return find(self.run, self.uri or None, self.output_dir)


def find(given: str, uri: str | None = None, output_dir: str = "outputs") -> Exported:
    """Return the weights in a folder or in MLflow, see ``RunOptions``."""
    if given.startswith(("mlflow:", "runs:/")):
        from inference.fetched import fetch

        path = fetch(given, uri, output_dir)
    else:
        path = RunFolder.open("run", given, output_dir).path
    above = path.parent if path.name == BEST else path.resolve().parent
    for folder in (path, above) if path.resolve().name == BEST else (path,):
        if "precision.mode" in read_object(folder / "config.json"):
            return _of_run(given, RunFolder(folder))
    config = read_object(path / "config.json")
    if not config:
        raise UserError(
            f"run={given}: the folder has no config.json, so it is no run and no exported model; "
            "give a run folder, its best/, or a folder that save_pretrained wrote"
        )
    classifier = "arch" in config and "classes" in config
    name = str(config.get("recipe", "resnet" if classifier else config.get("model_type")))
    known = list(groups()["recipe"]) if "recipe" in config else [*RECIPES, "resnet"]
    if name not in known:
        raise UserError(
            f"run={given}: config.json names a model of type {name:.60}, which no recipe has; "
            f"use a folder of one of {', '.join(known)}"
        )
    return Exported(given, path, config, None, name)


def _of_run(given: str, run: RunFolder) -> Exported:
    best, recorded = run.path / BEST, run.config()
    config = read_object(best / "config.json")
    if not config or not any(best.glob("*.safetensors")):
        if recorded.get("checkpoint.enabled") is False:
            remedy = "it was trained with checkpoint=none, which keeps none: train it again without that option"
        else:
            remedy = f"it has not ended; finish it with:\n  python scripts/train.py resume={run.path}"
        raise UserError(f"run={given} has no weights in {best}: {remedy}")
    return Exported(given, best, config, run, str(recorded.get("recipe")))
