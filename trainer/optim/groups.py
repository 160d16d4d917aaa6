"""Parameter groups: which parameters share a learning rate and a weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from trainer.errors import UserError
from trainer.optim.decay import decayed
from trainer.precision.names import matching


def check_patterns(patterns: Any) -> None:
    """Check the value of ``optimizer.groups``; None: there are no patterns.

    Raises:
        UserError: it is no mapping, a pattern has not ``{lr: …}``, ``{weight_decay: …}`` or both, or a number is wrong.
    """
    if not isinstance(patterns, Mapping | None):
        raise UserError(f"optimizer.groups={patterns} must be a mapping, such as '{{head: {{lr: 10}}}}'")
    for pattern, settings in (patterns or {}).items():
        key = f"optimizer.groups: {pattern}"
        if isinstance(pattern, float):
            raise UserError(f"{key} is read as a number, not as a name; write {pattern}.* for what is in it")
        if not isinstance(settings, Mapping) or not settings or not settings.keys() <= {"lr", "weight_decay"}:
            raise UserError(f"{key} must have lr, weight_decay or both and no more, as in '{{{pattern}: {{lr: 0.1}}}}'")
        for name, value in settings.items():
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else value
            if not 0 <= number < math.inf or (name == "lr" and number == 0):
                raise UserError(
                    f"{key} has {name}={value}; weight_decay must be a number of at least 0, and lr one above 0 that "
                    "multiplies optimizer.lr (freeze=[…] is for what is not to be trained)"
                )


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    model: nn.Module,
    weight_decay: float,
    patterns: Mapping[str, Mapping[str, float]],
    factors: Mapping[str, float],
    hidden: Mapping[str, bool] | None = None,
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, first those with weight decay.

    Args:
        named: what the optimizer changes, by the names of the model's parameters.
        model: whose parameters they are, or are copies of.
        weight_decay: of the parameters that ``decayed`` returns; all others have none.
        patterns: the settings of the parameters that they match (see ``precision.names.matching``) by their names or
            those of modules around them, later ones before earlier ones: ``lr``, in the place of ``factors``, and
            ``weight_decay``, for those that have any.
        factors: multiples of the learning rate, by name; 1 where there is none.
        hidden: the names of the parameters for Muon, and whether they are inputs × outputs, see ``Muon``; None: the
            optimizer is another one.

    Raises:
        UserError: a pattern that matches nothing, or changes nothing.
    """
    weights = decayed(model)
    of_name = {name: parameter for name, parameter in named if parameter.requires_grad}
    settings = {name: {"lr": factors.get(name, 1.0), "weight_decay": weight_decay} for name in of_name}
    for pattern, values in patterns.items():
        found = _selected(model, str(pattern)) & of_name.keys()
        if not found:
            raise UserError(
                f"optimizer.groups: all that {pattern!r} matches is frozen; remove it there, or from freeze"
            )
        if "lr" not in values and not found & weights:
            raise UserError(
                f"optimizer.groups: {pattern!r} sets the weight decay of parameters that have none, such as biases and "
                "norms; leave it out"
            )
        for name in found:
            settings[name] |= values
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    group: dict[str, Any]
    for name in sorted(of_name, key=lambda name: name not in weights):  # their order is kept otherwise
        factor, decay = settings[name]["lr"], settings[name]["weight_decay"] if name in weights else 0.0
        group = {"params": [], "weight_decay": decay, LR_FACTOR: factor}
        if hidden is not None:
            group |= {"muon": name in hidden, "transposed": hidden.get(name, False)}
        key = name in weights, factor, decay, group.get("muon"), group.get("transposed")
        groups.setdefault(key, group)["params"].append(of_name[name])
    return list(groups.values())


LR_FACTOR = "lr_factor"
"""The key, in a group of the optimizer, of the multiple of the scheduled learning rate that it has."""


def _selected(model: nn.Module, pattern: str) -> set[str]:
    """Return the parameters that a pattern matches, each by its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    found = matching("optimizer.groups", pattern, [*modules, *parameters], "module, and no parameter")
    inside = tuple(f"{name}." for name in found)
    return {first[id(tensor)] for name, tensor in parameters.items() if name in found or name.startswith(inside)}
