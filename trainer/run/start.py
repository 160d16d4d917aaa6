"""Start a new run, or resume one where it stopped.

``_train`` reads from top to bottom: prepare the process, plan, settle, build the model, begin, train.
"""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import nn

from mantissa.display import counted, size
from trainer.checkpoint import store
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.schema import STATE_FILE, read_manifest
from trainer.config.commands import resume_command
from trainer.config.registration import flatten
from trainer.config.resume import check_record, check_same, planned, state_of
from trainer.config.schema import Config
from trainer.config.settle import MICRO, Plan, Settled, plan_of, settle
from trainer.config.typed import anew
from trainer.errors import (
    Interrupted,
    NonFiniteError,
    OutOfMemory,
    UserError,
    first_line,
    is_out_of_memory,
)
from trainer.files import BEST, SAME, TOKENIZER, add_run_facts, in_use, read_json
from trainer.hardware import detect, threads
from trainer.parallel.world import tasks_alone
from trainer.precision import kernels
from trainer.recipe import Decision
from trainer.run.fit import REMEDY, fit, keep_memory, ran_out, release_memory
from trainer.run.run import Run
from trainer.run.scores import Scores
from trainer.run.signals import Signals, take_start_time
from trainer.run_folder import RunFolder, to_continue
from trainer.terminal import Terminal
from trainer.tracking.sync import finish_delivery

log = logging.getLogger("mantissa")


class Ended(NamedTuple):
    """A run that has ended."""

    summary: dict[str, Any]
    """What is also in its summary.json."""
    folder: Path
    """Where it is; it may have been renamed since the summary was written."""
    run: Run | None
    """None: it was complete already."""


def train(
    config: Config,
    run_class: type[Run] = Run,
    brief: bool = False,
    command: Callable[[Path], str] = resume_command,
) -> Ended:
    """Train what the config describes to its end.

    Args:
        config: as composed.
        run_class: the class that trains; measurements use another one.
        brief: show one line, at the end; as ``Terminal``.
        command: takes the run's folder, and returns what a user types to continue it.

    Raises:
        UserError: the config, the data or the hardware cannot do this; nothing was written.
        OutOfMemory: it does not fit; a microbatch of ``auto`` is halved before the first step of a new run.
        NonFiniteError: training turned non-finite.
        Interrupted: a signal stopped the run after saving a checkpoint.
    """
    fitted: Decision | None = None
    while True:
        try:
            return _train(config, fitted, run_class, brief, command)
        except OutOfMemory as error:
            ended, smaller = OutOfMemory(str(error), shared=error.shared), error.smaller
        except Exception as error:  # while the data was opened, for example
            if not is_out_of_memory(error):
                raise
            ended, smaller = OutOfMemory(f"out of memory ({first_line(error)}); {REMEDY}"), 0
        release_memory()  # the error, which is gone here, held the run
        if not (smaller and config.micro_batch_size == "auto"):
            raise ended
        log.warning("out of memory; starting again with micro_batch_size=%d", smaller)
        fitted = Decision(MICRO, smaller, "")


def _train(
    config: Config, fitted: Decision | None, run_class: type[Run], brief: bool, command: Callable[[Path], str]
) -> Ended:
    """Make one attempt, with the microbatch that was ``fitted`` in an earlier one."""
    began = take_start_time()
    run: Run | None = None  # until it has begun
    with Signals(config.checkpoint.save_on_signal) as signals, ExitStack() as stack, threads(config.threads):
        # 1. Prepare the process: its kernels, the other ranks, the terminal.
        kernels.clear()  # those of an earlier run in this process
        world = config.parallel.world(config.device)
        terminal = Terminal(shown=world.is_main, quiet=config.quiet, brief=brief)
        terminal.show_logs()
        signals.tell = terminal.note
        stack.enter_context(terminal.in_use())
        if by := tasks_alone():
            terminal.warn(f"{by}, and each trains a run of its own; to train one together, let it start torchrun")
        hardware = detect(config.device)

        # 2. Plan: perhaps with the record and the checkpoint of an earlier run; if it is complete, nothing is to do.
        saved: CheckpointReader | None = None
        with terminal.work("opening the data"):  # where epochs are counted
            plan, folder = planned(config, hardware, world, fitted)
        if folder is not None:
            world.run_on_main(partial(stack.enter_context, in_use(folder.path)))
            checkpoint, how_to_go_on = world.run_on_main(partial(_checkpoint_of, folder, plan))
            if checkpoint is None:
                terminal.outcome(f"{folder.path} is already complete{how_to_go_on}")
                world.run_on_main(partial(finish_delivery, folder.path, config.tracking))
                return Ended(world.run_on_main(folder.summary), folder.path, None)
            saved = CheckpointReader(checkpoint)
            world.run_on_main(partial(store.set_aside, folder.checkpoints, saved.step))

        # 3. Settle: open the data, and give every auto its value.
        with terminal.work("opening the data"):
            settled = settle(plan)
        # A new run has to fit into a CPU's memory: if need be it is settled anew, with a smaller microbatch.
        if folder is None and (smaller := fit(settled, config.micro_batch_size == "auto")):
            plan = plan_of(config, hardware, world, fitted=smaller, datasets=settled.datasets)
            settled = settle(plan)

        # 4. Build the model, which needs most of the memory, and check what only a forward pass can tell.
        _leave_garbage_alone(stack)
        keep_memory(settled)
        try:
            with terminal.work("building the model"):
                trainer = run_class.trainer_class(settled)
            stack.callback(trainer.close)
            scores = Scores(trainer.config, trainer.metrics.lower_is_better)
            scores.check_known(trainer.metric_names, always=bool(trainer.metrics))
            trainer.check_first_pass()
            if saved is None:
                trainer.check_sum()

            # 5. Begin: nothing is written before all is checked.
            with _written(config.output_dir):
                if folder is None:
                    world.run_on_main(partial(_check_disk, config, trainer.model))
                    folder = world.run_on_main(partial(_new_folder, settled, stack, terminal))
                prepared = run_class(trainer, scores, folder, terminal, signals, began, command(folder.path))
                if saved is not None:
                    prepared.restore(saved)
                prepared.begin([*settled.decisions, *trainer.decisions])
            run = prepared

            # 6. Train.
            return Ended(run.train(), run.folder.path, run)
        except Interrupted as stopped:
            stopped.folder = None if run is None else run.folder.path.absolute()
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # In several processes the others wait for the one that has no memory.
            retry = saved is None and world.size == 1 and not (run and run.has_stepped)
            raise ran_out(error, settled.config, settled.batching, retry) from error


def _checkpoint_of(folder: RunFolder, plan: Plan) -> tuple[Path | None, str]:
    """Return the newest intact checkpoint of the run that is continued; None: it is complete, and how to go on with it.

    Rank 0 calls it, once no other process can train this run to its end.

    Raises:
        UserError: it would be another run, has no intact checkpoint, or has taken more steps than it is to have.
        NonFiniteError: it turned non-finite, as the same run would again.
    """
    state = state_of(folder)
    if plan.config.resume == SAME and state == "complete":
        return None, ""
    if plan.config.resume == SAME and state == "not finite":
        step = folder.summary()["failure"]["step"]
        raise NonFiniteError(f"{folder.path} turned non-finite at step {step}; remove the folder to repeat the run")
    ended, kept = state == "complete" and _is_exported(folder, plan), store.steps(folder.checkpoints)
    if ended or kept:  # else it is not continued under any options
        check_same(folder, plan.recorded, flatten(plan.config), plan.config.overrides)
    # checkpoint.keep=0, or checkpoint=none.
    summary = folder.summary()
    if ended and not kept and (summary["step"] >= plan.steps or summary["stopped_early"]):
        return None, f" ({counted(summary['step'], 'step')}); it has kept no checkpoint to continue from"
    try:
        checkpoint = store.find_verified(folder.checkpoints)
    except UserError as error:
        best = folder.path / BEST
        remedies = anew(folder, best, plan.config.overrides) if any(best.glob("*.safetensors")) else []
        raise UserError(error.problem, *remedies, mistake="resume=") from error
    check_record(folder, read_json(checkpoint / STATE_FILE)["progress"].get("options"))
    manifest = read_manifest(checkpoint)
    step, steps = manifest["step"], plan.steps
    # A run that was killed at its end has taken all steps, but its export and its summary may be missing.
    if not ended:
        if step > steps:
            problem = f"steps={steps}, but {folder.path} was stopped after step {step}, and takes as many or more"
            raise UserError(problem, f"steps={step}", mistake="epochs=")
        return checkpoint, ""
    if step >= steps:
        fewer = f"steps={steps} is below that; " if step > steps else ""
        return None, f" ({counted(step, 'step')}); {fewer}set steps={2 * step} to continue"
    scores = Scores(plan.config)
    scores.load_state_dict(manifest["scores"])
    if scores.exhausted:
        more = "set a larger early_stopping.patience, or null, to continue"
        return None, f" (stopped early at step {step}); {more}"
    return checkpoint, ""


def _is_exported(folder: RunFolder, plan: Plan) -> bool:
    """Return whether the best weights of a complete run are still where it has written them, if it has."""
    if not folder.summary().get("best") or not plan.recorded["checkpoint.enabled"]:
        return True
    best = folder.path / BEST
    # A recipe's own format has neither file.
    return best.is_dir() and (best / "config.json").is_file() == any(best.glob("[!.]*.safetensors"))


def _leave_garbage_alone(stack: ExitStack) -> None:
    """Let the garbage collector pass over what the program has imported, for the time of the run."""
    if not gc.get_freeze_count():  # else every look for garbage walks half a million objects, for half a second
        if gc.isenabled():  # else the program has only imported modules so far
            gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
    gc.enable()


def _check_disk(config: Config, model: nn.Module) -> None:
    """Raise UserError where there is no room for a checkpoint and the export; the writer reports what comes later."""
    folder = Path(config.output_dir).expanduser().absolute()
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    needed = 2 * sum(weight.numel() * weight.element_size() for weight in model.parameters()) + store.SPARE_BYTES
    if config.checkpoint.enabled and disk.total and disk.free < needed:  # some file systems do not tell
        raise UserError(
            f"output_dir={config.output_dir}: the disk has {size(disk.free)} free, and a checkpoint and best/ take "
            f"over {size(needed)}; free disk space, or choose another output_dir",
            "checkpoint=none",
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


def _new_folder(settled: Settled, stack: ExitStack, terminal: Terminal) -> RunFolder:
    """Make the folder of a new run, with what a later one needs of the data beside the weights."""
    config = settled.config
    folder = RunFolder.create(config.output_dir, config.name)
    if folder.path.name != config.name:
        auto = to_continue(config.output_dir, config.name, "auto")
        why = "resume=auto would have continued it" if auto else f"{config.name} has no checkpoint"
        terminal.note(f"{config.name} exists; this run is {folder.path.name} ({why})")
    stack.enter_context(in_use(folder.path))
    settled.datasets.keep(folder.path)
    described = Path(str(getattr(config.recipe, "pretrained", None))).expanduser() / "config.json"
    if (kept := folder.path / TOKENIZER).is_dir() and described.is_file():  # then it is not needed on resume
        shutil.copyfile(described, kept / described.name)
    if config.source is not None:
        add_run_facts(folder.path, init_from=config.source.facts())
    return folder
