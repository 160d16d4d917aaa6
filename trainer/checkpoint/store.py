"""Checkpoints on the disk: everything needed to go on as if nothing had happened, in safetensors and JSON only.

A checkpoint is a folder ``step-00000100`` with ``model.safetensors``, ``optimizer.safetensors``, ``rng.safetensors``,
``state.json``, and ``manifest.json`` that holds the SHA-256 of the others. Where the weights are cut into rows
(``parallel=fsdp``) each rank writes its own, ``model-00002-of-00004.safetensors``: the rows of a tensor follow one
another in the order of the files, so any number of ranks can read what any other number wrote. It is written to a
temporary folder, flushed to the disk and renamed, so a folder under its final name is whole.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint.schema import (
    FORMAT,
    MANIFEST_FILE,
    STATE_FILE,
    STEP_NAME,
    Refused,
    damage,
    part_name,
    read_manifest,
    sha256,
)
from trainer.checkpoint.state import untie
from trainer.errors import UserError
from trainer.files import flush, make_folder, write_json
from trainer.parallel.world import World
from trainer.parallel.wrap import is_cut, own_part

SPARE_BYTES = 1 << 20
"""Left free beside a checkpoint's tensors, for the JSON files and the metric log."""


@dataclass
class Checkpoint:
    """The ``checkpoint`` config group."""

    enabled: bool = True
    every: int | str = "auto"
    """Optimizer steps between two checkpoints; auto: at every evaluation."""
    keep: int = 1
    """How many of the newest are kept, besides the best."""
    background: bool = True
    """Copy to host memory (as much again as weights and optimizer take) and write while training goes on."""
    save_on_signal: list[str] = field(default_factory=list)
    """Signals, such as USR1, after which the step is finished, a checkpoint saved, and training goes on."""

    def __post_init__(self) -> None:
        if isinstance(self.every, str) and self.every != "auto":
            raise UserError(f"checkpoint.every={self.every} must be a whole number of steps, or auto")
        if isinstance(self.every, int) and self.every < 1:
            raise UserError(f"checkpoint.every={self.every} must be at least 1; use checkpoint=none to save nothing")
        if self.keep < 1:
            raise UserError(f"checkpoint.keep={self.keep} must be at least 1; use checkpoint=none to save nothing")
        usable = ("USR1", "USR2", "HUP", "ALRM", "XCPU")
        for name in self.save_on_signal:
            if name not in usable or not hasattr(signal, f"SIG{name}"):
                raise UserError(f"checkpoint.save_on_signal: {name} is not one of {', '.join(usable)}; use [USR1]")
        if self.save_on_signal and not self.enabled:
            raise UserError("checkpoint.save_on_signal has no effect with checkpoint=none; drop one of them")


class NotWritten(Exception):
    """A checkpoint could not be written (a full disk, for example); earlier ones are untouched."""


@dataclass
class Contents:
    """What one rank has to write."""

    step: int
    files: dict[str, dict[str, Tensor]]
    """Named contiguous tensors by the name of their file."""
    state: str
    """JSON; only rank 0 writes it."""

    @classmethod
    def of(cls, training: dict[str, Any], progress: dict[str, Any], world: World) -> Contents:
        """Collect this rank's part, mostly without copying.

        Args:
            training: see ``state.training_state``; tied weights are saved once.
            progress: JSON types; what else the run needs to continue.
            world: the processes that save together.

        """
        weights, ties = untie(training["model"])
        step, rng, tensors, rest = (training[key] for key in ("step", "rng", "optimizer", "optimizer_options"))
        cut = any(map(is_cut, weights.values()))
        files = {part_name("rng", world.rank, world.size): rng}
        if cut or world.first:
            own = (world.rank, world.size) if cut else (0, 1)
            files[part_name("model", *own)] = _local(weights, world)
            files[part_name("optimizer", *own)] = _local(tensors, world)
        state = {"step": step, "ties": ties, "optimizer": rest, "progress": progress}
        return cls(step, files, json.dumps(state))

    @property
    def bytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())


def write(folder: Path, contents: Contents, score: float | None, world: World) -> Path:
    """Write a checkpoint below ``folder``, every rank its part, and return its path.

    Args:
        folder: the run's checkpoint folder, the same for all ranks.
        contents: this rank's part.
        score: what the weights were judged by at this step (the lowest is the best), if they were.
        world: the processes that save together.

    Raises:
        NotWritten: on every rank, where one of them could not; nothing is left behind.

    """
    target = folder / _name(contents.step)
    temporary = folder / f".{target.name}.partial"
    hashes: dict[str, str] = {}

    def prepare() -> None:
        make_folder(folder)
        _clear_up(folder)
        temporary.mkdir()

    def write_part() -> None:
        _check_space(folder, contents.bytes)
        for name, tensors in contents.files.items():
            save_file(tensors, temporary / name, {"step": str(contents.step)})
            flush(temporary / name)
            hashes[name] = sha256(temporary / name)

    def conclude() -> None:
        (temporary / STATE_FILE).write_text(contents.state, encoding="utf-8")
        everything = {STATE_FILE: sha256(temporary / STATE_FILE)}
        for part in parts:
            everything |= part["sha256"]
        manifest = {"format": FORMAT, "step": contents.step, "score": score, "sha256": everything}
        write_json(temporary / MANIFEST_FILE, manifest)
        for path in (temporary / STATE_FILE, temporary / MANIFEST_FILE, temporary):
            flush(path)
        if json.loads((temporary / MANIFEST_FILE).read_text()) != manifest:
            raise OSError(f"{temporary}/{MANIFEST_FILE} does not read back as it was written")
        _replace(target, temporary)

    parts: list[dict[str, Any]] = []
    for duty, only_first in ((prepare, True), (write_part, False), (conclude, True)):
        problem = None
        try:
            if world.first or not only_first:
                duty()
        except (OSError, SafetensorError) as error:
            problem = str(error) if world.size == 1 else f"rank {world.rank}: {error}"
        parts = world.gather({"sha256": hashes, "problem": problem})
        problems = [part["problem"] for part in parts if part["problem"]]
        if problems:
            if world.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise NotWritten("; ".join(problems))
    return target


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints below ``folder``, oldest first; other names are not ours."""
    found = set()
    for path in folder.glob(f"*/{MANIFEST_FILE}"):
        name = path.parent.name
        if match := _ASIDE.fullmatch(name) or STEP_NAME.fullmatch(name):
            found.add(int(match[match.lastindex or 0][5:]))
    return sorted(found)


def best_step(folder: Path) -> int | None:
    """Return the step of the checkpoint with the lowest score below ``folder``, the earliest of equals."""
    scores = []
    for step in steps(folder):
        try:
            score = read_manifest(path_of(folder, step)).score
        except Refused:
            continue  # damaged: what reads it says so
        if score is not None:
            scores.append((score, step))
    return min(scores)[1] if scores else None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one."""
    saved = steps(folder)
    for step in set(saved[:-keep]) - {best_step(folder)}:
        shutil.rmtree(path_of(folder, step))


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is."""
    path, aside = folder / _name(step), folder / f".{_name(step)}.old"
    return aside if aside.is_dir() and not path.is_dir() else path


def find(folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of ``step`` (None: the newest) below ``folder``, verified.

    Raises:
        UserError: there is none, or it is damaged or holds what no checkpoint holds; the message names the file, and
            the newest older checkpoint that is whole.

    """
    saved = steps(folder)
    if not saved:
        raise UserError(f"{folder} holds no checkpoint to resume from; start without resume=")
    step = saved[-1] if step is None else step
    path = path_of(folder, step)
    if found := damage(path, step):
        older = [candidate for candidate in reversed(saved) if candidate < step]
        whole = next((other for other in older if not damage(path_of(folder, other), other)), None)
        remedy = (
            f"step {whole} is whole: remove the folder {path} and resume again"
            if whole is not None
            else "no older one is whole: start again without resume="
        )
        raise UserError(f"the checkpoint {path} is damaged: {found}; {remedy}")
    return path


_ASIDE = re.compile(rf"\.({STEP_NAME.pattern})\.old")
_PARTIAL = re.compile(rf"\.{STEP_NAME.pattern}\.partial")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _replace(target: Path, new: Path) -> None:
    """Rename ``new`` to ``target``. One that is there stays whole, under a name that is read, until then."""
    aside = target.with_name(f".{target.name}.old")
    replaces = target.is_dir()
    if replaces:
        target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        if replaces:
            aside.rename(target)
        raise
    flush(target.parent)
    if replaces:
        shutil.rmtree(aside)


def _clear_up(folder: Path) -> None:
    """Remove what a process left that was killed while it saved; what it had set aside takes its place again."""
    for path in sorted(folder.iterdir()):
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)
        elif found := _ASIDE.fullmatch(path.name):
            if (folder / found[1]).exists():
                shutil.rmtree(path)
            else:
                path.rename(folder / found[1])


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise OSError(f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free in {folder}")


def _local(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return this rank's rows of what is cut, and on rank 0 also what is not."""
    mine = {name: tensor for name, tensor in tensors.items() if world.first or is_cut(tensor)}
    return {name: own_part(tensor).contiguous() for name, tensor in mine.items()}
