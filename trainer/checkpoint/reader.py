"""Load a checkpoint, written by any number of ranks, into a model and an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mantissa.display import counted, dimensions, listed, shortened
from mantissa.tensors import changed_by, local
from trainer.checkpoint.schema import KINDS, STATE_FILE, WEIGHTS_SINCE, State, files_of, read_manifest
from trainer.checkpoint.store import find_verified
from trainer.errors import UserError
from trainer.files import read_json
from trainer.optim.ema import Average
from trainer.optim.masters import MasterWeights
from trainer.optim.state import (
    AVERAGE,
    create_state,
    optimizer_state,
    parameter_names,
    untie,
    weight_copies,
)
from trainer.parallel.shards import is_sharded, local_rows


class CheckpointReader:
    """An open checkpoint. Tensors are read when they are needed, and of sharded ones only the rows of this rank.

    A mismatch raises a UserError that names the file, before anything is loaded.
    """

    def __init__(self, path: Path) -> None:
        """Open the checkpoint at ``path``, which ``find_verified`` has verified."""
        self.path = path
        manifest = read_manifest(path)
        self._state: State = read_json(path / STATE_FILE)
        self._files = {kind: files_of(manifest, kind) for kind in KINDS}
        self._weights = _TensorFiles(path, self._files["model"])
        self._moments = _TensorFiles(path, self._files["optimizer"])
        self.step: int = self._state["step"]
        self.loss_scale: dict[str, float] = self._state["loss_scale"]
        self.progress: dict[str, Any] = self._state["progress"]
        self.scores: dict[str, Any] = manifest.get("scores", {})
        self.totals: dict[str, Any] = manifest.get("totals", {})

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        masters: MasterWeights | None = None,
        average: Average | None = None,
        around: AbstractContextManager[object] | None = None,
    ) -> None:
        """Load the weights, the optimizer's state, the fp32 masters and averages, where there are any, in place.

        The optimizer keeps its options, which are the config's. It takes its steps in ``around``.

        Raises:
            UserError: the checkpoint is not of this model and this optimizer.
        """
        weights = {self._state["ties"].get(name, name): tensor for name, tensor in model.state_dict().items()}
        tensors, kept = weight_copies(masters, average), self._state["optimizer"]
        # Everything is compared before anything is loaded.
        misfit = self._weights.misfit(weights, "model")
        if optimizer is not None and misfit is None:
            names = parameter_names(masters or model, optimizer)
            if names == kept["names"] and len(optimizer.param_groups) == len(kept["groups"]):
                with around or nullcontext():
                    create_state(optimizer, masters, names, kept["stateless"])
                tensors |= optimizer_state(masters or model, optimizer)[0]
                misfit = self._moments.misfit(tensors, "optimizer")
            else:
                misfit = f"{self._moments.file}: this optimizer's parameter groups differ"
        if misfit:
            raise UserError(f"the checkpoint {self.path} does not fit this run: {misfit}")
        for name, tensor in weights.items():
            self._weights.fill(tensor, name)
        for name, tensor in tensors.items():
            self._moments.fill(tensor, name)
        if optimizer is not None:
            self._restore_numbers(optimizer)

    def rng(self, rank: int) -> dict[str, Tensor] | None:
        """Return the states of a rank's generators; None: no such rank."""
        files = self._files["rng"][rank : rank + 1]
        return _TensorFiles(self.path, files).read() if files else None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, whole: ``weights/…``, ``optimizer/…`` and each rank's ``rng/0/…``."""
        result = {f"weights/{name}": tensor for name, tensor in self._weights.read().items()}
        result |= {f"optimizer/{name}": tensor for name, tensor in self._moments.read().items()}
        for rank in range(len(self._files["rng"])):
            result |= {f"rng/{rank}/{name}": tensor for name, tensor in (self.rng(rank) or {}).items()}
        return result

    def _restore_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore what the optimizer keeps beside the tensors of its state, in place."""
        options, kept = inspect.signature(type(optimizer)).parameters, self._state["optimizer"]
        for there, group in zip(kept["groups"], optimizer.param_groups, strict=True):
            for key in there.keys() - options.keys():
                # What is no option is a count that the optimizer keeps there, such as LAMB's of steps, a tensor.
                now = group.get(key)
                group[key] = now.new_tensor(there[key]) if isinstance(now, Tensor) else there[key]
        for name, parameter in zip(kept["names"], changed_by(optimizer), strict=True):
            if name in kept["scalars"]:
                optimizer.state[parameter] |= kept["scalars"][name]


class _TensorFiles:
    """Named tensors in one file, or sharded by rows over several."""

    def __init__(self, path: Path, files: list[str]) -> None:
        self.file = files[0] if len(files) == 1 else f"{files[0]} to {files[-1]}"
        self._where: dict[str, list[Any]] = {}
        for file in files:
            opened = safe_open(path / file, "pt")
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                self._where.setdefault(name, []).append(opened)

    def misfit(self, tensors: dict[str, Tensor], what: str) -> str | None:
        """Return the first difference in names, shapes and types from a model's or an optimizer's tensors."""
        if differs := _differing_names(tensors, self._where, what):
            return f"{self.file}: {differs}"
        for name, like in tensors.items():
            parts = [file.get_slice(name) for file in self._where[name]]
            shapes = [part.get_shape() for part in parts]
            shape = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
            if shape != tuple(like.shape):
                return f"{self.file}: {name} was {dimensions(shape)}, now {dimensions(like.shape)}"
            dtype = (parts[0][:0] if shape else self.whole(name)).dtype
            if dtype != like.dtype:
                return f"{self.file}: {name} was {dtype}, now {like.dtype}"
        return None

    def whole(self, name: str) -> Tensor:
        tensors: list[Tensor] = [file.get_tensor(name) for file in self._where[name]]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def read(self) -> dict[str, Tensor]:
        """Return every tensor, whole."""
        return {name: self.whole(name) for name in self._where}

    def fill(self, target: Tensor, name: str) -> None:
        """Overwrite ``target``, or the rows of it that this rank has."""
        local(target).copy_(self._rows(name, *local_rows(target)) if is_sharded(target) else self.whole(name))

    def _rows(self, name: str, first: int, count: int) -> Tensor:
        wanted: list[Tensor] = []
        for file in self._where[name]:
            part = file.get_slice(name)
            length = part.get_shape()[0]
            start, stop = max(0, first), min(length, first + count)
            if start < stop:
                wanted.append(part[start:stop])
            first -= length
        return torch.cat(wanted) if wanted else self._where[name][0].get_tensor(name)[:0]


def load(folder: Path, step: int | None = None) -> CheckpointReader:
    """Open the checkpoint of ``step`` (None: the newest) below ``folder``, verified.

    Raises:
        UserError: see ``find_verified``.
    """
    return CheckpointReader(find_verified(folder, step))


def evaluated_weights(folder: Path, step: int | None) -> dict[str, Tensor]:
    """Return the weights of a checkpoint as they were evaluated, and as an export has them: averages where there are.

    An earlier version may have written it.

    Raises:
        UserError: see ``find_verified``.
    """
    path = find_verified(folder, step, WEIGHTS_SINCE)
    manifest = read_manifest(path, WEIGHTS_SINCE)
    weights, state = (_TensorFiles(path, files_of(manifest, kind)).read() for kind in ("model", "optimizer"))
    return {name: state.get(f"{name}.{AVERAGE}", weight) for name, weight in weights.items()}


def fill(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Overwrite a model's weights by name, in its own dtypes. Of weights that share memory one name is enough.

    Raises:
        UserError: names are missing or unknown, shapes are others, numbers are integers or not finite; ``where`` begins
            the message.
    """
    state = model.state_dict()
    ties = untie(state)[1]
    given = {ties.get(name, name): weights[name] for name in reversed(state) if name in weights}
    missing = [name for name in state if name not in ties and name not in given]
    unknown = sorted(weights.keys() - state.keys())
    other = [name for name in state if name in given and given[name].shape != state[name].shape]
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(state) - len(ties)} tensors are missing ({shortened(missing, 3)})")
    if unknown:
        parts.append(f"{listed(unknown, 'tensor')} too many")
    if other:
        shapes = [f"{name} is {dimensions(given[name].shape)}, not {dimensions(state[name].shape)}" for name in other]
        parts.append(f"{counted(len(other), 'tensor')} of another shape ({shortened(shapes, 2)})")
    if parts:
        raise UserError(f"{where}: the weights do not fit this model: {', '.join(parts)}")
    floats = {name: given[name] for name in given if state[name].is_floating_point()}
    check_numbers(floats, where)
    # A mask of -inf is what the model itself begins with.
    wrong = [name for name in nonfinite(floats) if not torch.equal(given[name].to(state[name].dtype), state[name])]
    if wrong:
        raise not_finite(wrong, where)
    for name, tensor in given.items():
        state[name].copy_(tensor)


def check_numbers(weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse quantized weights by a UserError, which ``where`` begins: as floats, they would be other numbers."""
    if quantized := [name for name, each in weights.items() if not each.is_floating_point() or each.itemsize == 1]:
        raise UserError(
            f"{where}: {listed(quantized, 'tensor')} of {weights[quantized[0]].dtype}, as of quantized weights; "
            "give those in 32 or 16 bits"
        )


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinities."""
    held = {name: each for name, each in tensors.items() if each.is_floating_point() and each.numel()}
    return [name for name, each in held.items() if not torch.stack(each.aminmax()).isfinite().all()]


def not_finite(names: Sequence[str], where: str) -> UserError:
    """Return the error of tensors with NaN or infinities; ``where`` begins the message."""
    return UserError(f"{where}: {listed(names, 'tensor')} with NaN or infinities; give weights that are finite")


def _differing_names(wanted: Collection[str], given: Collection[str], what: str) -> str:
    """Return the first name that is missing, and the first that is unknown; empty: they are the same."""
    missing, unknown = [name for name in wanted if name not in given], sorted({*given} - {*wanted})
    parts = [f"{missing[0]} is missing"] if missing else []
    parts += [f"this {what} has no {unknown[0]}"] if unknown else []
    return " and ".join(parts)
