"""Muon for the matrices inside a network and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.errors import UserError
from trainer.hardware import NATIVE, detect
from trainer.parallel.shards import is_sharded, local_part, local_rows


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` and ``torch.optim.AdamW`` with one list of groups and one state.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix, by five Newton-Schulz iterations in bf16
    (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024), or in fp32 on a CPU that has no
    bf16 instructions. It is for the weights of hidden layers; embeddings, the head, norms and biases are left to AdamW,
    as there. By default its updates are scaled by
    0.2 · √(larger dimension), to the size of AdamW's, so that both take the same learning rate and weight decay
    (``match_rms_adamw``; Liu et al., "Muon is Scalable for LLM Training", Moonshot AI, 2025).

    Args:
        params: parameters, or groups; a group's ``muon`` decides (of parameters without groups: all have two
            dimensions), and its ``transposed`` says that its matrices are inputs × outputs.
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
        params: Iterable[Any],
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
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            group.setdefault("muon", all(parameter.ndim == 2 for parameter in group["params"]))
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

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        for muon, part in self._parts:
            own = [group for group in self.param_groups if group["muon"] is muon]
            part.param_groups = [each for group in own for each in _outputs_over_inputs(group)]
            part.state = self.state
            with _precision_of_iterations(part) if muon else nullcontext():
                if muon and is_sharded(part.param_groups[0]["params"][0]):
                    _step_of_sharded(part)
                else:
                    part.step()


def hidden_matrices(model: nn.Module, blocks: list[nn.Module]) -> dict[str, bool]:
    """Return the names of the parameters for Muon, and whether they are inputs × outputs.

    They are those of two dimensions in the model's blocks, but no embeddings. ``nn.Linear`` has outputs × inputs,
    transformers' Conv1D, as in GPT-2, the transpose.

    Raises:
        UserError: there are none, or the recipe names no blocks.
    """
    inside = {id(module) for block in blocks for module in block.modules() if not isinstance(module, nn.Embedding)}
    found = {
        name: any(each.__name__ == "Conv1D" for each in type(module).__mro__)  # FSDP2 derives a class from it
        for owner, module in model.named_modules()
        if id(module) in inside
        for name, parameter in module.named_parameters(owner, recurse=False)
        if parameter.ndim == 2
    }
    if not found:
        lack = "the blocks of this recipe's model have none" if blocks else "this recipe names no repeated blocks"
        raise UserError(
            f"optimizer.name=Muon trains the matrices in the blocks of a model, but {lack}; use optimizer=adamw"
        )
    return found


def _outputs_over_inputs(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return groups with which torch, which takes rows for outputs, has the rates of matrices of inputs × outputs.

    Its √max(1, rows / columns) or rows / columns inside the root (``spectral_unclamped``) become those of the transpose
    by a factor of the rate, of which the weight decay is free.
    """
    power = {None: 0.5, "original": 0.5, "spectral_unclamped": 1.0}.get(group.get("adjust_lr_fn"), 0.0)
    if not (group.get("transposed") and power):
        return [group]
    factors = [(weight.shape[1] / weight.shape[0]) ** power for weight in group["params"]]
    return [
        group | {"params": [weight], "lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / factor}
        for weight, factor in zip(group["params"], factors, strict=True)
    ]


@functools.cache
def bf16_is_emulated() -> bool:
    """Return whether this CPU computes bf16 without instructions for it."""
    return detect("cpu").support("bf16") != NATIVE


def _precision_of_iterations(muon: torch.optim.Optimizer) -> AbstractContextManager[object]:
    on_cpu = muon.param_groups[0]["params"][0].device.type == "cpu"
    return _InFp32() if on_cpu and bf16_is_emulated() else nullcontext()


class _InFp32(TorchFunctionMode):
    """Gives torch's Muon an fp32 copy of a matrix where it asks for one in bf16, with which it then iterates."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.bfloat16:  # torch 2.11; a copy, because it is changed in place
            function, kwargs = Tensor.to, {"dtype": torch.float32, "copy": True}
        elif function is Tensor.to and kwargs.get("dtype") == torch.bfloat16:
            kwargs = {**kwargs, "dtype": torch.float32}
        return function(*args, **kwargs)


def _step_of_sharded(muon: torch.optim.Optimizer) -> None:
    """Take Muon's step of matrices that are sharded by rows: each rank computes the whole update and takes its rows.

    (Torch's own step of DTensors multiplies shards, dozens of exchanges for each matrix, and rounds to bf16 elsewhere,
    which the iteration magnifies where the gradient is singular.)
    """
    for group in muon.param_groups:
        lr, momentum = group["lr"], group["momentum"]
        same = ("ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
        options: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        options |= {key: group[key] for key in same}
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = muon.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight.grad)
            average = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
            update = weight.grad.lerp(average, momentum) if group["nesterov"] else average
            whole = nn.Parameter(torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device))
            whole.grad = update.full_tensor()
            torch.optim.Muon([whole], **options).step()
            first, count = local_rows(weight)
            local_part(weight).mul_(1 - lr * group["weight_decay"]).add_(whole[first : first + count])
