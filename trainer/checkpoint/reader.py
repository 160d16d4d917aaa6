"""Load a checkpoint, written by any number of ranks, into a model, an optimizer and the generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer.checkpoint.check import (
    check_counters,
    check_generators,
    check_options,
    check_progress,
    expected_counts,
    expected_state,
)
from trainer.checkpoint.schema import InvalidCheckpoint, Manifest, State, read_manifest, read_state
from trainer.checkpoint.state import AVERAGE, MASTER, parameter_names, untie, weight_copies
from trainer.checkpoint.store import find_verified
from trainer.errors import UserError
from trainer.formats import dimensions
from trainer.kernels.ema import Average, schedule_free_average
from trainer.optim.masters import MasterWeights
from trainer.parallel.wrap import is_sharded, local_part, local_rows
from trainer.precision.scaler import LossScale


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
        with self._named():
            weights = model.state_dict()
            self._check_weights(weights, _statistics(model))
            copies = weight_copies(masters, average)
            expected = None if optimizer is None else self._check_optimizer(masters or model, optimizer, copies)
            for name, tensor in copies.items():
                self._moments.check(name, tuple(tensor.shape), tensor.dtype)
            for name, tensor in weights.items():
                self._weights.fill(tensor, self._state.ties.get(name, name))
            for name, tensor in copies.items():
                self._moments.fill(tensor, name)
            if optimizer is not None:
                assert expected is not None
                self._restore_optimizer(optimizer, expected)

    def check_progress(
        self,
        monitor: Mapping[str, Any],
        loss_scale: LossScale,
        optimizer: torch.optim.Optimizer,
        lowest: bool = True,
    ) -> None:
        """Check ``progress``, and the optimizer's counts of steps.

        Args:
            monitor: the state of this run's monitor.
            loss_scale: this run's.
            optimizer: this run's.
            lowest: whether the run's best score is the lowest; else the highest.

        Raises:
            UserError: a value that cannot be of this run.
        """
        with self._named():
            check_progress(self.progress, self.step, self._manifest.score, monitor, loss_scale, lowest)
            names = [name for name in self._moments.names if not name.endswith((f".{MASTER}", f".{AVERAGE}"))]
            updates = self.step - self.progress["monitor"]["skipped_steps"]
            if updates and not names and any(expected_state(optimizer)):
                raise InvalidCheckpoint(f"{self._moments.file}: it lacks the optimizer's state")
            check_counters([self._moments.whole(name) for name in names if name.endswith(".step")], updates)

    def rng(self, rank: int, device: torch.device | None = None) -> dict[str, Tensor] | None:
        """Return the states of a rank's generators, checked where a ``device`` is given; None: no such rank.

        Raises:
            UserError: one is not a valid state of its generator.
        """
        files = self._manifest.files("rng")
        if rank >= len(files):
            return None
        with self._named():
            state = _TensorFiles(self.path, files[rank : rank + 1]).read()
            if device is not None:
                check_generators(state, device)
        return state

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

    def _check_weights(self, weights: dict[str, Tensor], statistics: dict[str, torch.dtype]) -> None:
        ties, file = self._state.ties, self._weights.file
        saved = {*self._weights.names, *ties}
        if weights.keys() != saved:
            missing, unknown = sorted(weights.keys() - saved), sorted(saved - weights.keys())
            parts = [f"it lacks {missing[0]}"] if missing else []
            parts += [f"this model has no {unknown[0]}"] if unknown else []
            raise InvalidCheckpoint(f"{file}: {' and '.join(parts)}")
        here = untie(weights)[1]
        for alias, target in sorted(ties.items() ^ here.items()):
            if local_part(weights[alias]).numel():  # a rank without rows of a weight cannot know
                where = "in the checkpoint" if alias in ties else "in this model"
                raise InvalidCheckpoint(f"{file}: {alias} and {target} share their memory only {where}")
        for name, tensor in weights.items():
            self._weights.check(ties.get(name, name), tuple(tensor.shape), tensor.dtype, statistics.get(name))

    def _check_optimizer(
        self, model: nn.Module | MasterWeights, optimizer: torch.optim.Optimizer, copies: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """Return each parameter that has state, and what its state looks like, by name."""
        names, state, file = parameter_names(model, optimizer), self._state, self._moments.file
        if names != state.names or len(state.groups) != len(optimizer.param_groups):
            raise InvalidCheckpoint(f"{file}: this optimizer has other groups of parameters")
        check_options(state, optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        wanted = {name: (tuple(each.shape), each.dtype) for name, each in copies.items()}
        present = {name.rpartition(".")[0] for name in self._moments.names if name not in wanted} | state.scalars.keys()
        if state.stateless is not None:
            present |= set(names) - set(state.stateless)
        expected = {}
        for name, parameter, values in zip(names, parameters, expected_state(optimizer), strict=True):
            if name not in present:
                continue
            expected[name] = (parameter, values)
            scalars = state.scalars.get(name, {})
            for key, value in values.items():
                if isinstance(value, Tensor):
                    shape = tuple(value.shape)
                    wanted[f"{name}.{key}"] = (shape, value.dtype)
                elif type(scalars.get(key)) is not type(value):
                    raise InvalidCheckpoint(f"{file}: {key} of {name} is not of type {type(value).__name__}")
            if unknown := sorted(key for key in scalars if key not in values or isinstance(values[key], Tensor)):
                raise InvalidCheckpoint(f"{file}: {name} has an unknown {unknown[0]!r:.80}")
        for name in sorted(wanted.keys() ^ set(self._moments.names)):
            problem = f"it lacks {name}" if name in wanted else f"this optimizer has no {name!r:.80}"
            raise InvalidCheckpoint(f"{file}: {problem}")
        for name, (shape, dtype) in wanted.items():
            self._moments.check(name, shape, dtype)
        return expected

    def _restore_optimizer(
        self, optimizer: torch.optim.Optimizer, expected: dict[str, tuple[Tensor, dict[str, Any]]]
    ) -> None:
        counts = expected_counts(optimizer)
        for there, group, counted in zip(self._state.groups, optimizer.param_groups, counts, strict=True):
            for key in there.keys() & counted.keys():
                like = counted[key]
                number = like.new_tensor(there[key]) if isinstance(like, Tensor) else type(like)(there[key])
                group[key] = number
        optimizer.state.clear()
        for name, (parameter, values) in expected.items():
            entry = optimizer.state[parameter]
            for key, like in values.items():
                full_name = f"{name}.{key}"
                if not isinstance(like, Tensor):
                    entry[key] = self._state.scalars[name][key]
                # A moment has its parameter's layout (fused kernels rely on it) and rows; a count of
                # steps has no dimensions, nor have some parameters, and it may have to stay on the CPU.
                elif like.is_meta and like.shape == parameter.shape:
                    entry[key] = self._moments.like(full_name, parameter)
                else:
                    device = local_part(parameter).device if like.is_meta else like.device
                    entry[key] = self._moments.whole(full_name).to(device)


class _TensorFiles:
    """Named tensors in one file, or sharded by rows over several."""

    def __init__(self, path: Path, files: list[str]) -> None:
        self.file = files[0] if len(files) == 1 else f"{files[0]} to {files[-1]}"
        self._opened = [safe_open(path / file, "pt") for file in files]
        self._where: dict[str, list[Any]] = {}
        for file in self._opened:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                self._where.setdefault(name, []).append(file)
        for name in self.names:
            shapes = [file.get_slice(name).get_shape() for file in self._where[name]]
            types = {self._dtype(name, file) for file in self._where[name]}
            if len(shapes) > 1 and (len({tuple(s[1:]) for s in shapes}) > 1 or not all(shapes) or len(types) > 1):
                raise InvalidCheckpoint(f"{self.file}: the parts of {name} do not fit together")

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [file.get_slice(name).get_shape() for file in self._where[name]]
        rows = [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []
        return tuple(rows)

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, earlier: torch.dtype | None = None) -> None:
        """Refuse a tensor of another shape or type; ``earlier`` is a narrower type that is allowed, too."""
        if name not in self._where:
            raise InvalidCheckpoint(f"{self.file}: it lacks {name}")
        if self.shape(name) != shape:
            before, now = dimensions(self.shape(name)), dimensions(shape)
            raise InvalidCheckpoint(f"{self.file}: {name} was {before}, now {now}")
        if (found := self._dtype(name, self._where[name][0])) not in (dtype, earlier):
            raise InvalidCheckpoint(f"{self.file}: {name} was {found}, now {dtype}")

    def whole(self, name: str) -> Tensor:
        return self._number(name, self._stored(name))

    def read(self) -> dict[str, Tensor]:
        """Return every tensor as it is stored, NaN and all."""
        return {name: self._stored(name) for name in self._where}

    def _stored(self, name: str) -> Tensor:
        tensors: list[Tensor] = [file.get_tensor(name) for file in self._where[name]]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

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
        return self._number(name, torch.cat(wanted) if wanted else self._where[name][0].get_tensor(name)[:0])

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """Return a tensor with the parameter's layout, device and rows, in its own type."""
        source = self.own(name, parameter)
        tensor = torch.empty_like(parameter, dtype=source.dtype, requires_grad=False)
        local_part(tensor).copy_(source)
        return tensor

    def fill(self, target: Tensor, name: str) -> None:
        """Overwrite ``target``, or the rows of it that this rank has; infinities must be in both."""
        source, held = self.own(name, target), local_part(target)
        # Such weights are not saved. A mask of -inf is a buffer that was built with infinities.
        if source.is_floating_point() and bool((source.isinf() & held.isfinite().to(source.device)).any()):
            raise InvalidCheckpoint(f"{self.file}: {name} is not finite")
        held.copy_(source)

    def _number(self, name: str, tensor: Tensor) -> Tensor:
        """Refuse NaN, which would spread at the next step."""
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise InvalidCheckpoint(f"{self.file}: {name} is not a number")
        return tensor

    def _dtype(self, name: str, file: Any) -> torch.dtype:
        part = file.get_slice(name)
        dtype: torch.dtype = (part[:0] if part.get_shape() else file.get_tensor(name)).dtype
        return dtype


def load(folder: Path, step: int | None = None) -> CheckpointReader:
    """Open the checkpoint of ``step`` (None: the newest) below ``folder``, verified.

    Raises:
        UserError: see ``find_verified``.
    """
    return CheckpointReader(find_verified(folder, step))


def _statistics(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the fp32 buffers of a model with 16-bit weights, which were 16-bit in checkpoints of earlier versions."""
    narrow = {parameter.dtype for parameter in model.parameters() if parameter.dtype.itemsize == 2}
    names = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32]
    return dict.fromkeys(names, narrow.pop()) if len(narrow) == 1 else {}
