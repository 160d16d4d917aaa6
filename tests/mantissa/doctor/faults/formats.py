"""Planted faults of formats that are not what was asked for, and of compilers: numbers 22 and 27 of docs/doctor.md."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.finding import DIFFERENCE, DTYPE, FORWARD
from tests.mantissa.doctor.faults.planted import WIDTH, Block, Expected, Fault, around
from trainer.parallel.compile import Compile
from trainer.precision.modes import Precision


class CastBack(nn.Module):
    """Layer norm that casts its input to bf16, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.bfloat16(), (WIDTH,)) * self.weight.bfloat16()
        return y.to(x.dtype)


class Sine(nn.Module):
    """A linear layer and a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(3 * self.linear(x))


def _miscompile(graph: Any) -> None:
    """Replace every sine by a cosine, as a compiler with an error would."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.ops.aten.cos.default


def miscompiling() -> AbstractContextManager[Any]:
    """Return a context in which inductor, and only inductor, makes that error."""
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(post_grad_custom_pre_pass=_miscompile)
    return patched


FAULTS = [
    Fault(
        22,
        "an fp32 module that casts back to bf16",
        Expected(DTYPE, FORWARD, "1", "bf16"),
        lambda: around(CastBack()),
        Precision(mode="bf16", fp32_modules=["1"]),
    ),
    Fault(
        27,
        "a compiled block that differs from eager",
        Expected(DIFFERENCE, FORWARD, "1", "inductor"),
        lambda: nn.Sequential(Block(), Sine()),
        Precision(),
        compile=Compile(mode="default"),
        planting=miscompiling,
    ),
]
