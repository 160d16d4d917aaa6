"""Checkpoints on the disk: everything needed to resume a run exactly, in safetensors and JSON only.

A checkpoint is a folder ``step-00000100`` with ``model.safetensors``, ``optimizer.safetensors``, ``rng.safetensors``,
``state.json``, and ``manifest.json`` that holds the SHA-256 of each.
Where the weights are sharded (``parallel=fsdp``) each rank writes its own, ``model-00002-of-00004.safetensors``: the
rows of a tensor follow one another in the order of the files, so any number of ranks can read what any other number
wrote. A checkpoint is written to a temporary folder, flushed to the disk and renamed, so a folder with its final name
is complete.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mantissa.display import size
from mantissa.tensors import local
from trainer import files
from trainer.checkpoint.schema import (
    FORMAT,
    MANIFEST_FILE,
    STATE_FILE,
    STEP_NAME,
    best_step,
    damage,
    path_of,
    rank_file,
    steps,
    write_manifest,
)
from trainer.errors import UserError, check_number, no_effect
from trainer.files import remove_folder, sha256
from trainer.optim.state import untie
from trainer.parallel.shards import is_sharded
from trainer.parallel.world import World

log = logging.getLogger("mantissa")

SPARE_BYTES = 1 << 20
"""Disk space that a checkpoint leaves free for the JSON files and the metric log."""


@dataclass
class Checkpoint:
    """The ``checkpoint`` config group."""

    enabled: bool = True
    """Save checkpoints; a run without one cannot be resumed."""
    every: int | str = "auto"
    """Optimizer steps between checkpoints; auto: at every evaluation, and with long epochs ten per run."""
    keep: int = 1
    """Number of newest checkpoints to keep, besides the best; 0: none once the run has ended, only ``best/``."""
    background: bool = True
    """Save asynchronously: copy weights and optimizer state to host memory, and write while training continues."""
    save_on_signal: list[str] = field(default_factory=list)
    """Signals, such as USR1, on which the run finishes its step, saves a checkpoint and continues."""
    best: str = "auto"
    """Metric that selects the best checkpoint, such as ``valid/top1``; auto: the recipe's own, usually
    ``valid/loss``."""

    def due(self, step: int, evaluated: bool, save_every: int | None) -> bool:
        """Return whether a checkpoint is saved after this step; ``save_every``: see ``Plan``."""
        if isinstance(self.every, str):
            return evaluated or (save_every is not None and step % save_every == 0)
        return step % self.every == 0

    def __post_init__(self) -> None:
        check_number("checkpoint.every", self.every)
        check_number("checkpoint.keep", self.keep, 0)
        usable = ("USR1", "USR2", "HUP", "ALRM", "XCPU")
        for name in self.save_on_signal:
            if name not in usable:
                raise UserError(f"checkpoint.save_on_signal: {name} is not one of {', '.join(usable)}; use [USR1]")
        if self.save_on_signal and not self.enabled:
            raise no_effect("checkpoint.save_on_signal", "checkpoint=none saves nothing")


class CheckpointNotWritten(Exception):
    """A checkpoint could not be written (a full disk, for example); earlier ones are untouched."""


@dataclass
class Snapshot:
    """What one rank has to write."""

    step: int
    files: dict[str, dict[str, Tensor]]
    """Named contiguous tensors by the name of their file."""
    state: str
    """JSON; only rank 0 writes it."""
    run: dict[str, Any]
    """``scores`` and ``totals`` of the manifest, see ``schema.Manifest``; only rank 0 writes them."""

    @classmethod
    def of(
        cls, training: dict[str, Any], progress: dict[str, Any], world: World, run: dict[str, Any] | None = None
    ) -> Snapshot:
        """Collect this rank's tensors, mostly without copying.

        Args:
            training: see ``state.training_state``; tied weights are saved once.
            progress: JSON types; what else the run needs to continue.
            world: the processes that save together.
            run: see ``Snapshot.run``; None: no run saves it.
        """
        weights, ties = untie(training["model"])
        step, rng, tensors, rest = (training[key] for key in ("step", "rng", "optimizer", "optimizer_options"))
        cut = any(map(is_sharded, weights.values()))
        files = {rank_file("rng", world.rank, world.size): rng}
        if cut or world.is_main:
            place = (world.rank, world.size) if cut else (0, 1)
            files[rank_file("model", *place)] = _local(weights, world)
            files[rank_file("optimizer", *place)] = _local(tensors, world)
        scale = training["loss_scale"]
        state = {"step": step, "ties": ties, "optimizer": rest, "loss_scale": scale, "progress": progress}
        return cls(step, files, json.dumps(state), run or {})


def write(folder: Path, snapshot: Snapshot, score: float | None, world: World) -> Path:
    """Write a checkpoint below ``folder``, each rank its own files, and return its path.

    Args:
        folder: the run's checkpoint folder, the same for all ranks.
        snapshot: of this rank.
        score: of the weights at this step (the lowest is the best); None if they were not evaluated.
        world: the processes that save together.

    Raises:
        CheckpointNotWritten: on every rank, if one of them failed; nothing is left behind.
    """
    target = path_of(folder, snapshot.step)
    temporary = folder / f".{target.name}.partial"
    on_all_ranks = partial(_on_all_ranks, world, temporary)
    # A folder under another name, into which every rank writes its tensors.
    on_all_ranks(partial(_prepare, folder, temporary) if world.is_main else None)
    parts = on_all_ranks(partial(_write_tensors, snapshot, temporary))
    # The manifest has all hashes; with it the folder gets its name, and is a checkpoint.
    hashes = {name: value for part in parts for name, value in part.items()}
    manifest = {"format": FORMAT, "step": snapshot.step, "score": score, "sha256": hashes} | snapshot.run
    on_all_ranks(partial(_complete, target, temporary, snapshot.state, manifest) if world.is_main else None)
    return target


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints (at least one) and the best, and what a killed process left."""
    _clear_up(folder)
    saved = steps(folder)
    for step in set(saved[: -max(1, keep)]) - {best_step(folder)}:
        remove_folder(path_of(folder, step))


def find_verified(folder: Path, step: int | None = None, oldest: int = FORMAT) -> Path:
    """Return the checkpoint of ``step`` below ``folder``, verified; None: the newest that is whole, with a warning.

    ``oldest`` is the first format that is read.

    Raises:
        UserError: there is none, or none that is whole; the message names the file.
    """
    saved = steps(folder)
    if not saved:
        raise UserError(f"{folder} holds no checkpoint to resume from; start without resume=")
    damaged: list[str] = []
    for wanted in reversed(saved) if step is None else [step]:
        path = path_of(folder, wanted)
        if not (problem := damage(path, wanted, oldest)):
            for text in damaged:
                log.warning("%s; step %d, before it, is whole and is taken", text, wanted)
            return path
        damaged.append(f"the checkpoint {path} is damaged: {problem}")
    older = "no older one is whole; " if step is None else ""
    raise UserError(f"{damaged[0]}; {older}start a new run without resume=")


def set_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints after ``step`` to ``….damaged``: a run that goes on from there saves these steps again."""
    for later in steps(folder):
        if later > step:
            path = path_of(folder, later)
            remove_folder(aside := path.with_name(f"{path.name}.damaged"))
            path.rename(aside)


_PARTIAL = re.compile(rf"\.{STEP_NAME.pattern}\.(partial|old)")


def _on_all_ranks(world: World, temporary: Path, work: Callable[[], Any] | None) -> list[Any]:
    """Do this rank's work; return the results of all ranks, by rank. If one of them fails, remove what was written."""
    result, problem, bug = None, None, None
    try:
        result = work() if work else None
    except Exception as error:  # of any kind: the others wait for this rank's answer
        problem = str(error) if world.size == 1 else f"rank {world.rank}: {error}"
        bug = None if isinstance(error, OSError | SafetensorError) else error
    answers = world.gather((result, problem))
    if problems := [problem for _, problem in answers if problem is not None]:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise bug or CheckpointNotWritten("; ".join(problems))
    return [result for result, _ in answers]


def _prepare(folder: Path, temporary: Path) -> None:
    folder.mkdir(exist_ok=True)
    files.flush(folder.parent)
    _clear_up(folder)
    temporary.mkdir()


def _write_tensors(snapshot: Snapshot, temporary: Path) -> dict[str, str]:
    """Write this rank's files; return their hashes."""
    needed = sum(tensor.nbytes for tensors in snapshot.files.values() for tensor in tensors.values())
    free = shutil.disk_usage(temporary).free
    if free < needed + SPARE_BYTES:
        spare = f"and {size(SPARE_BYTES)} for the metric log"
        raise OSError(f"{size(needed)} are needed, {spare}; {size(free)} are free in {temporary.parent}")
    hashes = {}
    for name, tensors in snapshot.files.items():
        save_file(tensors, temporary / name, {"step": str(snapshot.step)})
        files.flush(temporary / name)
        hashes[name] = sha256(temporary / name)
    return hashes


def _complete(target: Path, temporary: Path, state: str, manifest: dict[str, Any]) -> None:
    """Write the state and the manifest, to which the hash of the state is added, and give the folder its name."""
    (temporary / STATE_FILE).write_text(state, encoding="utf-8")
    manifest["sha256"] = {STATE_FILE: sha256(temporary / STATE_FILE)} | manifest["sha256"]
    write_manifest(temporary, manifest)
    for path in (temporary / STATE_FILE, temporary / MANIFEST_FILE, temporary):
        files.flush(path)
    temporary.rename(target)  # an OSError where the step is saved already
    files.flush(target.parent)


def _clear_up(folder: Path) -> None:
    """Remove what a killed process left of a checkpoint."""
    for path in sorted(folder.iterdir()):
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _local(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return this rank's rows of sharded tensors, and on rank 0 also the other tensors."""
    mine = {name: tensor for name, tensor in tensors.items() if world.is_main or is_sharded(tensor)}
    return {name: local(tensor).contiguous() for name, tensor in mine.items()}
