"""The end of a run: the best weights, loaded, exported for use without this project, and shown at work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import load
from trainer.files import BEST, PRECISION_FILE, remove_folder, write_json
from trainer.parallel.shards import is_sharded
from trainer.run_folder import RunFolder
from trainer.terminal import Terminal
from trainer.trainer import Trainer


def load_best(trainer: Trainer, folder: RunFolder, best: dict[str, Any] | None, terminal: Terminal) -> int | None:
    """Load the best weights that were saved into the model; every rank calls it.

    Args:
        trainer: whose model takes them.
        folder: of the run.
        best: ``step`` and ``value`` of the best validation score; None: there is none.
        terminal: shows the progress.

    Returns:
        The step of the weights that the model has now, and that are to be exported; None: none are.
    """
    if best is None:
        return None
    step = checkpoint.best_step(folder.checkpoints)
    if step is None:  # no checkpoint fitted on the disk; the weights alone may
        return trainer.step if trainer.config.checkpoint.enabled else None
    if step != trainer.step:
        with terminal.work("loading the best weights"):
            load(folder.checkpoints, step).restore(trainer.model, None, None, trainer.average)
        trainer.enter(trainer.config.precision.at(step))  # in which they were evaluated
    return step


def whole_model(trainer: Trainer) -> nn.Module | None:
    """Return the model with the weights that are evaluated, unsharded, on rank 0; every rank calls it."""
    averages = trainer.average.state_of_model()  # fp32 of 16-bit weights, so the model is built as the recipe builds it
    converted = averages is None or trainer.precision.format.wide is not None
    build = trainer.build_model if converted else partial(trainer.recipe.build_model, trainer.datasets)
    model = unsharded(trainer.model, build, averages)
    return model if trainer.world.is_main else None


def export_best(
    trainer: Trainer, model: nn.Module, step: int, best: dict[str, Any], folder: RunFolder, terminal: Terminal
) -> list[str]:
    """Write a model to ``best/``; return what could not be written, in words for the user.

    Args:
        trainer: of the run.
        model: see ``whole_model``.
        step: of its weights.
        best: ``step`` and ``value`` of the best validation score.
        folder: of the run.
        terminal: shows the progress.
    """
    missing = []
    if trainer.config.checkpoint.enabled and step != best["step"]:
        missing.append(f"the best weights, of step {best['step']}, were not saved (those of step {step} are exported)")
    unfinished = folder.path / f".{BEST}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        remove_folder(folder.path / BEST)  # a kill may follow
        with terminal.work("exporting the best weights"):
            trainer.recipe.export(model, trainer.datasets, unfinished)
            precision = trainer.config.precision
            if precision.then is not None:  # which of the two the weights are evaluated in
                facts = {"precision": precision.mode, "then": precision.then, "until": precision.until, "step": step}
                write_json(unfinished / PRECISION_FILE, facts)
        unfinished.rename(folder.path / BEST)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        missing.append(f"the best weights could not be exported to {folder.path / BEST} ({error})")
    return missing


def unsharded(model: nn.Module, build: Callable[[], nn.Module], state: dict[str, Tensor] | None) -> nn.Module | None:
    """Return the model with unsharded weights; None on other ranks than 0 if it must be built.

    Args:
        model: in training; every rank has to call this.
        build: makes another model with the same names, on the host.
        state: the state dict of a model that is to be built; None: the weights of ``model``.
    """
    if state is None and not any(map(is_sharded, model.parameters())):
        return model
    other = build() if not dist.is_initialized() or dist.get_rank() == 0 else None
    target = {} if other is None else other.state_dict()
    # One after another: the whole need not fit on a device.
    source: dict[str, Any] = state or model.state_dict()
    for name, tensor in source.items():
        gathered = tensor.full_tensor() if is_sharded(tensor) else tensor  # every rank takes part
        if target:
            target[name].copy_(gathered)
    return other
