"""Which parameters are trained, and with which multiple of the learning rate and which weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.errors import UserError
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
    keys: Mapping[str, Mapping[str, Any]],
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
        keys: further ones of the groups, by the names of parameters.

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
    for name in sorted(of_name, key=lambda name: name not in weights):  # their order is kept otherwise
        decay = settings[name]["weight_decay"] if name in weights else 0.0
        group = {"weight_decay": decay, LR_FACTOR: settings[name]["lr"], **keys.get(name, {})}
        groups.setdefault((name in weights, *group.values()), {"params": [], **group})["params"].append(of_name[name])
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


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
_NOT_DECAYED = ("bias", "scale", "gamma", "gain", "norm", "token", "pos_emb", "position", "temperature")
"""Parts of the names of parameters that are not decayed: they add to activations, scale them or are activations."""


def decayed(model: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay applies to.

    The role of a parameter decides: it has two or more dimensions (a matrix or a convolution's kernel), is not in a
    normalisation layer, and its name does not contain bias, scale, token or position. So ConvNeXt's ``layer_scale``,
    a vision transformer's ``class_token`` and ``pos_embedding``, and Swin's ``relative_position_bias_table`` and
    ``logit_scale`` are not decayed. ``nn.Embedding`` is decayed, also of positions, as in GPT-2's published recipe.
    """
    names = set()
    for owner, module in model.named_modules():
        if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm"):
            continue
        for name, parameter in module.named_parameters(owner, recurse=False):
            own = name.rpartition(".")[2].lower()
            if parameter.ndim >= 2 and not any(word in own for word in _NOT_DECAYED):
                names.add(name)
    return names


def layer_factors(model: nn.Module, blocks: list[nn.Module], decay: float) -> dict[str, float]:
    """Return layer-wise multiples of the learning rate, by the names of the model's parameters.

    What follows the last of n blocks, such as the head, has 1; that block has ``decay``, the first one ``decay``ⁿ, and
    what is before it, such as embeddings or a stem, ``decay``ⁿ⁺¹. What is between two blocks counts to the one before
    it. The order is that of ``named_parameters``, so a tied weight has the place of its first name.

    Clark et al., "ELECTRA", 2020; Bao et al., "BEiT", 2022.

    Raises:
        UserError: the recipe names no blocks.
    """
    if not blocks:
        raise UserError(
            "optimizer.layer_decay: this recipe's model has no repeated blocks to count (optimizer.groups names them)",
            "optimizer.layer_decay=null",
        )
    numbers = {id(block): number for number, block in enumerate(blocks, 1)}
    starts = {f"{name}.": numbers[id(module)] for name, module in model.named_modules() if id(module) in numbers}
    factors, level = {}, 0
    for name, _ in model.named_parameters():
        inside = next((number for start, number in starts.items() if name.startswith(start)), None)
        level = inside or level
        top = inside is None and level == len(blocks)
        factors[name] = decay ** (0 if top else len(blocks) + 1 - level)
    return factors


def freeze(model: nn.Module, patterns: list[str]) -> list[str]:
    """Freeze parameters, in place: no gradient is computed for them; return their names.

    A pattern (see ``precision.names.matching``) names parameters, or modules with everything in them. A weight under
    several names is frozen under all of them. Call it before masters, the optimizer, DDP and FSDP, which leave frozen
    parameters out.

    Batch norm in a named module, or whose own parameters are all frozen, stays in evaluation mode: it normalises by
    its running statistics and leaves them as they are, as with Keras's ``trainable = False``. Otherwise the frozen
    layers would still change, because their statistics follow the new data. Dropout is not affected.

    Raises:
        UserError: a pattern matches nothing that can be frozen, or nothing is left to train.
    """
    # With both names of a tied weight.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    holders = {name: module for name, module in modules.items() if [*module.parameters(), *_norms(module)]}
    for pattern in patterns:
        for name in matching("freeze", pattern, [*holders, *parameters], "parameter, and no module that has any"):
            (parameters[name] if name in parameters else holders[name]).requires_grad_(False)
            for norm in _norms(modules[name]) if name in modules else ():
                _keep_statistics(norm)
    for norm in _norms(model) if patterns else ():
        own = list(norm.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            _keep_statistics(norm)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"freeze={patterns} leaves no parameter to train; name fewer modules")
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _norms(model: nn.Module) -> list[_NormBase]:
    """Return the modules with running statistics."""
    return [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]


def _keep_statistics(norm: Any) -> None:
    norm.eval()
    norm.train = MethodType(_stay_in_evaluation, norm)  # bound, so that a deep copy of the module has its own


def _stay_in_evaluation(norm: nn.Module, mode: bool = True) -> nn.Module:
    """Take the place of ``Module.train``, which ``model.train()`` calls for every module in it."""
    return type(norm).train(norm, False)
