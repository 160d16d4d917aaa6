"""What keeps gradients from the optimizer: operations without a derivative and hooks that see them scaled."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mantissa.display import listed
from mantissa.doctor.budget import Budget
from mantissa.doctor.dtypes import NO_CAST, explicit_casts
from mantissa.doctor.finding import BLOCKED, ERROR, SCALE, UNDERFLOW, Cure, Examined, Finding
from mantissa.formats import FP32, plain
from mantissa.step.step import Replay, ReplayResult, Step
from mantissa.step.trace import BACKWARD, FORWARD, Line, Op, Trace, is_checkpointed
from mantissa.tensors import numbers_in, relative_error, storage

_NO_DERIVATIVE = tuple(f"{name}Backward" for name in ("Round", "Sign", "Floor", "Ceil", "Trunc", "Heaviside"))
_SCALE = 2.0**12
_PROPORTIONAL = 0.1
"""Relative error up to which gradients of a loss times ``_SCALE`` are ``_SCALE`` times those of the loss, in fp32."""
_FOLLOWING = 3
"""Steps after this one in which gradients may be 0, too."""


def gradients(step: Step, budget: Budget) -> Examined:
    """Return what is wrong with the gradients of a step in fp32 on their way to the optimizer."""
    reference = step.reference()
    exact = reference.run()
    once = exact.gradients = {name: gradient.clone() for name, gradient in exact.gradients.items()}
    weights = {name: weight for name, weight in reference.model.named_parameters() if weight.requires_grad}
    zero = [name for name, gradient in once.items() if not gradient.is_sparse and not gradient.any()]
    absent = [name for name in weights if name not in once]

    # Weights that no gradient reaches, and why.
    optimized = {name: weights[name] for name in absent if name in step.optimized}
    findings = _unreached(reference, {name: weights[name] for name in zero}, optimized)
    if once and len(zero) == len(once) and not findings and _zero_later(reference, step):
        detail = f"every gradient ({listed(zero)}) is 0 in fp32, in this step and in those after it: nothing trains"
        findings.append(Finding(BLOCKED, BACKWARD, zero[0].rpartition(".")[0], FP32.name, detail=detail))
    notes = [
        f"gradients: of {len(weights)}, {listed(names)} with {what} in this step"
        for what, names in (("no gradient", absent), ("a gradient of 0", zero))
        if names
    ]
    if step.optimized and (left := [name for name in once if name not in step.optimized]):
        notes.append(f"in no group of the optimizer, but with a gradient: {listed(left)}")

    # Gradients that something changes on their way.
    if step.format.needs_loss_scale and step.scale > 1:
        findings += _changed_by_scale(reference, once, step)
    findings += _cast(step, exact)
    return Examined(findings=tuple(findings), notes=tuple(notes))


def _zero_later(reference: Replay, step: Step) -> bool:
    """Return whether every gradient is 0 in the steps that follow, too, from the weights of this one."""
    following = step.following(1 + _FOLLOWING)[1:]
    return not any(gradient.any() for batches in following for gradient in reference.run(batches).gradients.values())


def _unreached(replay: Replay, zero: Mapping[str, Tensor], absent: Mapping[str, Tensor]) -> list[Finding]:
    """Return why weights on which the loss depends get a gradient of 0, or none, from one forward pass.

    Where the code itself says ``torch.no_grad``, it is meant: a generator, while its critic is trained. Nor is it a
    mistake where the loss does not depend on what a weight computes, such as a pooler that a task does not use.

    Args:
        replay: in fp32.
        zero: weights with a gradient of 0: an operation without a derivative may be between them and the loss.
        absent: weights without one, which the optimizer has: they, or what they compute, may be read outside of
            autograd.
    """
    if not zero and not absent:
        return []
    carriers: dict[int, tuple[Tensor, set[str]]] = {storage(each): (each, {name}) for name, each in absent.items()}
    """Weights and what was computed from them, by storage, which stays taken as long as the tensor is here."""
    reads: dict[str, str] = {}

    def note_reads(op: Op) -> None:
        carried = [(tensor, carriers[at][1]) for tensor in op.inputs if (at := storage(tensor)) in carriers]
        if not carried or op.in_backward:
            return
        checkpointed = not torch.is_grad_enabled() and is_checkpointed()
        if not torch.is_grad_enabled() and not checkpointed:
            return
        for tensor, names in carried if not (op.is_view or op.is_mutable) else ():
            for name in names if checkpointed or not tensor.requires_grad else ():
                reads.setdefault(name, str(op.line or ""))
        everything = {name for _, names in carried for name in names}
        for tensor in numbers_in(op.result):  # an order or a choice has no derivative, and is meant
            _, known = carriers.setdefault(storage(tensor), (tensor, set()))
            known |= everything

    trace = Trace(replay.model, note_reads, lines=True)
    loss = replay.forward(trace)
    findings = _without_derivative(loss, trace, zero)
    _, reaching = carriers.get(storage(loss), (loss, set()))
    reads = {name: reads[name] for name in absent if name in reads and name in reaching}
    if reads and not findings:
        detail = (
            f"{listed(list(reads))}: the loss depends on it outside of autograd (.data, .detach(), or a reentrant "
            "checkpoint of inputs that need no gradient), and the optimizer has it"
        )
        name, line = next(iter(reads.items()))
        module = name.rpartition(".")[0]
        findings.append(
            Finding(BLOCKED, FORWARD, module, FP32.name, detail=detail, tensor="" if module else name, line=line)
        )
    return findings


def _without_derivative(loss: Tensor, trace: Trace, zero: Mapping[str, Tensor]) -> list[Finding]:
    """Return the operations without a derivative that are between the loss and weights whose gradient is 0."""
    sought = {id(weight): name for name, weight in zero.items()}
    places: dict[str, tuple[Line | None, str, str]] = {}
    seen: set[tuple[Any, Any]] = set()
    left: list[tuple[Any, Any]] = [(loss.grad_fn, None)] if zero else []
    while left:
        node, stop = left.pop()
        if node is None or (node, stop) in seen:
            continue
        seen.add((node, stop))
        if node.name().startswith(_NO_DERIVATIVE):
            stop = node
        elif (name := sought.get(id(getattr(node, "variable", None)))) and stop is not None:
            places[name] = trace.line_of(stop), trace.owner_of(stop), stop.name()
        left += [(following, stop) for following, _ in node.next_functions]
    findings = []
    for place in dict.fromkeys(places.values()):
        line, module, operation = place
        names = [name for name in places if places[name] == place]
        op = operation.partition("Backward")[0].lower()
        detail = f"its derivative is 0, so {listed(names)} get no gradient"
        findings.append(Finding(BLOCKED, BACKWARD, module, FP32.name, op, detail=detail, line=str(line or "")))
    return findings


def _cast(step: Step, exact: ReplayResult) -> list[Finding]:
    """Return a finding where the backward pass casts to 16 bits in fp32 too, and the gradients are wrong by it."""
    replay = step.replay(plain(FP32))
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
