"""Random numbers, which are not to differ between the two formats that a step is compared in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

_Function = Callable[..., Any]
"""A function that checkpointing runs and runs again."""


@contextmanager
def without_dropout(recomputes: bool = True) -> Iterator[None]:
    """Replace random numbers, as ``NoDropout`` does, also in what torch's activation checkpointing recomputes.

    Args:
        recomputes: whether it does so: what is computed again could not be told from another call of a module.
    """
    # ``loss.backward()`` is a function that the mode sees, and torch leaves a mode while it sees one. So what
    # checkpointing calls in the backward pass has to enter it again, and torch has no public place for that: its two
    # kinds of checkpoint are replaced by private name, the reentrant one a function of autograd, the other a generator,
    # of which later releases of torch have several.
    private, apply = vars(checkpoint), checkpoint.CheckpointFunction.apply

    def again(function: _Function, *args: Any, **kwargs: Any) -> Any:
        with NoDropout():
            return function(*args, **kwargs)

    def reentrant(function: _Function, preserve: bool, *args: Any) -> Any:
        return apply(functools.partial(again, function), preserve, *args) if recomputes else function(*args)

    def around(generator: Any, function: _Function, *args: Any, **kwargs: Any) -> Iterator[None]:
        return generator(functools.partial(again, function), *args, **kwargs) if recomputes else (None for _ in "1")

    names = [name for name in private if name.startswith("_checkpoint_without_reentrant_generator")]
    changed = {name: functools.partial(around, private[name]) for name in names}
    with patch.dict(private, changed, CheckpointFunction=SimpleNamespace(apply=reentrant)), NoDropout():
        yield


class NoDropout(TorchFunctionMode):
    """Replaces random masks by their expectation, and random numbers by those of fp32."""

    _drawn: Mapping[Any, Any] = {
        torch.rand: torch.empty,
        torch.rand_like: torch.empty_like,
        torch.randn: torch.empty,
        torch.randn_like: torch.empty_like,
    }
    _identity = frozenset(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
    )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self._identity:
            return args[0] if args else kwargs["input"]
        if function in self._drawn:  # in every precision the same numbers, which depend on the dtype
            generator = kwargs.get("generator")
            like = self._drawn[function](*args, **{key: kwargs[key] for key in kwargs if key != "generator"})
            with _disable_current_modes():  # a wider reference would draw wider ones
                drawn = torch.empty(like.shape, dtype=torch.float32, device=like.device)
                draw = drawn.normal_ if function in (torch.randn, torch.randn_like) else drawn.uniform_
                drawn = draw(generator=generator)
            return drawn.to(like.dtype).requires_grad_(like.requires_grad)
        if function is torch.bernoulli and len(args) == 1:
            return args[0].detach().clone()
        if function is torch.Tensor.bernoulli_:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if function is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        elif function is F.multi_head_attention_forward:
            args = (*args[:10], 0.0, *args[11:])
        return function(*args, **kwargs)
