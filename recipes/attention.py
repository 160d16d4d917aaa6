"""How a causal model's attention is computed, and which way is faster on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trainer.files import remembered
from trainer.hardware import Hardware, processor
from trainer.recipe import Choice

FORMS = ("auto", "sdpa", "sdpa_fp32", "eager")
"""auto: what is measured to be faster; sdpa: torch's fused kernels; sdpa_fp32: these with queries, keys and values cast
to fp32; eager: a product, a softmax and a product, which keep scores of T × T (and so are never chosen by auto)."""
CLEARLY = 0.9
"""sdpa_fp32 is chosen where it takes less than this fraction of sdpa's time: equal speed is no reason to change."""
_SCORES = 2**19
"""Scores (samples × heads × tokens²) in a timed call; the time is proportional to their number."""
_ROUNDS, _BUDGET_S = 7, 0.5
_CAUSAL, _CAUSAL_FP32 = "sdpa_causal", "sdpa_fp32_causal"


class Shape(NamedTuple):
    """One call of attention."""

    samples: int
    heads: int
    tokens: int
    width: int
    """Of a head."""
    dropout: float


def choose(shape: Shape, dtype: torch.dtype | None, hardware: Hardware, deterministic: bool) -> Choice:
    """Return what ``recipe.attention=auto`` becomes.

    Measured on a CPU in a 16-bit format, once for each shape, format, number of threads, processor and torch. Elsewhere
    it is sdpa; with ``deterministic`` too, because a measurement is not repeatable.

    Args:
        shape: of a microbatch.
        dtype: the run's 16-bit format; None: it has none.
        hardware: where it runs.
        deterministic: whether a repeated run must have the same bits.
    """
    if hardware.device.type != "cpu" or dtype is None:
        return Choice(_KEY, "sdpa", "torch's fused kernels")
    if deterministic:
        return Choice(_KEY, "sdpa", "not measured, so that a run can be repeated (deterministic=true)")
    part = _part(shape)
    of = {"shape": part, "dtype": str(dtype), "threads": torch.get_num_threads()}
    times = remembered("attention", of | processor(hardware), lambda: measure(part, dtype))
    fastest = "sdpa_fp32" if times["sdpa_fp32"] < CLEARLY * times["sdpa"] else "sdpa"
    took = " and ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in times.items())
    where = f"{part.samples} × {part.heads} × {part.tokens} × {part.width}"
    return Choice(_KEY, fastest, f"measured at {where}, forward and backward: {took}")


_KEY = "recipe.attention"


def measure(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Return the shortest time of each fused form, forward and backward, in seconds; taken in turns.

    It is this thread's time on a core: the time of other programs does not count.
    """
    forms: dict[str, Callable[..., Tensor]] = {"sdpa": F.scaled_dot_product_attention, "sdpa_fp32": _fused_in_fp32}
    times = dict.fromkeys(forms, float("inf"))
    generator = torch.Generator().manual_seed(0)
    with unset_fake_temporarily(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        size = (shape.samples, shape.tokens, shape.heads, shape.width)  # as models have it; attention takes a view
        query, key, value, upstream = (
            torch.randn(size, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for _ in range(4)
        )
        state = torch.get_rng_state()  # dropout draws from it
        began = time.thread_time()
        for number in range(_ROUNDS + 1):
            for name, attend in forms.items():
                started = time.thread_time()
                output = attend(query, key, value, dropout_p=shape.dropout, is_causal=True)
                torch.autograd.grad(output, (query, key, value), upstream.detach())
                if number:  # the first is for warming up
                    times[name] = min(times[name], time.thread_time() - started)
            if number and time.thread_time() - began > _BUDGET_S:
                break
        torch.set_rng_state(state)
    return times


def use_causal_kernels(network: Any, in_fp32: bool = False) -> None:
    """Let a causal model with sdpa's attention call it without a mask: every sample is one text.

    Otherwise transformers checks in every forward pass whether texts are packed into a sample: the host waits for
    the device, and where it cannot read the values (a forecast of memory) a mask of T × T is made.

    Args:
        network: transformers' model.
        in_fp32: cast queries, keys and values to fp32 around it, and the result back.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if network.config._attn_implementation == "sdpa":
        # There are no masks of these names, so none is made.
        AttentionInterface.register(_CAUSAL, sdpa_attention_forward)
        AttentionInterface.register(_CAUSAL_FP32, _attention_in_fp32)
        network.config._attn_implementation = _CAUSAL_FP32 if in_fp32 else _CAUSAL


def _attention_in_fp32(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    with torch.autocast(query.device.type, enabled=False):  # it would cast them back
        output, weights = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, **options
        )
    return output.to(query.dtype), weights


def _fused_in_fp32(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    output = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), **options)
    return output.to(query.dtype)


def _part(shape: Shape) -> Shape:
    """Return fewer samples, or heads of one sample, that take a fraction of a second."""
    fitting = max(1, _SCORES // shape.tokens**2)
    if fitting < shape.heads:
        return shape._replace(samples=1, heads=fitting)
    return shape._replace(samples=min(shape.samples, fitting // shape.heads))
