"""What a Python program trains with: ``from trainer import compose, train``. Options are those of the command line.

While a function of it runs, the process is set up as a run needs it; afterwards the program's own settings are back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import compose as overrides
from trainer.config.schema import Config
from trainer.determinism import random_state, set_random_state
from trainer.errors import Interrupted, UserError, is_out_of_memory
from trainer.precision import attention, kernels
from trainer.recipe import Own, Recipe
from trainer.run.command import release_memory
from trainer.run.memory.fit import out_of_memory
from trainer.run.run import Run
from trainer.run.start import train as start


class Trained(dict[str, Any]):
    """A run that has ended: what its summary.json holds, by key, such as ``run["final"]["valid/loss"]``."""

    def __init__(self, summary: Mapping[str, Any], folder: Path, recipe: Recipe, model: nn.Module | None) -> None:
        super().__init__(summary)
        self.folder = folder.absolute()
        """Where everything about it is; the other functions, and ``train(resume=run.folder)``, take it, too."""
        self.recipe = recipe
        self._model = model

    @property
    def model(self) -> nn.Module:
        """The trained model on its device, in evaluation mode: with the best weights where checkpoints are kept, as in
        ``best/``, else with the last ones; averaged where averages are evaluated. (Under FSDP it stays sharded.)

        Raises:
            UserError: the run was complete already, so nothing was trained.
        """
        if self._model is None:
            raise UserError(f"{self.folder} was complete already, so no model was trained; open its best/")
        return self._model

    def __repr__(self) -> str:
        final = "".join(f", {name} {value:.5g}" for name, value in self["final"].items() if value is not None)
        return f"<run {self.folder.name}: {self['status']}, step {self['step']}/{self['steps']}{final}>"


def compose(*given: Recipe | str, **options: Any) -> Config:
    """Return the config of these options, for ``train``.

    Args:
        given: overrides as on the command line, such as ``"recipe=gpt2"`` or ``"optimizer.lr=1e-3"``; or a recipe.
        options: the same as Python values: ``steps=200``, ``optimizer={"lr": 1e-3}``. A string is taken as it is.

    Raises:
        UserError: one of them is a mistake.
    """
    recipes = [each for each in given if isinstance(each, Recipe)]
    typed = [each for each in given if not isinstance(each, Recipe)] + as_overrides(options)
    if wrong := [each for each in typed if not isinstance(each, str)]:
        raise UserError(f'{wrong[0]!r} is not an override; write "key=value", or key=value as a keyword')
    if not recipes:
        return overrides.compose(typed)
    if doubled := [each for each in typed if overrides.key_of(each).partition(".")[0] == "recipe"]:
        raise UserError(f"{doubled[0]} has no effect on a recipe that is given as an object; leave it out")
    return replace(overrides.compose([f"recipe={Own.name}", *typed]), recipe=recipes[0])


def train(*given: Config | Recipe | str, **options: Any) -> Trained:
    """Train, with progress, and return the run with its summary and its model.

    In the main thread Ctrl-C, a notebook's "interrupt" and SIGTERM save a checkpoint after the running step and raise
    ``Interrupted``, a ``KeyboardInterrupt`` whose ``folder`` continues with ``train(resume=folder)``; handlers that the
    program has set itself stay. ``train(Recipe.of(…), resume=folder)`` takes the same model and data again.

    Args:
        given: as of ``compose``; or a config that it returned, alone.
        options: as of ``compose``.

    Raises:
        UserError: the options, the data or the hardware cannot do this; nothing was written.
        RunError: the run ended early: not finite, out of memory, or a full disk.
        Interrupted: see above.
    """
    ready = [each for each in given if isinstance(each, Config)]
    if ready and (len(given) > 1 or options):
        raise UserError("a config is complete; give further options to compose")
    runs: list[Run] = []

    def begun(run: Run) -> None:
        runs.append(run)
        own = "Recipe.of(…), " if isinstance(run.config.recipe, Own) else ""
        run.command = f'train({own}resume="{run.folder.path}")'

    with undisturbed():
        config = ready[0] if ready else compose(*given, **options)  # type: ignore[arg-type]
        typed = [each for each in given if isinstance(each, str)] + as_overrides(options)
        if len(typed) < len(given) + len(options):  # from which nothing smaller can be composed
            typed = [f"recipe={Own.name}"]
        try:
            return _trained(start(config, typed, started=begun), config, runs)
        except Interrupted as stopped:
            stopped.folder = runs[0].folder.path if runs else None
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = error.with_traceback(None)  # which holds the run
            shortage.__context__ = shortage.__cause__ = None
        finally:
            runs.clear()
            release_memory()
        raise out_of_memory(shortage, typed)


def _trained(summary: dict[str, Any], config: Config, runs: list[Run]) -> Trained:
    if not runs:
        return Trained(summary, Path(config.output_dir).expanduser() / summary["run"], config.recipe, None)
    run, trainer = runs[0], runs[0].trainer
    if (averages := trainer.average.state_of_model()) is not None:
        trainer.model.load_state_dict(averages)
    return Trained(summary, run.folder.path, trainer.recipe, trainer.model.eval())


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
        text = fspath(value)
        plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in ("null", "true", "false", "inf", "nan")
        return text if plain else overrides.quoted(text)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{inner}:{_text(key, each)}' for inner, each in value.items())}}}"
    if isinstance(value, Iterable):
        return f"[{','.join(_text(key, each) for each in value)}]"
    raise UserError(f"{key}={value!r} is no option; give a number, a string, a list or a dictionary of them")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put back what a run sets for the whole process: torch's settings, the generators, logging."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    in_fp32 = (backends, cuda.matmul, cudnn, cudnn.conv, cudnn.rnn, mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    attributes = [(each, "fp32_precision") for each in in_fp32]
    # The older flags come back before the newer ones, which they change.
    attributes += [
        (cudnn, "allow_tf32"),
        (cudnn, "benchmark"),
        (torch.utils.deterministic, "fill_uninitialized_memory"),
    ]
    on_gpu = torch.cuda.is_initialized()
    device = torch.device("cuda" if on_gpu else "mps" if backends.mps.is_available() else "cpu")
    with ExitStack() as stack:
        restore = stack.callback
        for owner, name in attributes:
            restore(setattr, owner, name, getattr(owner, name))
        with suppress(RuntimeError):  # the program has used the newer ones alone
            restore(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        restore(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
        restore(attention.allow_cudnn, cuda.cudnn_sdp_enabled())
        restore(kernels.clear)
        restore(set_random_state, random_state(device), device)
        if on_gpu:
            restore(torch.cuda.set_device, torch.cuda.current_device())
        elif torch.cuda.is_available():  # a seed that was set before CUDA was first used
            restore(torch.cuda.manual_seed_all, torch.initial_seed())
        for logger in map(logging.getLogger, ("mantissa", "mlflow", "alembic", "urllib3.connectionpool")):
            restore(logger.setLevel, logger.level)
            restore(setattr, logger, "propagate", logger.propagate)
            restore(setattr, logger, "handlers", logger.handlers[:])
        yield
