"""Compile a module as the run does, whatever its class is: the doctor compiles with the same switches."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn


def compile_in_place(
    module: nn.Module,
    mode: str | None = None,
    *,
    mixed: bool = False,
    round_as_eager: bool = False,
    **settings: Any,
) -> None:
    """Compile a module as ``module.compile`` does, also where its ``forward`` is one of torch's own.

    torch 2.11 would leave an ``nn.Sequential`` eager without a word: it compiles torch's functions only where they are
    called by others.

    Args:
        module: whose parameters keep their names.
        mode: of torch.compile.
        mixed: whether some of its operators compute in another dtype than autocast's.
        round_as_eager: let inductor's kernels round to 16 bits wherever eager does, see ``Precision.rounds_as_eager``.
        settings: further ones of inductor.
    """
    from torch._functorch import config

    # torch would compile the backward pass under the autocast around the forward pass, where the gradients of what
    # computes in fp32 would be multiplied in 16 bits. (The passes of a step are backward without one.)
    config.backward_pass_autocast = "off" if mixed else "same_as_forward"
    of_mode: dict[str, Any] = torch._inductor.list_mode_options(mode) if mode else {}
    options = of_mode | _avoid_wrong_gradients() | {"emulate_precision_casts": round_as_eager} | settings

    def call(*arguments: Any, **keywords: Any) -> Any:
        return module._call_impl(*arguments, **keywords)

    if type(module).forward.__module__.startswith("torch.nn."):
        module._compiled_call_impl = torch.compile(call, options=options)
    else:
        module.compile(options=options)


def _avoid_wrong_gradients() -> dict[str, Any]:
    """Return what disables the fusion of torch 2.10 to 2.13 with wrong LayerNorm gradients (pytorch issue 193061).

    The environment variable of the same name is read when torch is imported, so setting it now has no effect; a user's
    own setting of it stays.
    """
    if torch.__version__ >= "2.14" or "TORCHINDUCTOR_MIX_ORDER_REDUCTION" in os.environ:  # versions, not texts
        return {}
    return {"triton.mix_order_reduction": False}
