"""Weights by name into a new model."""

from __future__ import annotations

from torch import Tensor, nn

from mantissa.display import dimensions
from trainer.errors import UserError
from trainer.optim.state import untie


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
