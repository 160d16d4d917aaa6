"""Weights by name, from the files of an export or a checkpoint into a new model."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from mantissa.display import dimensions
from trainer.checkpoint.state import untie
from trainer.errors import UserError


def fill(
    model: nn.Module, weights: dict[str, Tensor], where: str, remedy: str = "give the weights of this model"
) -> None:
    """Overwrite a model's weights by name, in its own dtypes. Of weights that share memory one name is enough.

    Raises:
        UserError: a name is missing or unknown, or a shape is another one; ``where`` begins the message, ``remedy``
            ends it.
    """
    state = model.state_dict()
    ties = untie(state)[1]
    groups: dict[str, list[str]] = {name: [name] for name in state if name not in ties}
    for alias, name in ties.items():
        groups[name].append(alias)
    missing = [name for name, names in groups.items() if not weights.keys() & set(names)]
    unknown = sorted(weights.keys() - state.keys())
    if missing or unknown:
        parts = [f"they lack {missing[0]}"] if missing else []
        parts += [f"this model has no {unknown[0]}"] if unknown else []
        raise UserError(f"{where}: the weights are of another model: {' and '.join(parts)}; {remedy}")
    found = {name: next(weights[each] for each in names if each in weights) for name, names in groups.items()}
    other = [name for name, tensor in found.items() if tensor.shape != state[name].shape]
    if other:
        there, here = (dimensions(tuple(each[other[0]].shape)) for each in (found, state))
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        raise UserError(f"{where}: the weights do not fit: {other[0]} is {there} there and {here} here{more}; {remedy}")
    for name, tensor in found.items():
        state[name].copy_(tensor)


def read_exported(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the safetensors files in a folder, by name.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    try:
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except Exception as error:  # safetensors has its own, of the file's header
        raise UserError(f"the weights in {folder} cannot be read ({error})") from error
    if not tensors:
        raise UserError(f"{folder} holds no *.safetensors; give the best/ of a run")
    return tensors
