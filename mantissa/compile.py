"""Compile a module as the run does, whatever its class is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compile a module as ``module.compile(**options)`` does, also where its ``forward`` is one of torch's own.

    torch 2.11 would leave an ``nn.Sequential`` eager without a word: it compiles torch's functions only where they are
    called by others.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        return module._call_impl(*arguments, **keywords)

    if type(module).forward.__module__.startswith("torch.nn."):
        module._compiled_call_impl = torch.compile(call, **options)
    else:
        module.compile(**options)
