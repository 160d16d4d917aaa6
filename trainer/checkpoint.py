"""Checkpoints on the disk: everything needed to go on as if nothing had happened, in safetensors and JSON only.

A checkpoint is a folder ``step-00000100`` with ``model.safetensors``, ``optimizer.safetensors``, ``rng.safetensors``,
``state.json``, and ``manifest.json`` that holds the SHA-256 of the others. Where the weights are cut into rows
(``parallel=fsdp``) each rank writes its own, ``model-00002-of-00004.safetensors``: the rows of a tensor follow one
another in the order of the files, so any number of ranks can read what any other number wrote. It is written to a
temporary folder, flushed to the disk and renamed, so a folder under its final name is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.files import flush, write_json
from trainer.master import MasterWeights
from trainer.parallel import is_cut, own_part
from trainer.world import World

FORMAT = 2
MASTER = "master_weight"
"""The key, among a parameter's entries in the optimizer's file, of its fp32 copy."""
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
    def of(
        cls,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: dict[str, Any],
        rng: dict[str, Tensor],
        world: World,
        masters: MasterWeights | None = None,
    ) -> Contents:
        """Collect this rank's part, mostly without copying.

        Args:
            step: optimizer steps done.
            model: its state dict is saved; tied weights are saved once.
            optimizer: its state is saved under the names of the parameters.
            progress: JSON types; what else the loop needs to go on.
            rng: the states of this rank's generators, see ``trainer.rng``.
            world: the processes that save together.
            masters: what the optimizer works on in the place of the model's weights; saved with its state.

        """
        weights, ties = _untie(model.state_dict())
        tensors, rest = _optimizer_tensors(masters or model, optimizer)
        if masters is not None:
            tensors |= {f"{name}.{MASTER}": master.detach() for name, master in masters.held()}
        cut = any(map(is_cut, weights.values()))
        files = {_part("rng", world.rank, world.size): rng}
        if cut or world.first:
            own = (world.rank, world.size) if cut else (0, 1)
            files[_part("model", *own)] = _local(weights, world)
            files[_part("optimizer", *own)] = _local(tensors, world)
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
    target = folder / f"step-{contents.step:08d}"
    temporary = folder / f".{target.name}.partial"
    hashes: dict[str, str] = {}

    def prepare() -> None:
        for partial in folder.glob(".step-*.partial"):  # of a process that was killed
            shutil.rmtree(partial)
        temporary.mkdir(parents=True)

    def write_part() -> None:
        _check_space(folder, contents.bytes)
        for name, tensors in contents.files.items():
            save_file(tensors, temporary / name)
            flush(temporary / name)
            hashes[name] = _sha256(temporary / name)

    def conclude() -> None:
        (temporary / "state.json").write_text(contents.state, encoding="utf-8")
        everything = {"state.json": _sha256(temporary / "state.json")}
        for part in parts:
            everything |= part["sha256"]
        manifest = {"format": FORMAT, "step": contents.step, "score": score, "sha256": everything}
        write_json(temporary / "manifest.json", manifest)
        for path in (temporary / "state.json", temporary / "manifest.json", temporary):
            flush(path)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        flush(folder)
        if json.loads((target / "manifest.json").read_text()) != manifest:
            shutil.rmtree(target)
            raise OSError(f"{target}/manifest.json does not read back as it was written")

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
    """Return the steps of the complete checkpoints below ``folder``, oldest first."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-????????/manifest.json"))


def best_step(folder: Path) -> int | None:
    """Return the step of the checkpoint with the lowest score below ``folder``, the earliest of equals."""
    scores = []
    for step in steps(folder):
        try:
            score = json.loads((path_of(folder, step) / "manifest.json").read_text())["score"]
        except (OSError, ValueError, KeyError, TypeError):
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
    return folder / f"step-{step:08d}"


def find(folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of ``step`` (None: the newest) below ``folder``, verified.

    Raises:
        UserError: there is none, or it is damaged; the message names the newest older one that is whole.

    """
    saved = steps(folder)
    if not saved:
        raise UserError(f"{folder} holds no checkpoint to resume from; start without resume=")
    step = saved[-1] if step is None else step
    path = path_of(folder, step)
    if damage := _damage(path):
        older = [candidate for candidate in saved if candidate < step]
        whole = next((s for s in reversed(older) if not _damage(path_of(folder, s))), None)
        remedy = (
            f"step {whole} is whole: remove the folder {path} and resume again"
            if whole is not None
            else "no older one is whole: start again without resume="
        )
        raise UserError(f"the checkpoint {path} is damaged: {damage}; {remedy}")
    return path


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise OSError(f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free in {folder}")


def _part(name: str, rank: int, ranks: int) -> str:
    return f"{name}.safetensors" if ranks == 1 else f"{name}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def _local(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return this rank's rows of what is cut, and on rank 0 also what is not."""
    mine = {name: tensor for name, tensor in tensors.items() if world.first or is_cut(tensor)}
    return {name: own_part(tensor).contiguous() for name, tensor in mine.items()}


def _untie(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a state dict into tensors that share no memory, and the aliases of those that do."""
    unique: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    owner: dict[tuple[Any, ...], str] = {}
    for name, whole in state.items():
        tensor = own_part(whole)
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in owner:
            ties[name] = owner[key]
        else:
            owner[key] = name
            unique[name] = whole.detach()
    return unique, ties


def _optimizer_tensors(
    model: nn.Module | MasterWeights, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimizer's state into tensors named ``parameter.key``, and JSON types."""
    names = parameter_names(model, optimizer)
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{names[index]}.{key}"] = value.detach()
            else:
                scalars.setdefault(names[index], {})[key] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return tensors, {"names": names, "groups": groups, "scalars": scalars}


def parameter_names(model: nn.Module | MasterWeights, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        hashes = dict(manifest["sha256"])
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, this version reads {FORMAT}"
    except (OSError, ValueError, KeyError, TypeError):
        return "manifest.json cannot be read"
    found = {name.partition("-")[0].partition(".")[0] for name in hashes}
    for name in sorted({"model", "optimizer", "rng", "state"} - found):
        return f"{name} is missing"
    for name, expected in sorted(hashes.items()):
        if Path(name).name != name or not (path / name).is_file():
            return f"{name} is missing"
        if _sha256(path / name) != expected:
            return f"{name} does not match its SHA-256"
        if name.endswith(".safetensors"):
            try:
                with safe_open(path / name, "pt"):
                    pass
            except SafetensorError:
                return f"{name} is no safetensors file"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
