"""Start a new run, or resume one where it stopped."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from mantissa.display import counted, size
from trainer.checkpoint import store
from trainer.checkpoint.reader import CheckpointReader
from trainer.config.registration import flatten
from trainer.config.resume import as_before, check_same, earlier_folder, state_of
from trainer.config.schema import Config
from trainer.config.step import Plan
from trainer.data.contract import Datasets
from trainer.errors import NonFiniteError, OutOfMemory, UserError, first_line, is_out_of_memory
from trainer.files import SAME, TOKENIZER, add_run_facts, in_use
from trainer.hardware import detect, threads
from trainer.parallel.world import tasks_alone
from trainer.precision import kernels
from trainer.run.fit import REMEDY, fit_plan, keep_memory, ran_out, release_memory, save_memory
from trainer.run.run import Run
from trainer.run.scores import Scores
from trainer.run.signals import Signals, take_start_time
from trainer.run_folder import RunFolder, to_continue
from trainer.terminal import Terminal
from trainer.tracking.sync import finish_delivery

log = logging.getLogger("mantissa")


def train(
    config: Config,
    run_class: type[Run] = Run,
    started: Callable[[Run | None], None] = lambda run: None,
    brief: bool = False,
) -> dict[str, Any]:
    """Train what the config describes and return the summary that is also in summary.json.

    Args:
        config: as composed.
        run_class: the class that trains; measurements use another one.
        started: called with the run before its first step; with None where it had no memory, and is given up.
        brief: show one line, at the end; as ``Terminal``.

    Raises:
        UserError: the config, the data or the hardware cannot do this; nothing was written.
        OutOfMemory: it does not fit; a microbatch of ``auto`` is halved before the first step of a new run.
        NonFiniteError: training turned non-finite.
        Interrupted: a signal stopped the run after saving a checkpoint.
    """
    auto = config.micro_batch_size == "auto"
    while True:
        try:
            return _train(config, run_class, started, brief)
        except OutOfMemory as error:
            ended, smaller = OutOfMemory(str(error), shared=error.shared), error.smaller
        except Exception as error:  # while the data was opened, for example
            if not is_out_of_memory(error):
                raise
            ended, smaller = OutOfMemory(f"out of memory ({first_line(error)}); {REMEDY}"), 0
        release_memory()  # the error, which is gone here, held the run
        if not (auto and smaller):
            raise ended
        log.warning("out of memory; starting again with micro_batch_size=%d", smaller)
        config = replace(config, micro_batch_size=smaller)


def _train(config: Config, run_class: type[Run], started: Callable[[Run | None], None], brief: bool) -> dict[str, Any]:
    began = take_start_time()
    with Signals(config.checkpoint.save_on_signal) as signals, ExitStack() as stack, threads(config.threads):
        kernels.clear()  # those of an earlier run in this process
        world = config.parallel.world(config.device)
        terminal = Terminal(shown=world.is_main, quiet=config.quiet, brief=brief)
        terminal.show_logs()
        signals.tell = terminal.note
        stack.enter_context(terminal.in_use())
        if alone := tasks_alone():
            terminal.warn(f"{alone}, and each trains a run of its own; to train one together, let it start torchrun")
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # by accelerate launch
        if asked != "no" and not config.precision.mode.startswith(asked):
            terminal.warn(f"ACCELERATE_MIXED_PRECISION={asked} has no effect; set precision={asked}")
        hardware = detect(config.device)
        try:
            plan = config.plan(hardware, world)
        except UserError as error:
            raise UserError(str(error), shared=True) from error
        folder = world.run_on_main(partial(earlier_folder, config, plan))
        saved = None
        if folder is not None:
            world.run_on_main(partial(stack.enter_context, in_use(folder.path)))
            plan = as_before(folder, config, plan)
            checkpoint, complete = world.run_on_main(partial(_left, folder, config, plan))
            if checkpoint is None:
                terminal.outcome(f"{folder.path} is already complete{complete}")
                world.run_on_main(partial(finish_delivery, folder.path, config.tracking))
                return world.run_on_main(folder.summary)
            saved = CheckpointReader(checkpoint)
        opened = None if saved else plan.opened  # a run may have recorded how its data is to be opened
        with terminal.work("opening the data"):
            datasets = opened or world.main_first(plan.config.open_datasets)
        if folder is None:
            fit = save_memory if hardware.is_gpu else fit_plan  # on a CPU, the system kills what takes too much
            plan = fit(config, plan, hardware, world, datasets)
        if not gc.get_freeze_count():  # else every look for garbage walks half a million objects, for half a second
            if gc.isenabled():  # else the program has only imported modules so far
                gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
        gc.enable()
        keep_memory(plan, hardware, world, datasets)
        run = None
        try:
            with terminal.work("building the model"):
                trainer = run_class.trainer_class(plan, hardware, world, datasets)
            stack.callback(trainer.close)
            scores = Scores(trainer.config, trainer.metrics.lower_is_better)
            scores.check_known(trainer.metric_names, always=bool(trainer.metrics))
            if saved is None:
                trainer.check_sum()
            with _written(config.output_dir):
                if folder is None:
                    world.run_on_main(partial(_check_disk, config, trainer.model))
                    folder = world.run_on_main(partial(_begun, plan.config, datasets, stack, terminal))
                decisions = [*plan.decisions, *trainer.decisions]
                run = run_class(trainer, folder, terminal, signals, began)
                if saved is not None:
                    run.restore(saved)
                run.begin(decisions)
            started(run)
            return run.train()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            started(None)
            # In several processes the others wait for the one that has no memory.
            retry = saved is None and world.size == 1 and not (run and run.has_stepped)
            raise ran_out(error, config, plan.batching, retry) from error


def _check_disk(config: Config, model: nn.Module) -> None:
    """Raise UserError where there is no room for a checkpoint and the export; the writer reports what comes later."""
    folder = Path(config.output_dir).expanduser().absolute()
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    needed = 2 * sum(weight.numel() * weight.element_size() for weight in model.parameters()) + store.SPARE_BYTES
    if config.checkpoint.enabled and disk.total and disk.free < needed:  # some file systems do not tell
        raise UserError(
            f"output_dir={config.output_dir}: the disk has {size(disk.free)} free, and a checkpoint and best/ take "
            f"over {size(needed)}; free disk space, choose another with output_dir=…, or set checkpoint=none"
        )


@contextmanager
def _written(output_dir: str) -> Iterator[None]:
    """Make one sentence of what the disk refuses while a run's folder is made, or written again."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"output_dir={output_dir} cannot be written ({why}); free disk space, or choose another with output_dir=…"
        ) from error


def _left(folder: RunFolder, config: Config, plan: Plan[Config]) -> tuple[Path | None, str]:
    """Return the checkpoint that a run continues from; None where it is complete, and how it can be continued.

    A run that was killed at its end has taken all steps, but its export and its summary may be missing.

    Raises:
        UserError: it would be another run, or it has no intact checkpoint.
        NonFiniteError: it turned non-finite, as the same run would again.
    """
    state = state_of(folder)
    if config.resume == SAME and state != "interrupted":
        if state == "complete":
            return None, ""
        step = folder.summary()["failure"]["step"]
        raise NonFiniteError(f"{folder.path} turned non-finite at step {step}; remove the folder to repeat the run")
    check_same(folder, flatten(plan.config))
    path = store.find_verified(folder.checkpoints)
    saved, steps, finished = CheckpointReader(path), plan.steps, state == "complete"
    if saved.step > steps or (saved.step == steps and finished):
        if not finished:
            raise UserError(f"steps={steps}, but {folder.path} was stopped after step {saved.step}; leave steps out")
        fewer = f"steps={steps} is below that; " if saved.step > steps else ""
        return None, f" ({counted(saved.step, 'step')}); {fewer}set steps={2 * saved.step} to continue"
    scores = Scores(plan.config)
    scores.load_state_dict(saved.scores)
    if finished and scores.exhausted:
        more = "set a larger early_stopping.patience, or null, to continue"
        return None, f" (stopped early at step {saved.step}); {more}"
    store.set_aside(folder.checkpoints, saved.step)
    return path, ""


def _begun(config: Config, datasets: Datasets, stack: ExitStack, terminal: Terminal) -> RunFolder:
    folder = RunFolder.create(config.output_dir, config.name)
    if folder.path.name != config.name:
        auto = to_continue(config.output_dir, config.name, "auto")
        why = "resume=auto would have continued it" if auto else f"{config.name} has no checkpoint"
        terminal.note(f"{config.name} exists; this run is {folder.path.name} ({why})")
    stack.enter_context(in_use(folder.path))
    datasets.keep(folder.path)
    described = Path(str(getattr(config.recipe, "pretrained", None))).expanduser() / "config.json"
    if (kept := folder.path / TOKENIZER).is_dir() and described.is_file():  # then it is not needed on resume
        shutil.copyfile(described, kept / described.name)
    if config.source is not None:
        add_run_facts(folder.path, init_from=config.source.facts())
    return folder
