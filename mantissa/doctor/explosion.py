"""Why training explodes or learns nothing in every format: the optimizer's state, a sample, a factor, or the rate."""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.display import dtype_name
from mantissa.doctor.samples import far, without
from mantissa.finding import INPUT, MOMENT, RATE, SCALE, UPDATE, Finding
from mantissa.step import Batch, Replay, Step, map_tensors
from mantissa.trace import Trace

_GROWTH = 10.0
"""Training explodes where the loss becomes so many times that of weights that stand still, and does not fall below half
of that again."""
_LITTLE, _MUCH = 0.03, 0.15
"""Of its size: training learns nothing if the loss falls by less than the first, and what lets it fall by more than
the second is the cause."""
_FACTOR = 16.0
"""From here on a constant factor of the loss is tried as the cause."""
RATES = tuple(10.0**-power for power in range(1, 9))


def explosion(step: Step, batches: list[list[Batch]], exact: Tensor, dtype: torch.dtype) -> Finding | None:
    """Return why training explodes or learns nothing in the reference; None: it does neither, or nothing cures it.

    What is named was changed, and the same steps were trained again.

    Args:
        step: the first step.
        batches: the microbatches of each step.
        exact: the losses in the reference, fp64.
        dtype: of the reference.
    """
    if not _explodes(exact, exact[:1]) and _learned(exact, exact[:3]) > _MUCH:
        return None
    still = torch.tensor(step.reference().train(batches, lr=0.0), dtype=torch.float64)
    explodes = _explodes(exact, still)
    if not explodes and _learned(exact, still) > _LITTLE:
        return None
    least = 0.0 if explodes else _MUCH
    broken = (~exact.isfinite()).nonzero()
    last = f"{exact[-1]:.4g}" if not len(broken) else f"not finite at step {step.number + int(broken[0])}"
    went = f"in {dtype_name(dtype)} the loss goes from {exact[0]:.4g} to {last} in {len(exact)} steps"

    def trained(steps: list[list[Batch]] = batches, lr: float = 1.0, fresh: bool = False) -> Tensor:
        return torch.tensor(step.reference(dtype).train(steps, lr, fresh), dtype=torch.float64)

    def mends(losses: Tensor) -> bool:
        return not _explodes(losses, still) and _learned(losses, still) > least

    if step.moments and mends(losses := trained(fresh=True)):
        state, detail = _largest_state(step)
        detail = f"{went}, and to {losses[-1]:.4g} with a fresh state of the optimizer; {detail}"
        module = state.rpartition(" of ")[2].rpartition(".")[0]
        return Finding(MOMENT, UPDATE, module, "fp32", detail=detail, cure=[step.remedies.fresh_state], tensor=state)
    sample = far(batch for microbatches in batches for batch in microbatches) if explodes else None
    if sample is not None and mends(losses := trained([list(map(without, microbatches)) for microbatches in batches])):
        at = step.number + sample.batch // len(batches[0])
        detail = f"{went}, and to {losses[-1]:.4g} with usual samples in the place of such; in step {at}, {sample}"
        cure = [f"leave out {sample.place}, and others like it"]
        return Finding(INPUT, UPDATE, "", "fp32", detail=detail, cure=cure, tensor=sample.place)
    factor, line = _factor(step.reference())
    passes = step.reference(dtype)
    passes.loss_factor = 1 / factor
    if explodes and factor >= _FACTOR and mends(losses := factor * torch.tensor(passes.train(batches)).double()):
        detail = f"{went}, and to {losses[-1]:.4g} if the gradients are not multiplied by {factor:g}, as the loss is"
        return Finding(SCALE, UPDATE, "", "fp32", detail=detail, cure=["no factor in this line"], line=line)
    rises = False
    for rate in RATES if explodes else RATES[:2]:
        losses = trained(lr=rate)
        if mends(losses):
            detail = f"{went}, and to {losses[-1]:.4g} with {rate:g} times the learning rate"
            return Finding(RATE, UPDATE, "", "fp32", detail=detail, cure=[step.remedies.rate(rate)])
        rises |= explodes and _learned(losses, still) < 0
    if not rises:
        return None
    detail = f"{went}, and it rises with much lower learning rates, too, as with a wrong sign, or weight decay"
    return Finding(RATE, UPDATE, "", "fp32", detail=detail)


def _largest_state(step: Step) -> tuple[str, str]:
    """Return which of the optimizer's tensors is the farthest from the gradient of this step, and how far it is."""
    gradients, found = step.reference().run().gradients, []
    for name, state in step.moments.items():
        if name not in gradients or gradients[name].is_sparse:
            continue
        gradient = gradients[name]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == gradient.shape and value.is_floating_point():
                kept = value.double().sqrt() if key.endswith("_sq") else value.double()
                times = kept.norm().item() / max(gradient.double().norm().item(), 1e-30)
                found.append((times, f"{key} of {name}"))
    times, place = max(found, default=(0.0, ""))
    return place, f"the largest, {place}, is {times:.3g} times the gradient of this step"


def _factor(passes: Replay) -> tuple[float, str]:
    """Return the constant that the code multiplies the mean loss by at last, and the line."""
    passes.start()
    with Trace(passes.model, lines=True) as trace, passes.around(), torch.enable_grad():
        node = passes.loss(map_tensors(passes.microbatches[0], passes.widened)).grad_fn
    constants = [getattr(node, f"_saved_{side}", None) for side in ("self", "other")]
    numbers = [abs(each.item()) for each in constants if each is not None and each.numel() == 1]
    if passes.step.sums_loss or node is None or len(numbers) != 1 or not numbers[0]:
        return 1.0, ""
    factor = {"MulBackward0": numbers[0], "DivBackward0": 1 / numbers[0]}.get(node.name(), 1.0)
    return factor, str(trace.line_of(node) or "")


def _learned(losses: Tensor, still: Tensor) -> float:
    """Return by which share the last third of the losses is below that of weights that stand still."""
    third = max(1, len(losses) // 3)
    last, other = losses[-third:].mean().item(), still[-third:].mean().item()
    return (other - last) / abs(other) if other else 0.0


def _explodes(losses: Tensor, still: Tensor) -> bool:
    """Return whether losses grow far beyond those of weights that stand still, and stay there, or are not finite."""
    third, size = max(1, len(losses) // 3), still.abs().mean()
    away = losses - still
    grows = bool(away.max() > _GROWTH * size) and bool(away[-third:].mean() > -size / 2)
    return grows or not bool(losses.isfinite().all())
