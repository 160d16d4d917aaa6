"""Optimizers by name: those of torch, those of other libraries, and Muon with AdamW beside it."""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec
from typing import Any

import torch

from trainer.errors import UserError, nearest

_ELSEWHERE = {
    "Lion": ("timm.optim", "timm>=1.0.20"),
    "Lamb": ("timm.optim", "timm>=1.0.20"),
    "Muon": ("trainer.optim.muon", "torch>=2.9"),
    "AdamWScheduleFree": ("trainer.optim.schedulefree", "schedulefree>=1.4"),
}
"""The module of an optimizer that torch does not have, and what pip installs for it."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of ``optimizer.name``.

    Raises:
        UserError: there is none that can be used here.
    """
    if name in _ELSEWHERE:
        module, package = _ELSEWHERE[name]
        library = package.partition(">")[0]
        if find_spec(library) is None:
            raise UserError(
                f"optimizer.name={name} needs {library}, which is not installed; pip install '{package}', or use "
                "optimizer=adamw"
            )
        cls: Any = getattr(importlib.import_module(module), name)
    else:
        cls = getattr(torch.optim, name, None)
    if not _is_optimizer(cls):
        names = [*filter(lambda each: _is_optimizer(getattr(torch.optim, each)), dir(torch.optim)), *_ELSEWHERE]
        raise UserError(f"optimizer.name={name} is not in torch.optim{nearest(name, names)} ({', '.join(names)})")
    if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        raise UserError(
            f"optimizer.name={name} needs a closure or sparse gradients, which no recipe has; "
            "use another one, such as optimizer=adamw"
        )
    return cls


def _is_optimizer(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer


def accepted_options(cls: type[torch.optim.Optimizer]) -> set[str]:
    """Return the names of the arguments of an optimizer, but for what it optimizes."""
    return set(inspect.signature(cls).parameters) - {"params"}


def averages_itself(name: str) -> bool:
    """Return whether an optimizer averages the weights, in the place of a schedule and of ``ema``."""
    return name == "AdamWScheduleFree"
