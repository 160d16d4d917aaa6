"""Where a run begins: a new one, or one that is taken up where it stopped."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from recipes.data.images import augment
from recipes.data.images.augment import Augment, AutomaticAugment
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.restore import Saved
from trainer.config.schema import Config, flatten
from trainer.errors import UserError
from trainer.files import in_use
from trainer.hardware import detect
from trainer.run.fit import earlier_plan, fit_plan
from trainer.run.folder import RunFolder, earlier_folder
from trainer.run.run import Run
from trainer.run.signals import Signals
from trainer.run.terminal import Terminal
from trainer.tracking.mlflow.record import final_status
from trainer.tracking.tracker import finish_delivery
from trainer.trainer import Trainer


def train(config: Config, overrides: list[str] | None = None, run_class: type[Run] = Run) -> dict[str, Any]:
    """Train what the config describes and return the summary that is also in summary.json.

    Args:
        config: as composed; its ``auto`` fields are resolved in place.
        overrides: the command line's overrides, for what would fit where memory does not suffice.
        run_class: what trains; another one for those who measure.

    Raises:
        UserError: the config, the data or the hardware cannot do this; nothing was written.
        OutOfMemory: not even microbatches of one sample are forecast to fit; nothing was written.
        NonFiniteError: training turned non-finite.
        Interrupted: a signal stopped the run after saving a checkpoint.

    """
    with Signals(config.checkpoint.save_on_signal) as signals, ExitStack() as stack:
        asked = copy.deepcopy(config)
        world = config.parallel.world(config.device)
        terminal = Terminal(shown=world.first)
        hardware = detect(config.device)
        try:
            plan, choices = config.resolve(hardware, world)
        except UserError as error:
            error.shared = True
            raise
        assert config.run_name is not None
        named = partial(earlier_folder, config.resume, config.output_dir, config.run_name, config.tracking.uri)
        folder = world.on_first(named)
        saved = None
        if folder is not None:
            if config.augment.kind == AutomaticAugment.kind:
                config.set_augment(world.on_first(partial(_earlier_augment, folder, config)))
            for name, value in world.on_first(partial(_measured_earlier, folder, config)).items():
                setattr(config.recipe, name, value)
            if asked.micro_batch_size == "auto":
                plan, choices = earlier_plan(folder, config, plan, choices)
            saved = Saved(world.on_first(partial(_taken_up, folder, config, stack)))
            # One that was killed while it was closed has taken its steps, but has yet to export and sum up.
            if saved.step > plan.steps or (saved.step == plan.steps and world.on_first(partial(_is_finished, folder))):
                terminal.note(
                    f"{folder.path} is already complete ({saved.step} steps); set steps={2 * saved.step} to continue"
                )
                world.on_first(partial(finish_delivery, folder.path, config.tracking))
                return world.on_first(folder.summary)
        terminal.note("opening the data …")
        datasets = world.first_then_others(lambda: config.recipe.datasets(config.data, config.seed))
        if folder is None:
            plan, choices = fit_plan(asked, config, plan, choices, hardware, world, datasets, overrides or [])
        terminal.note("building the model …")
        trainer = Trainer(config, plan, hardware, world, datasets)
        stack.callback(trainer.close)
        if folder is None:
            folder = world.on_first(partial(_begun, config, stack))
        return run_class(trainer, folder, saved, terminal, signals, choices + trainer.choices).train()


def _is_finished(folder: RunFolder) -> bool:
    return final_status(folder.path) == "FINISHED"


def _begun(config: Config, stack: ExitStack) -> RunFolder:
    folder = RunFolder.create(config.output_dir, str(config.run_name))
    stack.enter_context(in_use(folder.path))
    return folder


def _earlier_augment(folder: RunFolder, config: Config) -> Augment:
    """Return what ``augment=auto`` means when this run is resumed: what it meant before."""
    before = folder.config()
    if (before.get("recipe"), before.get("data")) != (config.recipe.name, config.data.kind):
        return config.augment  # another run, as check_same will say
    return augment.from_record(augment.recorded(before, config.recipe.unit == "images"))


def _measured_earlier(folder: RunFolder, config: Config) -> dict[str, Any]:
    """Return what the recipe's ``auto`` fields became when the run was begun, where a measurement decides them."""
    before = folder.config()
    if before.get("recipe") != config.recipe.name:
        return {}  # another run, as check_same will say
    left = [name for name in config.recipe.measured if getattr(config.recipe, name) == "auto"]
    return {name: before[f"recipe.{name}"] for name in left if f"recipe.{name}" in before}


def _taken_up(folder: RunFolder, config: Config, stack: ExitStack) -> Path:
    stack.enter_context(in_use(folder.path))
    folder.check_same(flatten(config), config.recipe.unit == "images")
    path = checkpoint.find(folder.checkpoints)
    step, steps = int(path.name.removeprefix(".")[5:13]), folder.config().get("steps")
    if not isinstance(steps, int) or step > steps:
        raise UserError(f"the checkpoint {path} is of step {step}, and {folder.path}/config.json has steps={steps}")
    return path
