"""The end of a run: the best weights, exported for use without this project."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import load
from trainer.data.evaluation import Watch
from trainer.files import BEST, remove_folder
from trainer.parallel.shards import is_sharded
from trainer.run_folder import RunFolder
from trainer.terminal import Terminal
from trainer.trainer import Trainer


def export_best(
    trainer: Trainer,
    folder: RunFolder,
    best: dict[str, Any] | None,
    terminal: Terminal,
    watched: Callable[[], AbstractContextManager[Watch]],
) -> tuple[str | None, list[str], dict[str, float]]:
    """Load the best weights into the model, evaluate the test data with them, and export them to ``best/``.

    Every rank calls it; only rank 0 writes.

    Args:
        trainer: whose model takes the best weights.
        folder: of the run.
        best: ``step`` and ``value`` of the best validation score; None: there is none.
        terminal: for warnings.
        watched: is entered while the test data is evaluated, and may stop it.

    Returns:
        The closing text of the recipe, such as a sample of text; what could not be written; the metrics of the test
        data, empty without any.
    """
    config, missing = trainer.config, []
    step = checkpoint.best_step(folder.checkpoints) if best is not None else None
    if step not in (None, trainer.step):  # else the model has them
        with terminal.work("loading the best weights"):
            load(folder.checkpoints, step).restore(trainer.model, None, None, trainer.average)
    test = {}
    if trainer.datasets.test is not None:
        with watched() as watch:
            test = trainer.test(watch)
    averages = trainer.average.state_of_model()  # fp32, so that the model is built as the recipe builds it
    build = trainer.build_model if averages is None else partial(config.recipe.build_model, trainer.datasets)
    model = unsharded(trainer.model, build, averages)
    if not trainer.world.is_main or model is None:
        return None, [], test
    if best is not None and config.checkpoint.enabled:
        step = trainer.step if step is None else step  # no checkpoint fitted on the disk; the weights alone may
        if step != best["step"]:
            missing.append(
                f"the best weights, of step {best['step']}, were not saved (those of step {step} are exported)"
            )
    unfinished = folder.path / f".{BEST}.partial"
    if step is not None:
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            remove_folder(folder.path / BEST)  # a kill may follow
            with terminal.work("exporting the best weights"):
                trainer.recipe.export(model, trainer.datasets, unfinished)
            unfinished.rename(folder.path / BEST)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            missing.append(f"the best weights could not be exported to {folder.path / BEST} ({error})")
    model.eval()
    text = None
    with torch.no_grad(), config.precision.autocast(trainer.device):
        try:
            if config.tracking.epilogue:
                with terminal.work("writing a sample"):
                    text = config.recipe.closing_text(model.to(trainer.device), trainer.datasets, trainer.device)
        except torch.OutOfMemoryError:  # trained in shards, the complete model may not fit on one device
            terminal.warn("the complete model does not fit on the device; no sample is generated")
    return text, missing, test


def unsharded(
    model: nn.Module, build: Callable[[], nn.Module], state: dict[str, Tensor] | None = None
) -> nn.Module | None:
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
