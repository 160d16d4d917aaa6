"""Activation checkpointing: the ``activation_checkpointing`` config group trades a second forward pass for memory.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; selective: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022. Without torch.compile the training is the same, bit for bit: dropout
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
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from trainer.errors import UserError, check_choice

MODES = ("none", "blocks", "selective")


@dataclass
class ActivationCheckpointing:
    """What backward recomputes: nothing, whole blocks, or the cheap operations in them."""

    mode: str = "none"
    """none, blocks, or selective (keeps results of matmuls, convolutions and fused attention; recomputes the rest)."""

    def __post_init__(self) -> None:
        check_choice("activation_checkpointing.mode", self.mode, MODES)

    def apply(self, blocks: list[nn.Module]) -> None:
        """Let each of ``Recipe.blocks`` recompute its forward in backward, in place: parameters keep their names.

        Evaluation is not changed. Call it before torch.compile, which then decides what is kept in a block.

        Raises:
            UserError: the recipe names no blocks.
        """
        if self.mode == "none":
            return
        if not blocks:
            raise UserError(
                f"activation_checkpointing={self.mode}: this recipe's model has no repeated blocks to recompute",
                "activation_checkpointing=none",
            )
        for block in blocks:
            if self.mode == "selective":
                _leave_results_alone(block)
            block.forward = _recomputed(block, block.forward, self.mode)


def _recomputed(block: nn.Module, forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    policy = functools.partial(_policy, mode == "selective")

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if _is_traced():
            # Only these contexts are possible here, and they suffice: updates of buffers are not repeated.
            return create_selective_checkpoint_contexts(policy)
        first, second = nullcontext(), nullcontext()
        if mode == "selective":
            first, second = create_selective_checkpoint_contexts(policy)
        return first, _second_pass(block, second, _get_current_function_mode_stack())

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


def _is_traced() -> bool:
    """Return whether torch.compile is tracing a graph now. What it cannot trace runs eagerly."""
    # In torch 2.11 is_compiling() is false while operators of the graph are marked as kept or recomputed.
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


@contextmanager
def _second_pass(
    block: nn.Module, recomputing: AbstractContextManager[Any], modes: list[TorchFunctionMode]
) -> Iterator[None]:
    """Let the second pass over a microbatch update copies of the buffers, such as batch norm's statistics.

    (Without ``track_running_stats`` the second pass would save other tensors for backward than the first.)
    It runs under ``modes``, those of the first pass, which change what functions compute (``precision.fp32_ops``).
    """
    buffers = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    try:
        for module, originals in buffers:
            module._buffers.update({name: buffer.clone() for name, buffer in originals.items() if buffer is not None})
        with recomputing, ExitStack() as entered:
            active = _get_current_function_mode_stack()
            for mode in modes:
                if mode not in active:
                    entered.enter_context(mode)
            yield
    finally:
        for module, originals in buffers:
            module._buffers.update(originals)


def _leave_results_alone(block: nn.Module) -> None:
    """Make activation functions out-of-place: their input may be a result that is kept."""
    for module in block.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]


_KEPT = (
    # Not bmm: in attention that is not fused it makes the scores (T × T), which are cheap and large.
    *("mm", "addmm", "linear", "_scaled_mm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)


@functools.cache
def _keeps(operator: Any) -> bool:
    return any(operator is getattr(torch.ops.aten, name).default for name in _KEPT)


def _policy(selective: bool, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the results of expensive operators if ``selective``, else none."""
    from torch.utils.checkpoint import CheckpointPolicy

    keep = selective and _keeps(operator)
    if keep:  # attention with dropout is recomputed, so that later random numbers match
        names = [argument.name for argument in operator._schema.arguments]
        keep = not (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
