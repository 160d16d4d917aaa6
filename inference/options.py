"""Options of the scripts that use a trained model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainer.config.options import Overriding
from trainer.config.registration import groups
from trainer.errors import UserError, check_choice, check_range, check_seed
from trainer.run_folder import RunFolder, is_in_mlflow, such_as

if TYPE_CHECKING:
    from inference.load import Exported

KEYS = ("device", "seed", "micro_batch_size", "eval_samples", "metrics", "deterministic", "recipe_path")
GROUPS = ("recipe", "data", "augment", "precision", "loader")


@dataclass
class RunOptions(Overriding):
    """Which weights: options of every script that uses a trained model."""

    takes: ClassVar[Collection[str]] = ("precision", "loader", "device", "deterministic")

    positional = "run"

    run: str = ""
    """A run folder, its ``best/``, another exported folder, or ``mlflow:RUN_ID``."""

    def __post_init__(self) -> None:
        if not self.run:
            near = such_as(Path("outputs"), "outputs", "run", self.recipes())
            raise UserError(f"missing required option: run; give a run folder{near}")
        if not is_in_mlflow(self.run):
            RunFolder.open("run", self.run, "outputs", recipes=self.recipes())

    @classmethod
    def recipes(cls) -> list[str]:
        """Return the recipes whose runs the script takes; none: of any."""
        return []

    def find(self) -> Exported:
        """Return the weights that ``run`` names.

        Raises:
            UserError: there are no exported weights, or those of a model that no recipe has.
        """
        from inference.load import open_exported

        if not is_in_mlflow(self.run):
            return open_exported(self.run, Path(self.run).expanduser())
        from inference.download import fetch

        return open_exported(self.run, fetch(self.run))


@dataclass
class EvaluateOptions(RunOptions):
    """Options of scripts/evaluate.py."""

    takes = (*KEYS, *GROUPS)

    split: str = "valid"
    output: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("split", self.split, ("valid", "test", "train", "all"))


@dataclass
class GenerateOptions(RunOptions):
    """Options of scripts/generate.py."""

    prompt: str = ""
    chat: bool = False
    n: int = 1
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise UserError("missing required option: prompt=…, the beginning of a text")
        check_seed(self.seed)
        check_range("temperature", self.temperature, "[0, inf)")
        check_range("top_p", self.top_p, "(0, 1]")

    @classmethod
    def recipes(cls) -> list[str]:
        return [name for name, recipe in groups()["recipe"].items() if getattr(recipe, "generates", False)]


@dataclass
class PredictOptions(RunOptions):
    """Options of scripts/predict.py."""

    path: str = ""
    top: int = 5
    batch_size: int = 32
    output: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError("missing required option: path; set a photo or a folder of photos, such as path=photo.jpg")
        if not Path(self.path).expanduser().exists():
            raise UserError(f"path={self.path}: there is no such file or folder; give a photo, or a folder of them")

    @classmethod
    def recipes(cls) -> list[str]:
        from recipes.resnet import ResNet

        return [name for name, recipe in groups()["recipe"].items() if issubclass(recipe, ResNet)]
