"""AdamW with its moments in bf16 beside fp32 weights: 4 bytes of state for a weight, where torch's takes 8."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from mantissa.tensors import local
from trainer.optim.masters import stochastic_round

_MOST = 2**22
"""Elements of a piece, whose moments exist in fp32 during its update."""


class AdamWBf16(torch.optim.AdamW):
    """torch's AdamW on moments that are widened to the dtype of the weights, piece by piece, and kept in bf16.

    The mean of the gradients is rounded to nearest, as in DeepSeek-V3 (technical report, 2024, section 3.3.3). That of
    their squares would not fall again so: with beta2 = 0.999 a step lowers it by at most 0.1 %, and half the distance
    of two bf16 numbers is 0.2 to 0.4 %. It is rounded at random (Gupta et al., "Deep Learning with Limited Numerical
    Precision", 2015, section 3); the random numbers depend on the count of steps only.

    (Torch's kernel for bf16 moments of fp32 weights is CUDA's alone in 2.15, and takes no random numbers. torchao 0.18
    has no bf16 state, compiles its step, takes no loss scale, and holds tensors that safetensors cannot write.)
    """

    state_dtype = torch.bfloat16
    """The dtype that the moments are meant to have; ``mantissa.setup`` asks for it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step, with torch's protocol of ``found_inf`` and ``grad_scale`` where the kernel is fused."""
        first = self.param_groups[0]
        first["steps"] = first.get("steps", 0) + 1  # known to the host, and kept in checkpoints
        generator = torch.Generator(first["params"][0].device).manual_seed(first["steps"])
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, parameter.grad, group, generator)

    def _step_of(
        self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], generator: torch.Generator
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, dtype=self.state_dtype)
        whole = (parameter.detach(), gradient, state["exp_avg"], state["exp_avg_sq"])
        pieces, step = max(1, math.ceil(parameter.numel() / _MOST)), state["step"]
        parts = (torch.atleast_1d(local(each)).chunk(pieces) for each in whole)
        for weight, slope, *held in zip(*parts, strict=True):
            mean, square = (each.to(weight.dtype) for each in held)
            step = state["step"].clone()
            adamw(
                *([weight], [slope], [mean], [square], [], [step]),
                foreach=False,
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            held[0].copy_(mean)
            held[1].copy_(stochastic_round(square, generator) if held[1].dtype == self.state_dtype else square)
        state["step"].copy_(step)
