"""What keeps gradients from the optimizer: operations without a derivative, hooks that see them scaled, lost state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa.finding import BACKWARD, BLOCKED, MOMENT, SCALE, UPDATE, Examined, Finding
from mantissa.modules import ModuleTracer
from mantissa.places import Line
from mantissa.step import Passes, Step
from mantissa.tensors import relative_error

_NO_DERIVATIVE = tuple(f"{name}Backward" for name in ("Round", "Sign", "Floor", "Ceil", "Trunc", "Heaviside"))
_SCALE = 2.0**12
_PROPORTIONAL = 0.1
"""Relative error up to which gradients of a loss times ``_SCALE`` are ``_SCALE`` times those of the loss, in fp32."""
_SHOWN = 4


def gradients(step: Step) -> Examined:
    """Return what is wrong with the gradients of a step in fp32 on their way to the optimizer."""
    reference = step.reference()
    once = {name: each.clone() for name, each in reference.attempt().gradients.items()}
    weights = {name: each for name, each in reference.model.named_parameters() if each.requires_grad}
    zero = [name for name, each in once.items() if not each.is_sparse and not each.any()]
    result = _blocked(reference, {name: weights[name] for name in zero})
    result.findings += lost_state(step.moments)
    absent = [name for name in weights if name not in once]
    blocked = {each.tensor for each in result.findings}
    for what, names in (("no gradient", absent), ("a gradient of 0", [name for name in zero if name not in blocked])):
        if names:
            count = f"{len(names)} of {len(weights)} parameters"
            result.notes.append(f"gradients: {count} have {what} in this step ({_first(names)})")
    if step.format.needs_loss_scale and step.scale > 1:
        result.findings += _changed_by_scale(reference, once, step)
    return result


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)


class _Lines(TorchDispatchMode):
    """Lets a tracer see the lines of all operators."""

    def __init__(self, modules: ModuleTracer) -> None:
        super().__init__()
        self.modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.modules.line()
        return func(*args, **(kwargs or {}))


def _blocked(passes: Passes, zero: dict[str, Tensor]) -> Examined:
    """Return the operations without a derivative through which the loss depends on weights whose gradient is 0."""
    if not zero:
        return Examined()
    modules = ModuleTracer(passes.model)
    passes.start()
    with modules, _Lines(modules), passes.around(), torch.enable_grad():
        loss = passes.loss(passes.microbatches[0])
        sought = {id(each): name for name, each in zero.items()}
        found: dict[str, tuple[Line | None, str, str]] = {}
        seen: set[tuple[Any, Any]] = set()
        left: list[tuple[Any, Any]] = [(loss.grad_fn, None)]
        while left:
            node, stop = left.pop()
            if node is None or (node, stop) in seen:
                continue
            seen.add((node, stop))
            if node.name().startswith(_NO_DERIVATIVE):
                stop = node
            elif (name := sought.get(id(getattr(node, "variable", None)))) and stop is not None:
                found[name] = modules.line_of(stop), modules.owner_of(stop), stop.name()
            left += [(following, stop) for following, _ in node.next_functions]
    by_place: dict[tuple[Line | None, str, str], list[str]] = {}
    for name, place in found.items():
        by_place.setdefault(place, []).append(name)
    return Examined(
        findings=[
            Finding(
                BLOCKED,
                BACKWARD,
                module,
                "fp32",
                op.partition("Backward")[0].lower(),
                detail=f"its derivative is 0, so {_first(names)} get no gradient",
                line=str(line or ""),
            )
            for (line, module, op), names in by_place.items()
        ]
    )


def _changed_by_scale(reference: Passes, once: dict[str, Tensor], step: Step) -> Iterable[Finding]:
    """Yield a finding where something changes gradients that still have the loss scale."""
    reference.scale = _SCALE
    scaled = reference.attempt().gradients
    reference.scale = 1.0
    dense = [name for name, each in once.items() if not each.is_sparse and each.any()]
    wrong = [name for name in dense if relative_error(scaled[name] / _SCALE, once[name]) > _PROPORTIONAL]
    if not wrong:
        return
    weights = dict(reference.model.named_parameters())
    hooks = [hook for name in wrong for hook in (weights[name]._backward_hooks or {}).values()]
    line = ""
    if hooks and inspect.isfunction(hooks[0]):
        code = hooks[0].__code__
        line = str(Line(code.co_filename, code.co_firstlineno))
    detail = (
        f"of {len(wrong)} parameters ({_first(wrong)}) the gradients of the loss times {_SCALE:g} are not "
        f"{_SCALE:g} times those of the loss: a hook or a function limits gradients that still have the loss scale"
    )
    cure = "clip after scaler.unscale_(optimizer), and not in a hook"
    yield Finding(SCALE, BACKWARD, "", step.format.name, detail=detail, cure=[cure], line=line)


def lost_state(moments: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Return a finding where the first moment is there and the second one is 0, before the step.

    Args:
        moments: the optimizer's state by parameter.
    """
    found = []
    for name, state in moments.items():
        first, second = state.get("exp_avg"), state.get("exp_avg_sq")
        if isinstance(first, Tensor) and isinstance(second, Tensor) and second.shape == first.shape and first.any():
            share = ((first != 0) & (second == 0)).sum().item() / (first != 0).sum().item()
            if share > 0.5:
                found.append((share, name, second.dtype))
    if not found:
        return []
    share, name, dtype = max(found, key=lambda each: each[0])
    detail = (
        f"exp_avg_sq of {len(found)} parameters is 0 where exp_avg is not ({name}: {share:.0%} of the elements, "
        f"{str(dtype).removeprefix('torch.')}): their updates are divided by eps alone"
    )
    place = f"optimizer state exp_avg_sq of {name}"
    return [Finding(MOMENT, UPDATE, name.rpartition(".")[0], "fp32", detail=detail, tensor=place)]
