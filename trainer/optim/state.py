"""The state of the training by name, as a checkpoint holds it: weights, optimizer state and generators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mantissa.tensors import changed_by, local
from trainer.optim.ema import Average
from trainer.optim.masters import MasterWeights

MASTER = "master_weight"
"""The key, among a parameter's entries in the optimizer's file, of its fp32 copy."""
AVERAGE = "average"
"""The key of its average, see ``trainer.optim.ema``."""


def training_state(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    masters: MasterWeights | None,
    loss_scale: dict[str, Any],
    rng: dict[str, Tensor],
    average: Average | None = None,
) -> dict[str, Any]:
    """Return what a checkpoint holds of the training. The tensors are the live ones, not copies.

    Args:
        step: optimizer steps done.
        model: its state dict, under ``model``.
        optimizer: its tensors under ``optimizer``, by ``<parameter>.<key>``; the rest, as JSON types, under
            ``optimizer_options``.
        masters: what the optimizer changes in the place of the model's weights; with the optimizer's tensors.
        loss_scale: its state dict.
        rng: the states of this rank's generators, see ``mantissa.tensors.random_state``.
        average: of the weights; with the optimizer's tensors.
    """
    tensors, options = optimizer_state(masters or model, optimizer)
    tensors |= weight_copies(masters, average)
    state = {"step": step, "model": model.state_dict(), "optimizer": tensors, "optimizer_options": options}
    return state | {"loss_scale": loss_scale, "rng": rng}


def weight_copies(masters: MasterWeights | None, average: Average | None) -> dict[str, Tensor]:
    """Return the masters and the averages by their names in the optimizer's file."""
    copies = {f"{name}.{MASTER}": master.detach() for name, master in (masters.persistent_weights() if masters else ())}
    return copies | {
        f"{name}.{AVERAGE}": each for name, each in (average.persistent_weights().items() if average else ())
    }


def untie(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a state dict into tensors that share no memory, and the aliases of those that do."""
    unique: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    owner: dict[tuple[Any, ...], str] = {}
    for name, whole in state.items():
        tensor = local(whole)
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in owner:
            ties[name] = owner[key]
        else:
            owner[key] = name
            unique[name] = whole.detach()
    return unique, ties


def optimizer_state(
    model: nn.Module | MasterWeights, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state: the live tensors, named ``parameter.key``, and the rest as JSON types."""
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
    groups = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in state["param_groups"]
    ]
    # To distinguish a parameter whose state was lost from one that never had any.
    stateless = [name for index, name in enumerate(names) if not state["state"].get(index)]
    return tensors, {"names": names, "groups": groups, "scalars": scalars, "stateless": stateless}


@torch.no_grad()
def create_state(
    optimizer: torch.optim.Optimizer, masters: MasterWeights | None, names: list[str], stateless: list[str]
) -> None:
    """Let an optimizer create the state that it has after a step, by a step of nothing: no weight changes.

    Args:
        optimizer: whose state is replaced.
        masters: what it changes in the place of the model's weights.
        names: of its parameters.
        stateless: the names of those that get no state.
    """
    parameters = changed_by(optimizer)
    for name, parameter in zip(names, parameters, strict=True):
        if name in stateless:  # others keep theirs: Adagrad of torch 2.11 creates it in its constructor only
            optimizer.state.pop(parameter, None)
        parameter.grad = None if name in stateless else torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if masters is not None:
        masters.take_gradients()
    optimizer.step()
    if masters is not None:
        masters.write_back(0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None


def parameter_names(model: nn.Module | MasterWeights, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in changed_by(optimizer)]
