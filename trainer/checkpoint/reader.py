"""Load a checkpoint, written by any number of ranks, into a model and an optimizer."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mantissa.display import dimensions
from trainer.checkpoint.schema import STATE_FILE, InvalidCheckpoint, Manifest, State, read_manifest, read_state
from trainer.checkpoint.store import find_verified
from trainer.errors import UserError
from trainer.optim.ema import Average, schedule_free_average
from trainer.optim.masters import MasterWeights
from trainer.optim.state import AVERAGE, MASTER, parameter_names, untie, weight_copies
from trainer.parallel.wrap import is_sharded, local_part, local_rows

_OF_THIS_DEVICE = ("lr", "fused", "foreach")
"""Options that may differ from the checkpoint's: the schedule's at every step, and those that select kernels."""


class CheckpointReader:
    """An open checkpoint. Tensors are read when they are needed, and of sharded ones only the rows of this rank.

    A mismatch raises a UserError that names the file, before anything is loaded.
    """

    def __init__(self, path: Path) -> None:
        """Open the checkpoint at ``path``, which ``find_verified`` has verified."""
        self.path = path
        with self._named():
            self._manifest: Manifest = read_manifest(path)
            self._state: State = read_state(path)
        self._weights = _TensorFiles(path, self._manifest.files("model"))
        self._moments = _TensorFiles(path, self._manifest.files("optimizer"))
        self.step: int = self._state.step
        self.progress: dict[str, Any] = self._state.progress

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        masters: MasterWeights | None = None,
        average: Average | None = None,
    ) -> None:
        """Load the weights, the optimizer's state, the fp32 masters and averages, where there are any, in place.

        The optimizer keeps its options, which are the config's.

        Raises:
            UserError: the checkpoint is not of this model and this optimizer.
        """
        weights, copies = model.state_dict(), weight_copies(masters, average)
        with self._named():
            self._check_weights(weights)
            if optimizer is not None:
                self._check_options(optimizer, parameter_names(masters or model, optimizer))
                expected = self._check_moments(optimizer, copies)
        for name, tensor in weights.items():
            self._weights.fill(tensor, self._state.ties.get(name, name))
        for name, tensor in copies.items():
            self._moments.fill(tensor, name)
        if optimizer is not None:
            self._restore_optimizer(optimizer, expected)

    def rng(self, rank: int) -> dict[str, Tensor] | None:
        """Return the states of a rank's generators; None: no such rank."""
        files = self._manifest.files("rng")
        return _TensorFiles(self.path, files[rank : rank + 1]).read() if rank < len(files) else None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, whole: ``weights/…``, ``optimizer/…`` and each rank's ``rng/0/…``."""
        result = {f"weights/{name}": tensor for name, tensor in self._weights.read().items()}
        result |= {f"optimizer/{name}": tensor for name, tensor in self._moments.read().items()}
        for rank in range(len(self._manifest.files("rng"))):
            result |= {f"rng/{rank}/{name}": tensor for name, tensor in (self.rng(rank) or {}).items()}
        return result

    def evaluated(self, schedule_free: bool) -> dict[str, Tensor]:
        """Return the weights as they were evaluated, and as an export has them: averaged where there is an average.

        Args:
            schedule_free: whether the optimizer averaged them, so that they follow from its state.
        """
        weights, state = self._weights.read(), self._moments.read()
        weights = {name: state.get(f"{name}.{AVERAGE}", weight) for name, weight in weights.items()}
        if not schedule_free:
            return weights
        (beta,) = {group["betas"][0] for group in self._state.groups}
        masters = {name: state.get(f"{name}.{MASTER}", weight) for name, weight in weights.items()}
        return {
            name: schedule_free_average(masters[name], state[f"{name}.z"], beta) if f"{name}.z" in state else weight
            for name, weight in weights.items()
        }

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except InvalidCheckpoint as refused:
            raise UserError(f"the checkpoint {self.path} does not fit this run: {refused}") from None

    def _check_weights(self, weights: dict[str, Tensor]) -> None:
        ties, file = self._state.ties, self._weights.file
        _check_names(file, weights.keys(), {*self._weights.names, *ties}, "model")
        for alias, target in sorted(ties.items() ^ untie(weights)[1].items()):
            if local_part(weights[alias]).numel():  # a rank without rows of a weight cannot know
                where = "in the checkpoint" if alias in ties else "in this model"
                raise InvalidCheckpoint(f"{file}: {alias} and {target} share their memory only {where}")
        for name, tensor in weights.items():
            self._weights.check(ties.get(name, name), tensor)

    def _check_options(self, optimizer: torch.optim.Optimizer, names: list[str]) -> None:
        if names != self._state.names or len(self._state.groups) != len(optimizer.param_groups):
            raise InvalidCheckpoint(f"{self._moments.file}: this optimizer has other groups of parameters")
        for there, group in zip(self._state.groups, optimizer.param_groups, strict=True):
            for key in sorted(there.keys() & group.keys() & _options(optimizer) - {*_OF_THIS_DEVICE}):
                was, now = there[key], json.loads(json.dumps(group[key]))
                if was != now:
                    raise InvalidCheckpoint(f"{STATE_FILE}: the optimizer's {key} was {was!r:.80}, now {now!r:.80}")

    def _check_moments(self, optimizer: torch.optim.Optimizer, copies: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Return what the state of each parameter that has any looks like, by name."""
        expected = dict(zip(self._state.names, _state_after_step(optimizer), strict=True))
        expected = {name: values for name, values in expected.items() if name not in self._state.stateless}
        wanted = dict(copies)
        for name, values in expected.items():
            wanted |= {f"{name}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        _check_names(self._moments.file, wanted.keys(), self._moments.names, "optimizer")
        for name, tensor in wanted.items():
            self._moments.check(name, tensor)
        return expected

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer, expected: dict[str, dict[str, Any]]) -> None:
        for there, group in zip(self._state.groups, optimizer.param_groups, strict=True):
            like = _twin_after_step(type(optimizer), group, group["params"][0]).param_groups[0]
            for key in there.keys() - _options(optimizer):
                # What is no option is a count that the optimizer keeps there, such as LAMB's of steps, a tensor.
                counted = isinstance(like.get(key), Tensor)
                group[key] = like[key].new_tensor(there[key]) if counted else there[key]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.state.clear()
        for name, parameter in zip(self._state.names, parameters, strict=True):
            for key, like in expected.get(name, {}).items():
                optimizer.state[parameter][key] = self._state_entry(name, key, like, parameter)

    def _state_entry(self, name: str, key: str, like: Any, parameter: Tensor) -> Any:
        if not isinstance(like, Tensor):
            return self._state.scalars[name][key]
        # A moment has its parameter's layout (fused kernels rely on it) and rows; a count of steps has no dimensions,
        # nor have some parameters, and it may have to stay on the CPU.
        if like.is_meta and like.shape == parameter.shape:
            return self._moments.like(f"{name}.{key}", parameter)
        return self._moments.whole(f"{name}.{key}").to(local_part(parameter).device if like.is_meta else like.device)


class _TensorFiles:
    """Named tensors in one file, or sharded by rows over several."""

    def __init__(self, path: Path, files: list[str]) -> None:
        self.file = files[0] if len(files) == 1 else f"{files[0]} to {files[-1]}"
        self._where: dict[str, list[Any]] = {}
        for file in files:
            opened = safe_open(path / file, "pt")
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                self._where.setdefault(name, []).append(opened)

    @property
    def names(self) -> Collection[str]:
        return self._where.keys()

    def check(self, name: str, like: Tensor) -> None:
        """Refuse a tensor of another shape or type."""
        parts = [file.get_slice(name) for file in self._where[name]]
        shapes = [part.get_shape() for part in parts]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
        if shape != tuple(like.shape):
            raise InvalidCheckpoint(f"{self.file}: {name} was {dimensions(shape)}, now {dimensions(like.shape)}")
        dtype = (parts[0][:0] if shape else self.whole(name)).dtype
        if dtype != like.dtype:
            raise InvalidCheckpoint(f"{self.file}: {name} was {dtype}, now {like.dtype}")

    def whole(self, name: str) -> Tensor:
        tensors: list[Tensor] = [file.get_tensor(name) for file in self._where[name]]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def read(self) -> dict[str, Tensor]:
        """Return every tensor, whole."""
        return {name: self.whole(name) for name in self._where}

    def own(self, name: str, like: Tensor) -> Tensor:
        """Read all of a tensor, or the rows of it that this rank has of ``like``."""
        if not is_sharded(like):
            return self.whole(name)
        first, count = local_rows(like)
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
        local_part(tensor).copy_(source)
        return tensor

    def fill(self, target: Tensor, name: str) -> None:
        """Overwrite ``target``, or the rows of it that this rank has."""
        local_part(target).copy_(self.own(name, target))


def _state_after_step(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return, for each parameter, what its state looks like after a step: tensors without data, or other values.

    Each kind of parameter is tested on a small copy, so this works for every optimizer. A tensor without dimensions,
    such as a count of steps, is on the device where the optimizer keeps it.
    """
    tried: dict[tuple[Any, ...], dict[str, Any]] = {}
    expected = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            key = (number, parameter.dtype, parameter.device, parameter.ndim)
            if key not in tried:
                twin = _twin_after_step(type(optimizer), group, parameter)
                tried[key] = next(iter(twin.state.values()), {})  # plain SGD keeps nothing
            shape = tuple(parameter.shape)
            expected.append({name: _stretched(value, shape) for name, value in tried[key].items()})
    return expected


def _twin_after_step(cls: Any, group: dict[str, Any], parameter: Tensor) -> torch.optim.Optimizer:
    """Return such an optimizer over a parameter of the same type, 2 × 3 × 4 …, which has taken a step."""
    shape = tuple(range(2, 2 + parameter.ndim))
    twin = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=local_part(parameter).device))
    twin.grad = torch.zeros_like(twin)
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    other: torch.optim.Optimizer = cls([{**options, "params": [twin]}])
    other.step()
    return other


def _stretched(value: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor of the twin's state in the sizes of a parameter of ``shape``, on the meta device."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    sizes = [1 if size == 1 else length for size, length in zip(value.shape, shape, strict=True)]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


def load(folder: Path, step: int | None = None) -> CheckpointReader:
    """Open the checkpoint of ``step`` (None: the newest) below ``folder``, verified.

    Raises:
        UserError: see ``find_verified``.
    """
    return CheckpointReader(find_verified(folder, step))


def _options(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the arguments of the optimizer's class."""
    return set(inspect.signature(type(optimizer)).parameters)


def _check_names(file: str, wanted: Collection[str], found: Collection[str], what: str) -> None:
    missing, unknown = sorted({*wanted} - {*found}), sorted({*found} - {*wanted})
    if missing or unknown:
        parts = [f"it lacks {missing[0]}"] if missing else []
        parts += [f"this {what} has no {unknown[0]}"] if unknown else []
        raise InvalidCheckpoint(f"{file}: {' and '.join(parts)}")
