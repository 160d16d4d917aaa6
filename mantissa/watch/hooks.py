"""Hooks that end no training: whatever goes wrong in them is told to their owner, and the loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch

from mantissa.errors import NotFiniteError, UsageError


def observing(method: Callable[..., None]) -> Callable[..., None]:
    """Let a method raise NotFiniteError and UsageError alone; ``_missed`` gets other errors; the training goes on."""

    @wraps(method)
    def observe(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except (NotFiniteError, UsageError):
            raise
        except Exception as error:  # of any kind: what is in a model and a loop decides
            self._missed(error)

    return observe


class Listener:
    """A hook that copies and files of its module do not have."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        # Where its caller is compiled, it would break the graph; in a vmap or grad, tensors have no values.
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # does nothing, and opens where this package is not installed
