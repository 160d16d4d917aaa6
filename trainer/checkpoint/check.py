"""Checks that a checkpoint fits the run that is resumed. All of them are made before anything is loaded.

The optimizer's options, for example, come from the config; a checkpoint with other options is from another run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.generators import random_state, set_random_state
from trainer.checkpoint.schema import (
    STATE_FILE,
    InvalidCheckpoint,
    State,
    is_count,
    is_finite,
    is_number,
    require,
    require_keys,
)
from trainer.formats import dimensions
from trainer.parallel.wrap import local_part
from trainer.precision.scaler import DynamicLossScale, LossScale

OPTIMIZER_FILE, RNG_FILE = "optimizer.safetensors", "rng.safetensors"
_KERNELS = ("fused", "foreach")
"""Options that select kernels. They depend on the device, so the checkpoint may have other values."""
_FP32_COUNTS = 2**24
"""An fp32 counter that grows by one stays at this value."""


def check_options(state: State, optimizer: torch.optim.Optimizer) -> None:
    """Compare the options of the optimizer's groups with those that the config gave it.

    Raises:
        InvalidCheckpoint: an option differs, or a count is none; the message has the first one.
    """
    counts = expected_counts(optimizer)
    for there, group, counted in zip(state.groups, optimizer.param_groups, counts, strict=True):
        here = {key: value for key, value in group.items() if key != "params"}
        for key, value in there.items():
            if key in counted:
                require(is_finite(value), f"the optimizer's {key} is {value!r:.80}, which is not a number")
                continue
            if key not in here:
                raise InvalidCheckpoint(f"{STATE_FILE}: {key!r:.80} is not an option of {type(optimizer).__name__}")
            if key == "lr":  # the schedule's at every step
                good = is_finite(value) and value >= 0
            elif key in _KERNELS:
                good = value is None or isinstance(value, bool)
            else:
                good = _same(value, here[key])
            require(good, f"the optimizer's {key} was {value!r:.80}, now {here[key]!r:.80}")


def expected_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return, for each parameter, what its state looks like after a step: tensors without data, or other values.

    Each kind of parameter is tested on a small copy, so this works for every optimizer.
    """
    tried: dict[tuple[Any, ...], dict[str, Any]] = {}
    expected = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            key = (number, parameter.dtype, parameter.device, parameter.ndim)
            if key not in tried:
                tried[key] = _try_twin(optimizer, group, parameter)[0]
            twin = tried[key]
            expected.append({name: _stretched(value, tuple(parameter.shape)) for name, value in twin.items()})
    return expected


def expected_counts(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return, for each group, what a step changes in the group itself, such as LAMB's ``step``, with example values."""
    return [_try_twin(optimizer, group, group["params"][0])[1] for group in optimizer.param_groups]


def check_progress(
    progress: Mapping[str, Any],
    step: int,
    score: float | None,
    monitor: Mapping[str, Any],
    loss_scale: LossScale,
    lowest: bool = True,
) -> None:
    """Check the rest of the state that a run resumes with.

    Args:
        progress: from the checkpoint.
        step: the checkpoint's.
        score: of its weights (the lowest is the best); None if they were not evaluated.
        monitor: the state of this run's monitor, for its keys.
        loss_scale: this run's.
        lowest: whether the run's best score is the lowest; else the highest, and ``score`` is negated.

    Raises:
        InvalidCheckpoint: a value is not possible; the message has the first one.
    """
    require_keys(progress, {"best", "final", "loss_scale", "monitor", "data"}, f"{STATE_FILE}: progress", {"stopping"})
    best, final = progress["best"], progress["final"]
    if best is not None or score is not None:
        require_keys(best, {"step", "value"}, f"{STATE_FILE}: best")
        good = is_count(best["step"]) and 1 <= best["step"] <= step and is_finite(best["value"])
        good = good and (score is None or (best["value"] if lowest else -best["value"]) <= score)
        require(good, "best is not a valid step and score of this run")
    if "stopping" in progress:
        stopping = progress["stopping"]
        require_keys(stopping, {"metric", "reference", "waited"}, f"{STATE_FILE}: stopping")
        good = isinstance(stopping["metric"], str)
        good = good and (stopping["reference"] is None or is_finite(stopping["reference"]))
        require(good and is_count(stopping["waited"]), "stopping is not a valid state of early stopping")
        require(stopping["waited"] <= step, "stopping has waited longer than this run")
    good = isinstance(final, dict) and all(name.startswith("valid/") for name in final)
    require(good and all(map(is_number, final.values())), "final has values that are not validation metrics")
    require(isinstance(progress["data"], str), "data is not a fingerprint")
    _check_monitor(progress["monitor"], step, monitor, loss_scale.recovers)
    _check_loss_scale(progress["loss_scale"], step, loss_scale)


def check_counters(counters: list[Tensor], steps: int) -> None:
    """Compare the optimizer's step counters with the number of steps that changed weights.

    Raises:
        InvalidCheckpoint: one is not a count, or none is correct (parameters without gradients have lower counts).
    """
    values = [float(counter) if counter.numel() == 1 else -1 for counter in counters]
    limit = min(steps, _FP32_COUNTS)
    good = all(value in range(limit + 1) for value in values) and (not values or max(values) == limit)
    require(good, f"the optimizer's step counters do not match a run of {steps} updates", OPTIMIZER_FILE)


def check_generators(state: dict[str, Tensor], device: torch.device) -> None:
    """Test the states of a rank's generators, and restore the present ones.

    Raises:
        InvalidCheckpoint: one of them is missing, unknown, or not a valid state of its generator.
    """
    like = random_state(device)
    devices = {"cuda", "mps"}
    for name in sorted((like.keys() - devices) ^ (state.keys() - devices)):
        require(False, f"{name!r:.80} is {'missing' if name in like else 'unknown'}", RNG_FILE)
    for name, tensor in sorted(state.items()):
        found, wanted = _kind(tensor), _kind(like.get(name, tensor))
        optional = name == "python_gauss" and found in (_kind(torch.zeros(count).double()) for count in (0, 1))
        require(found == wanted or optional, f"{name} was {found}, now {wanted}", RNG_FILE)
        values = tensor.double()
        good = bool((values >= 0).all() and (values < 2**32).all()) if "gauss" not in name else True
        require(good or name == "numpy_rest", f"{name} is not a valid state of its generator", RNG_FILE)
    position, has_gauss, _ = state["numpy_rest"].tolist()
    finite = all(bool(torch.isfinite(state[name]).all()) for name in ("numpy_rest", "python_gauss"))
    good = finite and position in range(625) and has_gauss in (0, 1)
    require(good, "numpy_rest is not a valid state of its generator", RNG_FILE)
    try:
        set_random_state(state, device)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InvalidCheckpoint(f"{RNG_FILE}: not a valid generator state ({str(error).splitlines()[0]:.80})") from None
    finally:
        set_random_state(like, device)


def _try_twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a step of an optimizer like this one, over a parameter of the same type, 2 × 3 × 4 ….

    Returns:
        The parameter's state after it, and the entries of its group that were changed or are new.
    """
    shape = range(2, 2 + parameter.ndim)
    twin = nn.Parameter(torch.zeros(tuple(shape), dtype=parameter.dtype, device=local_part(parameter).device))
    twin.grad = torch.zeros_like(twin)
    maker: Any = type(optimizer)
    # Its counts begin anew: at their present values a step need not change them.
    typed = inspect.signature(maker).parameters
    options = {key: value for key, value in group.items() if key in typed or type(value) not in (int, float)}
    options = copy.deepcopy({key: value for key, value in options.items() if key != "params"})
    other: torch.optim.Optimizer = maker([{**options, "params": [twin]}])
    before = copy.deepcopy({key: value for key, value in other.param_groups[0].items() if key != "params"})
    other.step()
    after = {key: value for key, value in other.param_groups[0].items() if key != "params"}
    return dict(other.state[twin]), {k: value for k, value in after.items() if k not in before or value != before[k]}


def _stretched(value: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor of the twin's state in the sizes of a parameter of ``shape``, on the meta device."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    twin = tuple(range(2, 2 + len(shape)))
    assert value.ndim == len(shape)
    assert all(size in (1, wide) for size, wide in zip(value.shape, twin, strict=True))
    stretched = [1 if size == 1 else length for size, length in zip(value.shape, shape, strict=True)]
    return torch.empty(stretched, dtype=value.dtype, device="meta")


def _check_monitor(state: Any, step: int, like: Mapping[str, Any], recovers: bool) -> None:
    require_keys(state, set(like), f"{STATE_FILE}: monitor")
    skipped, in_a_row, losses, last = (state[key] for key in ("skipped_steps", "skipped_in_a_row", "losses", "last"))
    require(is_count(skipped) and skipped <= (step if recovers else 0), "skipped_steps is not valid for this run")
    require(is_count(in_a_row) and in_a_row <= skipped, "skipped_in_a_row is not valid for this run")
    good = isinstance(losses, list) and len(losses) <= step and all(map(is_number, losses))
    require(good, "losses are not valid numbers for this run")
    names = {"lr", "grad_norm", "loss_scale"}
    good = isinstance(last, dict) and last.keys() <= names and all(map(is_number, last.values()))
    require(good, "last has values that are not metrics")


def _check_loss_scale(state: Any, step: int, like: LossScale) -> None:
    here = like.state_dict()
    require_keys(state, set(here), f"{STATE_FILE}: loss_scale")
    scale = state["scale"]
    require(is_finite(scale) and 0 < scale <= torch.finfo(torch.float32).max, f"the loss scale is {scale!r:.80}")
    if not isinstance(like, DynamicLossScale):
        require(state == here, f"the loss scale was {scale:g}, now {here['scale']:g}")
        return
    good_steps, config = state["good_steps"], like.config
    require(scale >= torch.tensor(config.floor).item(), f"the loss scale {scale:g} is below its floor")
    good = is_count(good_steps) and good_steps < config.interval and good_steps <= step
    require(good, "good_steps is not valid for this run")


def _same(there: Any, here: Any) -> bool:
    """Compare what was read from JSON with a live value: lists are tuples there, and True is not 1."""
    if isinstance(here, tuple | list):
        return isinstance(there, list) and len(there) == len(here) and all(map(_same, there, here))
    return isinstance(there, bool) == isinstance(here, bool) and bool(there == here)


def _kind(tensor: Tensor) -> str:
    return f"{dimensions(tensor.shape)} of {tensor.dtype}"
