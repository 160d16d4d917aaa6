"""Checkpoints: everything needed to go on as if nothing had happened, in safetensors and JSON only.

A checkpoint is a folder ``step-00000100`` with ``model.safetensors``, ``optimizer.safetensors``, ``rng.safetensors``
and ``state.json``, and ``manifest.json`` that holds the SHA-256 of the others. It is written to a temporary folder,
flushed to the disk and renamed, so a folder under its final name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.errors import NonFiniteError, UserError

FORMAT = 1


@dataclass
class Checkpoint:
    """The ``checkpoint`` config group."""

    enabled: bool = True
    every: int | str = "auto"
    """Optimizer steps between two checkpoints; auto: at every evaluation."""
    keep: int = 1
    """How many of the newest are kept, besides the best."""

    def __post_init__(self) -> None:
        if isinstance(self.every, str) and self.every != "auto":
            raise UserError(f"checkpoint.every={self.every} must be a whole number of steps, or auto")
        if isinstance(self.every, int) and self.every < 1:
            raise UserError(f"checkpoint.every={self.every} must be at least 1; use checkpoint=none to save nothing")
        if self.keep < 1:
            raise UserError(f"checkpoint.keep={self.keep} must be at least 1; use checkpoint=none to save nothing")


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    rng: dict[str, Tensor],
) -> Path:
    """Write the checkpoint of ``step`` below ``folder`` and return its path.

    Args:
        folder: the run's checkpoint folder.
        step: optimizer steps done.
        model: its state dict is saved; tied weights are saved once.
        optimizer: its state dict is saved.
        progress: JSON types; what else the loop needs to go on.
        rng: the random number generators' states, see ``random_state``.

    Raises:
        NonFiniteError: a weight is not finite; nothing is written.

    """
    weights, ties = _untie(model.state_dict())
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise NonFiniteError(f"{name} is not finite after step {step}; no checkpoint was written")
    tensors, scalars = _flatten(optimizer.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{step:08d}"
    temporary = folder / f".{target.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file(weights, temporary / "model.safetensors")
    save_file(tensors, temporary / "optimizer.safetensors")
    save_file(rng, temporary / "rng.safetensors")
    state = {"step": step, "ties": ties, "optimizer": scalars, "progress": progress}
    (temporary / "state.json").write_text(json.dumps(state))
    hashes = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
    (temporary / "manifest.json").write_text(json.dumps({"format": FORMAT, "step": step, "sha256": hashes}))
    for path in [*temporary.iterdir(), temporary]:
        _flush(path)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    _flush(folder)
    return target


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints below ``folder``, oldest first."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-????????/manifest.json"))


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one."""
    saved = steps(folder)
    for step in set(saved[:-keep]) - {best}:
        shutil.rmtree(folder / f"step-{step:08d}")
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial)


@dataclass
class Saved:
    """A checkpoint read back and verified, on the CPU."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    progress: dict[str, Any]
    rng: dict[str, Tensor]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Load the weights and the optimizer's state in place.

        Raises:
            UserError: the weights do not fit the model.

        """
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            lines = str(error).splitlines()
            raise UserError(f"the checkpoint does not fit this model: {' '.join(lines[1:3]).strip()}") from error
        if optimizer is not None:
            here = [{key: group.get(key) for key in ("fused", "foreach")} for group in optimizer.param_groups]
            optimizer.load_state_dict(self.optimizer)
            for group, kernels in zip(optimizer.param_groups, here, strict=True):  # they belong to the device
                group.update({key: value for key, value in kernels.items() if key in group})
            _match_layout(optimizer)


def load(folder: Path, step: int | None = None) -> Saved:
    """Read and verify the checkpoint of ``step`` (None: the newest) below ``folder``.

    Raises:
        UserError: there is none, or it is damaged; the message names the newest older one that is whole.

    """
    saved = steps(folder)
    if not saved:
        raise UserError(f"{folder} holds no checkpoint to resume from; start without resume=")
    step = saved[-1] if step is None else step
    path = folder / f"step-{step:08d}"
    if damage := _damage(path):
        older = [candidate for candidate in saved if candidate < step]
        whole = next((s for s in reversed(older) if not _damage(folder / f"step-{s:08d}")), None)
        remedy = (
            f"step {whole} is whole: remove the folder {path} and resume again"
            if whole is not None
            else "no older one is whole: start again without resume="
        )
        raise UserError(f"the checkpoint {path} is damaged: {damage}; {remedy}")
    state = json.loads((path / "state.json").read_text())
    weights = load_file(path / "model.safetensors")
    weights |= {alias: weights[name] for alias, name in state["ties"].items()}
    optimizer = _unflatten(load_file(path / "optimizer.safetensors"), state["optimizer"])
    return Saved(state["step"], weights, optimizer, state["progress"], load_file(path / "rng.safetensors"))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of every generator a run may use: torch's on the CPU and the device, numpy's, Python's."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put back what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, cached = state["numpy_rest"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def _untie(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a state dict into tensors that share no memory, and the aliases of those that do."""
    unique: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    owner: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in owner:
            ties[name] = owner[key]
        else:
            owner[key] = name
            unique[name] = tensor.detach().contiguous()
    return unique, ties


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimizer's state dict into tensors named ``index.key`` and JSON types."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach().contiguous()
            else:
                scalars.setdefault(str(index), {})[key] = value
    return tensors, {"param_groups": state["param_groups"], "scalars": scalars}


def _unflatten(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    for index, entry in rest["scalars"].items():
        state.setdefault(int(index), {}).update(entry)
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in rest["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give the state tensors their parameter's strides (channels_last), which fused kernels take for granted."""
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            # A count of steps has no dimensions, nor have some parameters; it may have to stay on the CPU.
            if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        hashes = dict(manifest["sha256"])
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, this version reads {FORMAT}"
    except (OSError, ValueError, KeyError, TypeError):
        return "manifest.json cannot be read"
    for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"):
        if name not in hashes or not (path / name).is_file():
            return f"{name} is missing"
        if _sha256(path / name) != hashes[name]:
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


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
