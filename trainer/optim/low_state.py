"""AdamW with its moments in bf16 beside fp32 weights: 4 bytes of state for a weight, where torch's takes 8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from mantissa.tensors import local

_MOST = 2**20  # elements of a piece, whose moments exist in fp32 during its update


class AdamWBf16(torch.optim.AdamW):
    """torch's AdamW, fused as well, on moments that are kept in bf16 and widened piece by piece.

    The mean of the gradients is rounded to nearest, as in DeepSeek-V3 (technical report, 2024, section 3.3.3). That of
    their squares would not fall again so: with beta2 = 0.999 a step lowers it by at most 0.1 %, and half the distance
    of two bf16 numbers is 0.2 to 0.4 %. It is rounded at random (Gupta et al., "Deep Learning with Limited Numerical
    Precision", 2015, section 3); the random numbers depend on the count of steps only.

    (Torch's kernel for bf16 moments of fp32 weights is CUDA's alone in 2.15, and takes no random numbers. torchao 0.18
    has no bf16 state, compiles its step, takes no loss scale, and holds tensors that safetensors cannot write.)
    """

    state_dtype = torch.bfloat16  # of which ``mantissa.watch.setup`` does not warn

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]
        first["steps"] = first.get("steps", 0) + 1  # known to the host, and kept in checkpoints
        generator = torch.Generator(first["params"][0].device).manual_seed(first["steps"])
        scales = {key: getattr(self, key, None) for key in ("grad_scale", "found_inf")}
        for group in self.param_groups:
            options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
            options |= scales | dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, options, generator)

    def _step_of(self, parameter: nn.Parameter, options: dict[str, Any], generator: torch.Generator) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if options["fused"] else "cpu")
            dtype = self.state_dtype if parameter.dtype == torch.float32 else parameter.dtype  # as in a replay in fp64
            state |= {key: torch.zeros_like(parameter, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        whole: list[Any] = [parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        pieces = parameter.numel() // _MOST + 1
        for part in zip(*(torch.atleast_1d(local(each)).chunk(pieces) for each in whole), strict=True):
            weight, gradient, *held = part
            mean, square = (each.to(weight.dtype) for each in held)
            step = state["step"].clone()
            adamw([weight], [gradient], [mean], [square], [], [step], **options)
            held[0].copy_(mean)
            held[1].copy_(_rounded_at_random(square, generator) if held[1].dtype != square.dtype else square)
        state["step"].copy_(step)


def _rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round finite fp32 values, in place, to one of the two nearest bf16 numbers, so that the mean is exact: as
    ``masters.stochastic_round`` does, in a fifth of the time, because one 64-bit random number is for four values.
    """
    drawn = torch.empty(values.numel() // 4 + 1, dtype=torch.int64, device=values.device)
    noise = drawn.random_(-(2**63), None, generator=generator).view(torch.int16)[: values.numel()]
    bits = values.view(torch.int32).add_(noise.view(values.shape)).add_(1 << 15)
    return bits.bitwise_and_(-1 << 16).view(torch.float32)
