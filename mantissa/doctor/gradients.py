"""What changes gradients on their way to the optimizer: hooks that see them scaled, and casts to 16 bits."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from mantissa.display import listed
from mantissa.doctor.budget import Budget
from mantissa.doctor.dtypes import NO_CAST, explicit_casts
from mantissa.doctor.finding import ERROR, SCALE, UNDERFLOW, Cure, Examined, Finding
from mantissa.formats import FP32, plain
from mantissa.step.replay import Replay, ReplayResult
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, Line
from mantissa.tensors import relative_error

_SCALE = 2.0**12
_PROPORTIONAL = 0.1
"""Relative error up to which gradients of a loss times ``_SCALE`` are ``_SCALE`` times those of the loss, in fp32."""


def gradients(step: Step, budget: Budget) -> Examined:
    """Return what is wrong with the gradients of a step in fp32 on their way to the optimizer."""
    reference = Replay.reference(step)
    exact = reference.run()
    once = exact.gradients = {name: gradient.clone() for name, gradient in exact.gradients.items()}
    weights = [name for name, weight in reference.model.named_parameters() if weight.requires_grad]
    zero = [name for name, gradient in once.items() if not gradient.is_sparse and not gradient.any()]
    absent = [name for name in weights if name not in once]

    # Weights that no gradient reaches: most often that is meant.
    notes = [
        f"gradients: of {len(weights)}, {listed(names)} with {what} in this step"
        for what, names in (("no gradient", absent), ("a gradient of 0", zero))
        if names
    ]
    if step.optimized and (left := [name for name in once if name not in step.optimized]):
        notes.append(f"in no group of the optimizer, but with a gradient: {listed(left)}")

    # Gradients that something changes on their way.
    findings = []
    if step.format.needs_loss_scale and step.scale > 1:
        findings += _changed_by_scale(reference, once, step)
    findings += _cast(step, exact)
    return Examined(findings=tuple(findings), notes=tuple(notes))


def _cast(step: Step, exact: ReplayResult) -> list[Finding]:
    """Return a finding where the backward pass casts to 16 bits in fp32 too, and the gradients are wrong by it."""
    replay = Replay.in_format(step, plain(FP32))
    replay.scale = step.scale
    try:
        result = replay.run()
    except RuntimeError:  # a model with hard-coded dtypes
        return []
    gradients = {name: gradient / step.scale for name, gradient in result.gradients.items()}
    known = {name: gradient for name, gradient in exact.gradients.items() if not gradient.is_sparse and gradient.any()}
    wrong = [name for name, gradient in known.items() if relative_error(gradients[name], gradient) > _PROPORTIONAL]
    # A cast in the forward pass changes the loss, too, and is found there.
    casts = explicit_casts(replay, backward=True) if wrong and torch.equal(result.loss, exact.loss) else []
    if not casts:
        return []
    zero = sum(int(((gradients[name] == 0) & (known[name] != 0)).sum()) for name in wrong)
    share = zero / sum(gradient.numel() for gradient in known.values())
    detail = f"gradients are cast to {casts[0].dtype}: those of {listed(wrong)} are wrong, {share:.0%} of all become 0"
    other = step
    for cast in casts:
        other = other.without_casts(cast.line)
    kind, cures = UNDERFLOW if share else ERROR, (Cure(NO_CAST, other),)
    return [Finding.at(casts[0], kind, FP32.name, direction=BACKWARD, detail=detail, candidates=cures)]


def _disproportionate(replay: Replay, names: list[str]) -> list[str]:
    """Return the parameters whose gradients are not multiplied by what the loss is multiplied by."""
    once = {name: gradient.clone() for name, gradient in replay.run().gradients.items()}
    replay.scale = _SCALE
    scaled = replay.run().gradients
    replay.scale = 1.0
    return [name for name in names if relative_error(scaled[name] / _SCALE, once[name]) > _PROPORTIONAL]


def _changed_by_scale(reference: Replay, once: dict[str, Tensor], step: Step) -> list[Finding]:
    """Return a finding where something changes gradients that still have the loss scale."""
    judged = [name for name, gradient in once.items() if not gradient.is_sparse and gradient.any()]
    wrong = _disproportionate(reference, judged)
    if not wrong:
        return []
    weights = dict(reference.model.named_parameters())
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [hook for name in wrong for kind in kinds for hook in (getattr(weights[name], kind) or {}).values()]
    line = ""
    if hooks and inspect.isfunction(hooks[0]):
        code = hooks[0].__code__
        line = str(Line(code.co_filename, code.co_firstlineno))
    detail = (
        f"{listed(wrong)}: the gradients of the loss times {_SCALE:g} are not "
        f"{_SCALE:g} times those of the loss: a hook or a function limits gradients that still have the loss scale"
    )
    cure = Cure("no hooks of weights: clip after scaler.unscale_(optimizer)", step.without_hooks())
    return [Finding(SCALE, BACKWARD, "", step.format.name, detail=detail, line=line, candidates=(cure,))]
