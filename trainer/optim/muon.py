"""Muon for the matrices inside a network and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr

from mantissa.tensors import local
from trainer.errors import UserError
from trainer.hardware import NATIVE, detect
from trainer.optim.groups import decayed
from trainer.parallel.shards import is_sharded, local_rows


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` and ``torch.optim.AdamW`` with one list of groups and one state.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix, by five Newton-Schulz iterations in bf16
    (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024), or in fp32 on a CPU that has no
    bf16 instructions. It is for the weights of hidden layers; embeddings, the head, norms and biases are left to AdamW,
    as there. By default its updates are scaled by
    0.2 · √(larger dimension), to the size of AdamW's, so that both take the same learning rate and weight decay
    (``match_rms_adamw``; Liu et al., "Muon is Scalable for LLM Training", Moonshot AI, 2025).

    Args:
        params: groups; ``muon`` decides which of the two takes one, and ``transposed`` says that its matrices are
            inputs × outputs.
        lr: of both.
        weight_decay: decoupled, of both.
        momentum: of Muon.
        nesterov: of Muon.
        ns_coefficients: of the Newton-Schulz iteration.
        ns_steps: its iterations.
        adjust_lr_fn: see torch.optim.Muon; ``original`` and ``spectral_unclamped`` take outputs over inputs.
        betas: of AdamW.
        eps: of AdamW.
        fused: of AdamW.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        groups = list(params)
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        muon: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
        muon |= {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps}
        self._parts: list[tuple[bool, torch.optim.Optimizer]] = []
        # Each fills in the options of its groups, in place.
        if own := [group for group in groups if group["muon"]]:
            self._parts.append((True, torch.optim.Muon(own, **shared, **muon)))
        if others := [group for group in groups if not group["muon"]]:
            self._parts.append((False, torch.optim.AdamW(others, **shared, betas=betas, eps=eps, fused=fused)))
        super().__init__(groups, shared)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Torch's protocol: on a GPU the step takes ``found_inf`` and ``grad_scale``, so the host does not wait."""
        others = [part for muon, part in self._parts if not muon]
        on_gpu = self.param_groups[0]["params"][0].device.type != "cpu"
        return on_gpu and all(getattr(part, "_step_supports_amp_scaling", False) for part in others)

    @staticmethod
    def group_keys(model: nn.Module, blocks: list[nn.Module]) -> dict[str, dict[str, bool]]:
        """Return the keys ``muon`` and ``transposed`` of the groups of a model's parameters, by their names.

        Muon takes the weights of two dimensions in the model's blocks, but no embeddings. ``nn.Linear`` has outputs ×
        inputs, transformers' Conv1D, as in GPT-2, the transpose.

        Raises:
            UserError: there are none, or the recipe names no blocks.
        """
        weights = decayed(model)
        inside = {id(module) for block in blocks for module in block.modules() if not isinstance(module, nn.Embedding)}
        matrices = {
            name: any(base.__name__ == "Conv1D" for base in type(module).__mro__)  # FSDP2 derives a class from it
            for owner, module in model.named_modules()
            if id(module) in inside
            for name, parameter in module.named_parameters(owner, recurse=False)
            if parameter.ndim == 2 and name in weights
        }
        if not matrices:
            lack = "the blocks of this recipe's model have none" if blocks else "this recipe names no repeated blocks"
            raise UserError(
                f"optimizer.name=Muon trains the matrices in the blocks of a model, but {lack}",
                "optimizer=adamw optimizer.name=AdamW",
            )
        return {
            name: {"muon": name in matrices, "transposed": matrices.get(name, False)}
            for name, _ in model.named_parameters()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both; where the flag ``found_inf`` is given, of all matrices of a shape at once."""
        found_inf, grad_scale = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        for muon, part in self._parts:
            part.param_groups = [group for group in self.param_groups if group["muon"] is muon]
            part.state = self.state
            if not muon:
                part.found_inf, part.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
                part.step()
                continue
            for group in part.param_groups:
                for weights in _stacks(group["params"], stacked=found_inf is not None):
                    self._step_of(weights, group, None if found_inf is None else found_inf > 0, grad_scale)

    def _step_of(
        self, weights: list[Tensor], group: dict[str, Any], skipped: Tensor | None, grad_scale: Tensor | None
    ) -> None:
        """Take the step of matrices of one shape, as ``torch.optim.Muon`` does that of each.

        Of a matrix that is sharded by rows, each rank computes the whole update and takes its rows. (Torch's own step
        of DTensors multiplies shards, dozens of exchanges for each matrix, and rounds to bf16 elsewhere, which the
        iteration magnifies where the gradient is singular.)
        """
        weight = weights[0]
        gradients = [each.grad for each in weights if each.grad is not None]
        for each, its in zip(weights, gradients, strict=True):
            if "momentum_buffer" not in self.state[each]:
                self.state[each]["momentum_buffer"] = torch.zeros_like(its)
        averages = [self.state[each]["momentum_buffer"] for each in weights]
        average, gradient = _stack(averages), _stack(gradients)
        if grad_scale is not None:  # of 16-bit gradients
            gradient = gradient.float().div_(grad_scale).to(gradient.dtype)
        moved = average.lerp(gradient, 1 - group["momentum"])
        update = gradient.lerp(moved, group["momentum"]) if group["nesterov"] else moved
        update = update.full_tensor() if is_sharded(update) else update  # type: ignore[attr-defined]
        on_cpu = weight.device.type == "cpu"
        dtype = torch.float32 if on_cpu and bf16_is_emulated() else torch.bfloat16
        update = orthogonal(update.to(dtype, copy=True), group["ns_coefficients"], group["ns_steps"], group["eps"])
        if is_sharded(weight):
            first, count = local_rows(weight)
            update = update[first : first + count]
        moved, keep = local(moved), 1 - group["lr"] * group["weight_decay"]
        sides = weight.shape[::-1] if group.get("transposed") else weight.shape  # outputs, inputs
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], torch.Size(sides))
        own, kept = [local(each) for each in weights], [local(each) for each in averages]
        before = _stack(own)
        after = before.mul(keep).add_(update, alpha=-rate)
        if skipped is not None:
            moved, after = torch.where(skipped, _stack(kept), moved), torch.where(skipped, before, after)
        for targets, new in ((kept, moved), (own, after)):
            torch._foreach_copy_(targets, new.unbind() if len(targets) > 1 else [new])


_MOST = 2**25
"""Elements of a stack, which takes a few times its memory during the step."""


def _stacks(parameters: list[Tensor], stacked: bool) -> Iterator[list[Tensor]]:
    """Yield parameters that have gradients, those of one shape and dtype together if ``stacked``."""
    by_shape: dict[object, list[Tensor]] = {}
    for number, each in enumerate(parameters):
        if each.grad is not None:
            alone = not stacked or is_sharded(each)
            by_shape.setdefault(number if alone else (each.shape, each.dtype), []).append(each)
    for found in by_shape.values():
        count = max(1, _MOST // max(1, found[0].numel()))
        for start in range(0, len(found), count):
            yield found[start : start + count]


def _stack(matrices: list[Tensor]) -> Tensor:
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0]


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the nearest orthogonal matrix, roughly, of each ([n ×] rows × columns) by Newton-Schulz, in its dtype.

    The operations are those of torch's Muon, so the bits are, too. The argument is overwritten.
    """
    a, b, c = coefficients
    add = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@functools.cache
def bf16_is_emulated() -> bool:
    """Return whether this CPU computes bf16 without instructions for it."""
    return detect("cpu").support("bf16") != NATIVE
