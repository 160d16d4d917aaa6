"""The ``compile`` config group."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

import torch
from torch import nn

from mantissa.compile import compile_in_place
from trainer.errors import UserError, nearest

MODES = ("off", "default", "max-autotune")


@dataclass
class Compile:
    """Whether torch.compile compiles the model's forward and backward."""

    mode: str = "off"
    """off, default, or max-autotune (slower to compile; tries kernels out)."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"compile.mode={self.mode} is unknown{nearest(self.mode, MODES)} ({', '.join(MODES)})")

    def apply(self, modules: list[nn.Module], device: torch.device, mixed: bool = False) -> None:
        """Compile the modules in place, so that their parameters keep their names.

        Args:
            modules: of the model.
            device: where they are.
            mixed: whether some of their operators compute in another dtype than autocast's.

        Raises:
            UserError: on a CPU without a C++ compiler, which torch.compile needs there.
        """
        if self.mode == "off":
            return
        if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
            raise UserError(f"compile={self.mode} on a CPU needs a C++ compiler (apt install g++); or use compile=off")
        from torch._functorch import config

        # torch would compile the backward pass under the autocast around the forward pass, where the gradients of what
        # computes in fp32 would be multiplied in 16 bits. (The trainer's backward passes have none.)
        config.backward_pass_autocast = "off" if mixed else "same_as_forward"
        _avoid_wrong_gradients()
        # Without CUDA graphs: a replay reuses their memory, which with gradient accumulation still holds the gradients
        # of the first microbatch (pytorch issue 169545).
        for module in modules:
            compile_in_place(module, mode=None if self.mode == "default" else f"{self.mode}-no-cudagraphs")


def _avoid_wrong_gradients() -> None:
    """Disable the fusion that gives wrong LayerNorm gradients in torch 2.10 to 2.13 (pytorch issue 193061).

    The environment variable of the same name is read when torch is imported, so setting it now has no effect; a user's
    own setting of it stays.
    """
    if torch.__version__ >= "2.14" or "TORCHINDUCTOR_MIX_ORDER_REDUCTION" in os.environ:  # versions, not texts
        return
    from torch._inductor import config

    config.triton.mix_order_reduction = False
