"""``init_from``: a new run takes the weights of another one, with the options of its model, or pretrained weights."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import evaluated_weights, fill
from trainer.checkpoint.weights import read_weights
from trainer.data.contract import Datasets
from trainer.errors import UserError, no_effect
from trainer.files import (
    BEST,
    CHECKPOINTS,
    CONFIG_FILE,
    NO_FOLDER,
    SUMMARY_FILE,
    TOKENIZER,
    TRACKING_FILE,
    is_kept,
    read_config,
    read_object,
    run_facts,
)
from trainer.recipe import Decision, Recipe
from trainer.run_folder import RunFolder, is_in_mlflow, run_of, to_continue


@dataclass(frozen=True)
class InitFrom:
    """The run, or the file of weights, that another run starts from."""

    path: Path
    """The run folder; or the weights that another program wrote, a file or a folder."""
    config: dict[str, Any]
    """What it was trained with, by dotted key; empty: it is no run."""
    step: int | None
    """Of the best weights of a run."""
    exported: bool
    """Whether they are those in ``best/``; else those of a checkpoint."""
    taken: Mapping[str, Any] = field(default_factory=dict)
    """Options of the run that the new one has taken over, by dotted key."""

    @classmethod
    def open(cls, given: str, output_dir: str, uri: str | None) -> InitFrom:
        """Find the run and its best weights; nothing is loaded.

        Args:
            given: a run folder, its ``best/``, or ``mlflow:RUN_ID``, which is fetched to ``output_dir``; else weights.
            output_dir: where run folders are.
            uri: ``tracking.uri``.

        Raises:
            UserError: there is no such run, it has no weights, or its config was changed.
        """
        if (path := Path(given).expanduser()).is_file():
            return cls(path, {}, None, exported=False)
        folder = RunFolder.open("init_from", given, output_dir, uri)
        run = run_of(folder.path)
        if run is None:
            read_config(folder.path / CONFIG_FILE)  # a run's that is damaged is no reason to take other options
            return cls(folder.path, {}, None, exported=False)
        path, config, exports = run.path, run.config(), run.path != folder.path
        saved = checkpoint.best_step(path / CHECKPOINTS)
        best = read_object(path / SUMMARY_FILE).get("best")
        step = int(best["step"]) if isinstance(best, dict) else saved
        if any((path / BEST).glob("*.safetensors")) and step is not None and (exports or saved in (None, step)):
            return cls(path, config, step, exported=True)
        saved = saved or next(iter(reversed(checkpoint.steps(path / CHECKPOINTS))), None)
        if saved is None:
            raise UserError(
                f"init_from={given}: the run has no weights (looked in {BEST}/ and checkpoints/); give another run"
            )
        return cls(path, config, saved, exported=False)

    def load(self, recipe: Recipe, model: nn.Module, datasets: Datasets) -> list[Decision]:
        """Overwrite the weights of a new model, on the host; return what is not taken over.

        Raises:
            UserError: the weights do not fit the model, or are damaged.
        """
        key, note = f"init_from={self.path}", ""
        if not self.config:
            weights, note = read_weights(self.path, model.state_dict(), key)
        elif self.exported:
            weights = recipe.exported(self.path / BEST)
        else:
            weights = evaluated_weights(self.path / CHECKPOINTS, self.step)
        weights, decisions = recipe.adapt_weights(weights, model, datasets, self.about())
        fill(model, weights, key)
        return [*decisions, Decision("init_from", self.path.name, note)] if note else decisions

    def about(self) -> dict[str, Any]:
        """Return the ``config.json`` beside exported weights; of a checkpoint, what the run keeps of its images."""
        return read_config(self.path / BEST / "config.json") if self.exported else run_facts(self.path, "images")

    def facts(self) -> dict[str, Any]:
        """Return what is recorded about it."""
        sent = read_object(self.path / TRACKING_FILE).get("run_id")
        return {"run": self.path.name, "mlflow_run_id": sent, "step": self.step}


def adopt(composed: DictConfig, typed: Collection[str], name: str) -> tuple[InitFrom | None, dict[str, Any]]:
    """Find what ``init_from`` names, and return it with the options that its weights depend on, by dotted key.

    Args:
        composed: by Hydra.
        typed: the keys that are typed, or recorded; they are not among the options.
        name: the name of the run.

    Returns:
        The weights; None: those of the recipe, or of a run that is resumed, whose record has the options.

    Raises:
        UserError: there is no such run, it is of another recipe, or a typed option contradicts it.
    """
    given, resume = composed.init_from, composed.resume
    if given is None or resume not in NO_FOLDER:
        return None, {}
    # The recipe opens it itself: a hub id, a folder of another library, published weights.
    if "pretrained" in composed.recipe and not _names_run(given):
        if is_kept(given):
            best = Path(given).parent / BEST
            remedies = [f"init_from={shlex.quote(str(best))}"] if best.is_dir() else []
            raise UserError(f"init_from={given} holds no weights; its run has them in {BEST}/", *remedies)
        if given == "DEFAULT" and OmegaConf.get_type(composed.recipe).unit != "images":  # type: ignore[union-attr]
            raise UserError("init_from=DEFAULT means published weights of image classifiers; give a hub id or a folder")
        return None, {"recipe.pretrained": given}
    # The run has begun already: what it started from is not needed again.
    if to_continue(composed.output_dir, name, resume):
        return None, {}
    source = InitFrom.open(given, composed.output_dir, composed.tracking.uri)
    # A file of another program, which says nothing about options.
    if not source.config:
        return source, {}
    # A run.
    options = _of_run(source, given, composed, typed)
    return replace(source, taken=options), options


def _of_run(source: InitFrom, given: str, composed: DictConfig, typed: Collection[str]) -> dict[str, Any]:
    """Return those of a run's options that its weights depend on, where the new run has others."""
    cls: Any = OmegaConf.get_type(composed.recipe)
    recipe = source.config["recipe"]
    if recipe != cls.name:
        raise UserError(f"init_from={given} is a run of recipe={recipe}, not of recipe={cls.name}", f"recipe={recipe}")
    taken: dict[str, Any] = {}
    options = [f"recipe.{option}" for option in (*cls.architecture, *cls.adjustable)]
    about = {f"recipe.{option}": value for option, value in source.about().items() if option in cls.adjustable}
    for key, before in ({key: source.config[key] for key in options if key in source.config} | about).items():
        if key == "recipe.pretrained" and before is not None and source.exported:
            before = str(source.path / BEST)  # the same model, wherever the first one is by now
        now = OmegaConf.select(composed, key)
        if before == now:
            continue
        is_typed = any(option == key or option.startswith(f"{key}.") for option in typed)
        # Of options under names, such as recipe.config, some may be repeated.
        if not is_typed or (OmegaConf.is_dict(now) and isinstance(before, dict) and now.items() <= before.items()):
            taken[key] = before
        elif key.removeprefix("recipe.") in cls.architecture and now != "auto":
            raise _contradicted(key, now, given, before)
    if cls.unit != "images" and "recipe.pretrained" not in taken:  # which brings its tokenizer
        taken |= _tokenizer(source, given, composed, typed)
    return taken


def _names_run(given: str) -> bool:
    """Return whether this is a run, even one that is gone; else it is for the recipe: a hub id, a folder, a file."""
    path = Path(given).expanduser()
    if is_in_mlflow(given) or run_of(path) is not None or CHECKPOINTS in (path.name, path.parent.name):
        return True
    return "/" in given and not path.exists() and path.parent.is_dir()


def _tokenizer(source: InitFrom, given: str, composed: DictConfig, typed: Collection[str]) -> dict[str, Any]:
    """Return ``data.tokenizer`` so that the text has the token ids that the weights were trained with."""
    key = "data.tokenizer"
    before, now, own = source.config.get(key), composed.data.get("tokenizer"), source.path / TOKENIZER
    if key not in source.config or "tokenizer" not in composed.data:
        return {}  # of synthetic numbers, the shapes of the weights will tell
    if key in typed and now not in (before, str(own)):
        raise _contradicted(key, now, given, before)
    if before is None and now is not None and key not in typed:
        raise UserError(f"init_from={given} was trained on token ids without a tokenizer; give it ids, by data=tokens")
    size = "data.vocab_size"
    if size in typed and composed.data.vocab_size != source.config.get(size):
        raise no_effect(f"{size}={composed.data.vocab_size}", f"{given} brings its tokenizer")
    if before == "bytes":
        return {} if now == before else {key: before}
    if own.is_dir():
        return {key: str(own)}
    raise UserError(
        f"init_from={given}: the run's folder has no {TOKENIZER}/ (it was fetched from MLflow before it had ended); "
        "copy its best/ to another place, and give that"
    )


def _contradicted(key: str, now: Any, given: str, before: Any) -> UserError:
    mistake = f"{key}={shlex.quote(str(now))}"
    return UserError(f"{mistake}, but the run init_from={given} has {key}={before}", "", mistake=mistake)
