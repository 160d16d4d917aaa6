"""Start a new run, or resume one where it stopped."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from recipes.data.images import augment
from recipes.data.images.augment import AutomaticAugment
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import CheckpointReader
from trainer.config.registration import flatten
from trainer.config.schema import Config, Resolved
from trainer.errors import MemoryRanOut, UserError, is_out_of_memory
from trainer.files import in_use
from trainer.hardware import detect
from trainer.run.folder import RunFolder, earlier_folder
from trainer.run.memory.fit import earlier_plan, fit_plan
from trainer.run.resume import check_same
from trainer.run.run import Run
from trainer.run.signals import Signals
from trainer.run.terminal import Terminal
from trainer.tracking.mlflow.delivery_record import final_status
from trainer.tracking.tracker import finish_delivery


def train(config: Config, overrides: list[str] | None = None, run_class: type[Run] = Run) -> dict[str, Any]:
    """Train what the config describes and return the summary that is also in summary.json.

    Args:
        config: as composed.
        overrides: the command line's overrides, to find what would fit if memory does not suffice.
        run_class: the class that trains; measurements use another one.

    Raises:
        UserError: the config, the data or the hardware cannot do this; nothing was written.
        OutOfMemory: not even microbatches of one sample are forecast to fit; nothing was written.
        NonFiniteError: training turned non-finite.
        Interrupted: a signal stopped the run after saving a checkpoint.
    """
    with Signals(config.checkpoint.save_on_signal) as signals, ExitStack() as stack:
        world = config.parallel.world(config.device)
        terminal = Terminal(shown=world.first)
        hardware = detect(config.device)
        try:
            resolved = config.resolve(hardware, world)
        except UserError as error:
            error.shared = True
            raise
        plan = resolved.plan
        named = partial(earlier_folder, config.resume, config.output_dir, plan.run_name, config.tracking.uri)
        folder = world.on_first(named)
        saved = None
        if folder is not None:
            if config.micro_batch_size == "auto":
                resolved = earlier_plan(folder.path, resolved)
            resolved = resolved._replace(config=_as_before(world.on_first(folder.config), resolved.config))
            saved = CheckpointReader(world.on_first(partial(_taken_up, folder, resolved.config, stack)))
            status = partial(final_status, folder.path)
            # A run that was killed at its end has taken all steps, but its export and its summary may be missing.
            if saved.step > plan.steps or (saved.step == plan.steps and world.on_first(status) == "FINISHED"):
                terminal.note(
                    f"{folder.path} is already complete ({saved.step} steps); set steps={2 * saved.step} to continue"
                )
                world.on_first(partial(finish_delivery, folder.path, config.tracking))
                return world.on_first(folder.summary)
        terminal.note("opening the data …")
        datasets = world.first_then_others(resolved.config.open_datasets)
        if folder is None:
            resolved = fit_plan(config, resolved, hardware, world, datasets, overrides or [])
        terminal.note("building the model …")
        try:
            trainer = run_class.trainer_class(resolved.config, resolved.plan, hardware, world, datasets)
            stack.callback(trainer.close)
            if folder is None:
                folder = world.on_first(partial(_begun, resolved, stack))
            return run_class(trainer, folder, saved, terminal, signals, resolved.choices + trainer.choices).train()
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryRanOut(error, resolved.plan.batching.micro_batch_size) from error
            raise


def _begun(resolved: Resolved, stack: ExitStack) -> RunFolder:
    folder = RunFolder.create(resolved.config.output_dir, resolved.plan.run_name)
    stack.enter_context(in_use(folder.path))
    return folder


def _as_before(before: dict[str, Any], config: Config) -> Config:
    """Return the config with what ``auto`` became when the run was started, where data or a measurement decides it."""
    recipe = config.recipe
    if before.get("recipe") != recipe.name:
        return config  # another run, which check_same will report
    left = [name for name in recipe.measured if getattr(recipe, name) == "auto" and f"recipe.{name}" in before]
    config = replace(config, recipe=replace(recipe, **{name: before[f"recipe.{name}"] for name in left}))
    if config.augment.kind != AutomaticAugment.kind or before.get("data") != config.data.kind:
        return config
    return config.with_augment(augment.from_record(augment.recorded(before, recipe.unit == "images")))


def _taken_up(folder: RunFolder, config: Config, stack: ExitStack) -> Path:
    stack.enter_context(in_use(folder.path))
    check_same(folder, flatten(config), config.recipe.unit == "images")
    path = checkpoint.find_verified(folder.checkpoints)
    step, steps = checkpoint.step_of(path), folder.config().get("steps")
    if not isinstance(steps, int) or step is None or step > steps:
        raise UserError(f"the checkpoint {path} is of step {step}, and {folder.path}/config.json has steps={steps}")
    return path
