"""A checkpoint read back into a model, an optimizer and the generators, whatever number of ranks wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer.checkpoint import MASTER, find, parameter_names
from trainer.errors import UserError
from trainer.master import MasterWeights
from trainer.parallel import is_cut, own_part, own_rows


class Saved:
    """An opened checkpoint. Tensors are read when they are asked for, only the rows that are needed."""

    def __init__(self, path: Path) -> None:
        """Open the checkpoint at ``path``, which ``checkpoint.find`` has verified."""
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        self.path = path
        self.step: int = state["step"]
        self.progress: dict[str, Any] = state["progress"]
        self._ties: dict[str, str] = state["ties"]
        self._optimizer: dict[str, Any] = state["optimizer"]
        self._weights = _Parts(path, "model")
        self._moments = _Parts(path, "optimizer")

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, masters: MasterWeights | None = None
    ) -> None:
        """Load the weights, the optimizer's state and the fp32 masters, where there are any, in place.

        Raises:
            UserError: the weights do not fit the model.

        """
        state = model.state_dict()
        saved = {*self._weights.names, *self._ties}
        if state.keys() != saved:
            missing, unknown = sorted(state.keys() - saved), sorted(saved - state.keys())
            parts = [f"it lacks {missing[0]}"] if missing else []
            parts += [f"this model has no {unknown[0]}"] if unknown else []
            raise UserError(f"the checkpoint {self.path} does not fit this model: {' and '.join(parts)}")
        # Running statistics of normalisation were 16-bit, where weights are, before they stayed in fp32.
        statistics = {name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32}
        for name, tensor in state.items():
            self._weights.fill(tensor, self._ties.get(name, name), widen=name in statistics)
        if optimizer is not None:
            for name, master in masters.held() if masters is not None else ():
                self._moments.fill(master.detach(), f"{name}.{MASTER}")
            self._restore_optimizer(masters or model, optimizer)

    def rng(self, rank: int) -> dict[str, Tensor] | None:
        """Return the states of a rank's generators; None: there was no such rank."""
        files = _files(self.path, "rng")
        return _Parts(self.path, "rng", rank).read() if rank < len(files) else None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, whole: ``weights/…``, ``optimizer/…`` and each rank's ``rng/0/…``."""
        result = {f"weights/{name}": tensor for name, tensor in self._weights.read().items()}
        result |= {f"optimizer/{name}": tensor for name, tensor in self._moments.read().items()}
        for rank in range(len(_files(self.path, "rng"))):
            result |= {f"rng/{rank}/{name}": tensor for name, tensor in (self.rng(rank) or {}).items()}
        return result

    def _restore_optimizer(self, model: nn.Module | MasterWeights, optimizer: torch.optim.Optimizer) -> None:
        names = parameter_names(model, optimizer)
        groups = self._optimizer["groups"]
        if names != self._optimizer["names"] or len(groups) != len(optimizer.param_groups):
            raise UserError(
                f"the checkpoint {self.path} does not fit this optimizer: it has other groups of parameters"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries: dict[int, dict[str, Any]] = {}
        index = {name: number for number, name in enumerate(names)}
        for full_name in self._moments.names:
            name, _, key = full_name.rpartition(".")
            if key == MASTER:
                continue  # filled already
            like = parameters[index[name]]
            # A moment has its parameter's layout (fused kernels take that for granted) and rows; a count of steps
            # has no dimensions, nor have some parameters, and it may have to stay on the CPU.
            alike = key != "step" and self._moments.shape(full_name) == tuple(like.shape)
            value = self._moments.like(full_name, like) if alike else self._moments.whole(full_name)
            entries.setdefault(index[name], {})[key] = value
        for name, scalars in self._optimizer["scalars"].items():
            entries.setdefault(index[name], {}).update(scalars)
        here = optimizer.state_dict()["param_groups"]
        # Which kernels do the work is a matter of this device, not of the checkpoint's.
        kernels = [{key: group[key] for key in ("params", "fused", "foreach") if key in group} for group in here]
        restored = [_tuples(group) | own for group, own in zip(groups, kernels, strict=True)]
        optimizer.load_state_dict({"state": entries, "param_groups": restored})


class _Parts:
    """Named tensors in one file, or cut by rows over several."""

    def __init__(self, path: Path, kind: str, only: int | None = None) -> None:
        files = _files(path, kind)
        self._opened = [safe_open(file, "pt") for file in (files if only is None else files[only : only + 1])]
        self._where: dict[str, list[Any]] = {}
        for file in self._opened:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                self._where.setdefault(name, []).append(file)

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [file.get_slice(name).get_shape() for file in self._where[name]]
        rows = [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []
        return tuple(rows)

    def whole(self, name: str) -> Tensor:
        tensors: list[Tensor] = [file.get_tensor(name) for file in self._where[name]]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def read(self) -> dict[str, Tensor]:
        return {name: self.whole(name) for name in self._where}

    def own(self, name: str, like: Tensor) -> Tensor:
        """Read all of a tensor, or the rows of it that this rank has of ``like``.

        Raises:
            UserError: another shape.

        """
        shape = self.shape(name)
        if shape != tuple(like.shape):
            raise UserError(
                f"the checkpoint does not fit this model: {name} is {_by(shape)} there and {_by(like.shape)} here"
            )
        if not is_cut(like):
            return self.whole(name)
        first, count = own_rows(like)
        wanted: list[Tensor] = []
        for file in self._where[name]:
            part = file.get_slice(name)
            length = part.get_shape()[0]
            start, stop = max(0, first), min(length, first + count)
            if start < stop:
                wanted.append(part[start:stop])
            first -= length
        return torch.cat(wanted) if wanted else self._where[name][0].get_tensor(name)[:0]

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """Return a tensor with the parameter's layout, device and rows, in its own type."""
        source = self.own(name, parameter)
        tensor = torch.empty_like(parameter, dtype=source.dtype, requires_grad=False)
        own_part(tensor).copy_(source)
        return tensor

    def fill(self, target: Tensor, name: str, widen: bool = False) -> None:
        """Overwrite ``target``, or the rows of it that this rank has.

        Args:
            target: of the model or the optimizer.
            name: of the saved tensor.
            widen: take 16-bit numbers for an fp32 target, which holds them exactly.

        Raises:
            UserError: another shape or type.

        """
        source, own = self.own(name, target), own_part(target)
        widened = widen and source.is_floating_point() and source.dtype.itemsize == 2
        if source.dtype != own.dtype and not widened:
            raise UserError(f"the checkpoint does not fit: {name} is {source.dtype} there and {own.dtype} here")
        own.copy_(source)


def load(folder: Path, step: int | None = None) -> Saved:
    """Open the checkpoint of ``step`` (None: the newest) below ``folder``, verified.

    Raises:
        UserError: see ``checkpoint.find``.

    """
    return Saved(find(folder, step))


def _files(path: Path, kind: str) -> list[Path]:
    return sorted([*path.glob(f"{kind}.safetensors"), *path.glob(f"{kind}-*-of-*.safetensors")])


def _tuples(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if key == "betas" else value for key, value in group.items()}


def _by(shape: Any) -> str:
    return " × ".join(map(str, shape)) or "a number"
