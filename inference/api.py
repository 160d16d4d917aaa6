"""What a Python program uses a trained model with: ``from trainer import evaluate, generate``.

Each shows what its command shows, and returns it. Each leaves torch set up as it needed it, as ``train`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from os import PathLike, fspath
from typing import Any, TypeVar

from inference.evaluate import evaluation
from inference.generate import generation
from inference.load import Exported
from inference.options import EvaluateOptions, GenerateOptions, RunOptions
from trainer.api import Trained, as_overrides
from trainer.config.options import parse
from trainer.recipe import UserRecipe
from trainer.terminal import Terminal

Options = TypeVar("Options", bound=RunOptions)
Weights = Trained | str | PathLike[str]
"""What ``train`` returned; or a run folder, its ``best/``, another exported folder, ``mlflow:RUN_ID``."""


def evaluate(run: Weights, *overrides: str, precision: str | Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Evaluate a trained model in its precision, or in several on the same samples; print and return the result.

    Args:
        run: the model; one of ``Recipe.of`` is given as what ``train`` returned.
        overrides: as on the command line of scripts/evaluate.py, such as ``"eval_samples=640"``.
        precision: such as ``"bf16"``; of several, the first is what the others are compared with.
        options: as Python values: ``split="test"``, ``output=folder``, and overrides.

    Returns:
        The content of evaluation.json: ``metrics`` by name, and more; of several precisions that of precisions.json,
        which has these below ``precisions`` by name, with ``verdict``.

    Raises:
        UserError: the model, the data or the options cannot work.
    """
    modes = [precision] if isinstance(precision, str) else list(precision)
    typed = [*overrides, f"precision={','.join(modes)}"] if modes else overrides
    with Terminal().in_use():
        return evaluation(*_opened(EvaluateOptions, run, typed, options))


def generate(run: Weights, prompt: str, *overrides: str, **options: Any) -> list[str]:
    """Print texts of a trained language model, word by word, and return them.

    Args:
        run: the model: one that continues a text, or a t5.
        prompt: how the text begins; for t5, a text with gaps.
        overrides: such as ``"precision=fp32"``.
        options: those of scripts/generate.py: ``n=2``, ``temperature=0.8``, ``top_k=50``, ``top_p=0.9``, ``seed=1``,
            ``max_new_tokens=100``; and overrides.

    Raises:
        UserError: the model, the prompt or the options cannot work.
    """
    with Terminal().in_use():
        return generation(*_opened(GenerateOptions, run, overrides, options | {"prompt": prompt}))


def _opened(
    kind: type[Options], run: Weights, overrides: Sequence[str], given: dict[str, Any]
) -> tuple[Exported, Options, list[str]]:
    """Return the model, the command's own options, and the overrides of the config."""
    names = {entry.name for entry in fields(kind)}
    # As they are: quotes of a prompt are no quotes of a command line.
    texts = {key: fspath(value) for key, value in given.items() if key in names and isinstance(value, str | PathLike)}
    typed = [*overrides, *as_overrides({key: value for key, value in given.items() if key not in texts})]
    place = str(run.folder) if isinstance(run, Trained) else fspath(run)
    own, rest = parse(typed, kind, "overrides", **texts | {"run": place})
    recipe = run.recipe if isinstance(run, Trained) else None
    return replace(own.find(), own=recipe if isinstance(recipe, UserRecipe) else None), own, rest
