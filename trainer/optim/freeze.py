"""Frozen parameters: the option ``freeze`` names what training leaves as it is."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.errors import UserError
from trainer.precision.names import matching


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
