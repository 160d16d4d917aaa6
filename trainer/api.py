"""What a Python program trains with: ``from trainer import compose, train``. Options are those of the command line.

A run sets torch up for the whole process, and leaves it so: how fp32 and 16 bits are multiplied, determinism, and the
global generators.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import compose as overrides
from trainer.config.command_line import as_typed
from trainer.config.schema import Config
from trainer.data.loader import end_if_repeated
from trainer.errors import UserError, no_effect
from trainer.precision.names import key_of
from trainer.recipe import Recipe, UserRecipe
from trainer.run.fit import release_memory
from trainer.run.start import train as start
from trainer.trainer import Trainer


class Trained(dict[str, Any]):
    """A run that has ended: what its summary.json holds, by key, such as ``run["final"]["valid/loss"]``."""

    def __init__(self, summary: Mapping[str, Any], folder: Path, recipe: Recipe, model: Any) -> None:
        super().__init__(summary)
        self.folder = folder.absolute()
        self.recipe = recipe
        self.model = model
        """The trained ``nn.Module``, in evaluation mode, on its device; with the weights of ``best/``, or the last ones
        where no checkpoints are kept. None: the run was complete already."""

    def __repr__(self) -> str:
        final = "".join(f", {name} {value:.5g}" for name, value in self["final"].items() if value is not None)
        trained = "; the trained model is .model" if self.model is not None else ""
        return f"<run {self.folder.name}: {self['status']}, step {self['step']}/{self['steps']}{final}{trained}>"


def compose(*given: Config | Recipe | str, **options: Any) -> Config:
    """Return the config of these options, for ``train``.

    Args:
        given: overrides as on the command line, such as ``"recipe=gpt2"``; at most one recipe as an object. Or a config
            alone, which is returned.
        options: the same as Python values: ``steps=200``, ``optimizer={"lr": 1e-3}``. A string is taken as it is.

    Raises:
        UserError: one of them is a mistake.
    """
    typed = [each for each in given if isinstance(each, str)] + as_overrides(options)
    objects = [each for each in given if not isinstance(each, str)]
    if not objects:
        return overrides.compose(typed)
    if len(objects) == 1 and isinstance(objects[0], Config) and not typed:
        return objects[0]
    if len(objects) > 1 or not isinstance(objects[0], Recipe):
        raise UserError('give options, as "key=value" or keywords, with one recipe at most; or a config alone')
    if doubled := [each for each in typed if overrides.key_of(each).partition(".")[0] == "recipe"]:
        raise no_effect(doubled[0], "the recipe is an object", mistake=shlex.quote(doubled[0]))
    return overrides.compose([f"recipe={UserRecipe.name}", *typed], recipe=objects[0])


def train(*given: Config | Recipe | str, **options: Any) -> Trained:
    """Train, with progress, and return the run with its summary and its model.

    In the main thread Ctrl-C, a notebook's stop button and SIGTERM save a checkpoint after the running step and raise
    ``Interrupted``, a ``KeyboardInterrupt`` with the ``folder`` for ``train(resume=folder)``, or, of ``Recipe.of``, for
    ``train(recipe, resume=folder)``; before the first step ``folder`` may be None. Handlers that the program has set
    itself stay.

    Args:
        given: as of ``compose``.
        options: as of ``compose``.

    Raises:
        UserError: the options, the data or the hardware cannot do this; nothing was written.
        RunError: the run ended early: not finite, out of memory, or a full disk.
        Interrupted: see above.
    """
    end_if_repeated()
    if not torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        around = "autocast" if torch.is_grad_enabled() else "no_grad"
        raise UserError(f"train is called inside of torch.{around}; call it outside, and set precision=")
    config = compose(*given, **options)
    try:
        return _train(config)
    finally:
        release_memory()  # the run, which is gone here, held it


def _train(config: Config) -> Trained:
    recipe = "Recipe.of(…), " if isinstance(config.recipe, UserRecipe) else ""
    ended = start(config, command=lambda folder: f'train({recipe}resume="{folder}")')
    return Trained(ended.summary, ended.folder, config.recipe, ended.run and _model(ended.run.trainer))


def _model(trainer: Trainer) -> nn.Module:
    if (averages := trainer.average.state_of_model()) is not None:
        trainer.model.load_state_dict(averages)
    return trainer.model.eval()


def as_overrides(options: Mapping[str, Any]) -> list[str]:
    """Return options that are Python values as overrides; ``optimizer={"lr": 1e-3}`` is ``optimizer.lr=0.001``."""
    found = []
    for key, value in options.items():
        if isinstance(value, Mapping) and "." not in key:
            found += [f"{key}.{inner}={_text(key, each)}" for inner, each in value.items()]
        else:
            found.append(f"{key}={_text(key, value)}")
    return found


def _text(key: str, value: object) -> str:
    """Return a value as Hydra's grammar reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | PathLike):
        return as_typed(fspath(value))
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key_of(str(inner))}:{_text(key, each)}' for inner, each in value.items())}}}"
    if isinstance(value, Iterable):
        return f"[{','.join(_text(key, each) for each in value)}]"
    raise UserError(
        f"{key}={value!r} is not the value of an option; give a number, a string, a list or a dictionary of them"
    )
