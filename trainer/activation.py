"""Activation checkpointing: the ``activation_checkpointing`` config group trades a second forward pass for memory.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. What is recomputed has the same bits: dropout
draws the same numbers again, and batch norm's running statistics see each microbatch once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import UserError
from trainer.suggest import nearest

MODES = ("none", "blocks", "selective")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass
class ActivationCheckpointing:
    """What backward recomputes: nothing, whole blocks, or what is cheap within them."""

    mode: str = "none"
    """``selective`` keeps the results of matrix products, convolutions and attention, and recomputes the rest."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(
                f"activation_checkpointing.mode={self.mode} is unknown{nearest(self.mode, MODES)} ({', '.join(MODES)})"
            )

    def apply(self, blocks: list[nn.Module], compiled: bool) -> None:
        """Make each block recompute itself in backward, in place: parameters keep their names.

        Args:
            blocks: see ``Recipe.blocks``.
            compiled: whether torch.compile comes next.

        Raises:
            UserError: the recipe names no blocks, or they hold batch norm and are compiled.

        """
        if self.mode == "none":
            return
        if not blocks:
            raise UserError(
                f"activation_checkpointing={self.mode}: this model has no repeated blocks that could be recomputed; "
                "use activation_checkpointing=none"
            )
        for block in blocks:
            norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
            if norms and compiled:
                raise UserError(
                    f"activation_checkpointing={self.mode} with compile: torch.compile would update batch norm's "
                    "running statistics twice; use compile=off or activation_checkpointing=none"
                )
            block.forward = _recomputed(block, block.forward, self._contexts(norms))

    def _contexts(self, norms: list[_BatchNorm]) -> Contexts | None:
        """Return what makes the contexts of the first forward pass and of the second."""
        if self.mode == "blocks" and not norms:
            return None  # torch.compile knows no context here but the one of selective

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if self.mode == "blocks":
                return nullcontext(), _statistics_kept(norms)
            from torch.utils.checkpoint import create_selective_checkpoint_contexts

            first, second = create_selective_checkpoint_contexts(_policy)
            return first, (_both(second, _statistics_kept(norms)) if norms else second)

        return contexts


def _recomputed(block: nn.Module, forward: Callable[..., Any], contexts: Contexts | None) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputed


@functools.cache
def _expensive() -> frozenset[Any]:
    names = (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "mkldnn_linear", "linear"),
    )
    found = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(packet.default for packet in found if packet is not None and hasattr(packet, "default"))


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if operator in _expensive() else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _statistics_kept(norms: list[_BatchNorm]) -> Iterator[None]:
    """Let batch norm's second forward pass over the same microbatch leave the running statistics alone."""
    tracked = [norm for norm in norms if norm.track_running_stats]
    for norm in tracked:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in tracked:
            norm.track_running_stats = True


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(other)
        stack.enter_context(one)
        yield
