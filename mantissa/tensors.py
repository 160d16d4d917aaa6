"""What is asked of tensors: which ones a nested value holds, whether they are finite; random generators and queues."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mantissa.display import counted
from mantissa.errors import UsageError, check_type


def tensors(nested: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(nested, Tensor):
        return [nested]
    items = nested.values() if isinstance(nested, dict) else nested if isinstance(nested, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


def numbers_in(nested: Any) -> list[Tensor]:
    """Return the tensors of a floating-point dtype in nested tuples, lists and dicts."""
    return [tensor for tensor in tensors(nested) if tensor.is_floating_point()]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy; the tensor itself where it is not sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def storage(tensor: Tensor) -> int:
    """Return what a tensor shares with its views; of one that is not strided, its own id."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def changed_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return what an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unregistered(model: nn.Module, optimizer: torch.optim.Optimizer, reached: Callable[[Tensor], bool]) -> str:
    """Return what is said, with the cure, of weights in lists and dicts of a model that are no parameters of it.

    Args:
        model: whose modules are looked at.
        optimizer: that may have them, which is no mistake.
        reached: whether a weight gets a gradient.
    """
    known = set(map(id, [*model.parameters(), *changed_by(optimizer)]))
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, list | dict)]
    leaves = tree_leaves(kept)
    layers = nn.ModuleList(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, nn.Module)))
    weights = [*layers.parameters(), *(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))]
    count = len({id(weight) for weight in weights if reached(weight)} - known)
    if not count:
        return ""
    none = f"In a list or dict of the model, but no parameters of it: {counted(count, 'weight')} with a gradient"
    cure = "hold layers in nn.ModuleList or nn.ModuleDict, weights in nn.ParameterList"
    return f"{none}, and nothing trains them; {cure}, or call requires_grad_(False)"


def check_model(model: nn.Module) -> None:
    """Refuse, by a ``UsageError``, what is no module whose weights are there."""
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    check_type("model", model, bool(weights), "a module with parameters")
    if any(map(is_lazy, weights)):
        raise UsageError("the model has lazy modules, whose weights are not there yet; call it once with a batch first")
    if any(weight.is_meta for weight in weights):
        raise UsageError("the model has weights on the device meta, which have no values; load or initialise them")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UsageError("the model has TorchScript, which takes no hooks; give the modules that it was made of")


def innermost(optimizer: Any) -> Any:
    """Return the optimizer of torch that an optimizer wraps, as accelerate's, Lightning's and SAM's do; else itself."""
    held = {id(each): each for each in getattr(optimizer, "__dict__", {}).values() if each is not optimizer}
    inner = [each for each in held.values() if isinstance(each, torch.optim.Optimizer)]
    named = getattr(optimizer, "optimizer", None)
    if not isinstance(named, torch.optim.Optimizer):
        named = inner[0] if len(inner) == 1 else None
    if named is None:
        return optimizer
    # One that also has weights of its own, or all of those that its part shares out, is no wrapper.
    own = set(map(id, changed_by(optimizer))) if isinstance(optimizer, torch.optim.Optimizer) else set()
    return innermost(named) if own <= set(map(id, changed_by(named))) else optimizer


def measurable(gradient: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether there is a dense gradient of real numbers."""
    return gradient is not None and gradient.is_floating_point() and gradient.layout == torch.strided


def values(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor; of a sparse one those that it has, each once."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def wide_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the dtype in which norms of tensors are computed: fp32, or fp64 where one has it."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def moments(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return what an optimizer's state of a parameter holds for each of its elements, by key."""
    numbers = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {key: value for key, value in numbers.items() if key != "step" and value.shape == parameter.shape}


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floating-point numbers in a dtype, complex ones with parts of it, but of no fewer bits than fp32."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex()) if dtype.itemsize >= 4 else tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite."""
    tensor = values(tensor)
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.numel() == 1:
        return math.isfinite(tensor.item())
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # of 8 bits torch has no minimum
    low, high = torch.aminmax(tensor.detach())  # many times faster than isfinite on a CPU
    return math.isfinite(low.item()) and math.isfinite(high.item())


def perturbed(tensor: Tensor, unit: float, generator: torch.Generator, data: bool = False) -> Tensor:
    """Return a tensor with each floating-point number made larger or smaller by ``unit``, relative to its size.

    Of ``data``, whole numbers stay, which may be indices, and so do numbers that are all from 0 to 1 in that range. So
    does what this would leave no trace of, as of 2000 ± 1: a step that learns from it does not round it.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout != torch.strided:
        return tensor
    # Each number becomes larger or smaller, at random.
    sign = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    changed = tensor * (1 + unit * sign)
    if not data:
        return changed
    # Of data, what the change would destroy stays: whole numbers, and small differences between large numbers.
    over = 0 if tensor.shape[:1] >= (8,) else None  # the samples, if they are enough
    varies, size = (torch.linalg.vector_norm(part, dim=over) for part in (tensor - tensor.mean(over), tensor))
    changed = torch.where((tensor == tensor.round()) | (unit * size > varies / 2), tensor, changed)
    return changed.clamp(max=1.0) if bool(((tensor >= 0) & (tensor <= 1)).all()) else changed


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of the difference over that of ``expected``, of the elements where that is finite.

    Infinite, if ``actual`` is not finite there; NaN, if ``expected`` is 0.
    """
    actual, expected = (in_dtype(tensor.detach(), torch.float64) for tensor in (actual, expected))
    if expected.is_sparse:
        actual, expected = actual.to_dense(), expected.to_dense()
    if not (known := expected.isfinite()).all():
        actual, expected = actual[known], expected[known]
    size = torch.linalg.vector_norm(expected).item()
    error = torch.linalg.vector_norm(actual - expected).item()
    if not size:
        return math.nan
    return error / size if math.isfinite(error) else math.inf


class NotedState:
    """The state of every generator: torch's on the CPU and the device, numpy's, Python's.

    To note it takes less long than to make tensors of it, which a call does.

    Args:
        device: whose generator is noted, too.
        others: what ``unchanged`` returned, where numpy's and Python's need not be asked, which takes longest.
    """

    def __init__(self, device: torch.device, others: Any = None) -> None:
        self._others = others or self._asked()
        self._state = {"torch": torch.get_rng_state()}
        if device.type != "cpu":
            self._state[device.type] = torch.get_device_module(device).get_rng_state(device)

    @staticmethod
    def _asked() -> Any:
        _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return np.asarray(keys).tobytes(), [position, has_gauss, cached], random.getstate()

    def unchanged(self) -> Any:
        """Return the state of numpy's and Python's generators if it is still what was noted, else None."""
        return self._others if self._others == self._asked() else None

    def __call__(self) -> dict[str, Tensor]:
        keys, rest, (_, words, gauss) = self._others
        return self._state | {
            "numpy": torch.from_numpy(np.frombuffer(keys, dtype=np.uint32).astype(np.int64)),
            "numpy_rest": torch.tensor(rest, dtype=torch.float64),
            "python": torch.tensor(words, dtype=torch.int64),
            "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        }


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of every generator a run may use."""
    return NotedState(device)()


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, cached = state["numpy_rest"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
