"""Options of the scripts that use a trained model."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.config.options import Overriding, check_choice
from trainer.errors import UserError
from trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from inference.exported import Exported

_KEYS = ("device", "seed", "micro_batch_size", "eval_samples", "metrics", "deterministic", "recipe_path")
_GROUPS = ("recipe", "data", "augment", "precision", "loader")


@dataclass
class RunOptions(Overriding):
    """Which weights: options of every script that uses a trained model."""

    takes: ClassVar[Collection[str]] = ("precision", "loader", "device", "deterministic")

    run: str = ""
    """A run folder, its ``best/``, another exported folder, or ``mlflow:RUN_ID``."""
    uri: str = ""
    """``tracking.uri``, for a run in MLflow."""
    output_dir: str = "outputs"
    """The folder that a run in MLflow is downloaded to."""

    def __post_init__(self) -> None:
        if not self.run:
            raise UserError("missing required option: run; set a run folder, such as run=outputs/gpt2-bf16-s0")
        if not self._in_mlflow:
            RunFolder.open("run", self.run, self.output_dir)

    @property
    def _in_mlflow(self) -> bool:
        return self.run.startswith(("mlflow:", "runs:/"))

    def find(self) -> Exported:
        """Return the weights that ``run`` names.

        Raises:
            UserError: there are no exported weights, or those of a model that no recipe has.
        """
        from inference.exported import open_exported

        path = Path(self.run).expanduser()
        if self._in_mlflow:
            from inference.fetched import fetch

            path = fetch(self.run, self.uri or None, self.output_dir)
        return open_exported(self.run, path)


@dataclass
class EvaluateOptions(RunOptions):
    """Of scripts/evaluate.py."""

    takes = (*_KEYS, *_GROUPS, "-m")

    split: str = "valid"
    output: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("split", self.split, ("valid", "test", "train", "all"))


@dataclass
class GenerateOptions(RunOptions):
    """Of scripts/generate.py."""

    prompt: str = ""
    n: int = 1
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256
    cache: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise UserError('missing required option: prompt; set the beginning of a text, such as prompt="def "')
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature={self.temperature} must be 0 (always the most probable token) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.n > 1 and self.temperature == 0:
            raise UserError(f"n={self.n} with temperature=0 would give the same text {self.n} times; set n=1")


@dataclass
class PredictOptions(RunOptions):
    """Of scripts/predict.py."""

    path: str = ""
    top: int = 5
    batch_size: int = 32
    output: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError("missing required option: path; set a photo or a folder of photos, such as path=photo.jpg")
        if not Path(self.path).expanduser().exists():
            raise UserError(f"path={self.path}: there is no such file or folder")


def recorded_of(
    run: RunFolder, described: dict[str, Any], other_data: bool, with_data: bool, split: str
) -> dict[str, Any]:
    """Return the run's options as far as evaluation needs them, by dotted key; ``described``: config.json of best/."""
    left_out = set() if with_data else {"data", "augment"}
    left_out |= {"eval_samples"} if other_data or split != "valid" else set()
    # What a model was fine-tuned from is in its weights; the others are of training only.
    dropped = {f"recipe.{key}" for key in ("pretrained", "class_weights", "train_image_size")}
    dropped |= {"augment.mixup", "augment.cutmix"}
    dropped |= {"loader.workers"} if other_data else set()
    wanted = {*_GROUPS, *_KEYS} - left_out
    recorded = {key: value for key, value in run.config().items() if key.partition(".")[0] in wanted}
    if other_data and "image_size" in described:
        recorded["recipe.image_size"] = described["image_size"]
    return {key: value for key, value in recorded.items() if key not in dropped}
