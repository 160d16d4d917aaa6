"""fp32 arithmetic on 16-bit operands, on CPUs: what the hardware that people train on does in 16 bits.

Matrix units multiply 16-bit operands, add the products up in fp32, and round once. torch's CPU kernels do so at speed
where the processor has instructions for it; elsewhere they are many times slower than in fp32. There
the operands are widened to fp32, torch's fp32 kernel is called, and its result is rounded once. Inside fused attention
all scores, probabilities and their gradients then stay fp32; in torch's 16-bit kernel only some do.

The kernels are replaced at torch's dispatch key ``CPU``, below autograd. So models, backward passes, optimizers,
recomputation and compiled code (inductor leaves matmuls and convolutions to these operators) need no change.

State of the process: which kernels are replaced, ``_process``. ``use`` sets it, and nothing else does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from mantissa.formats import BF16, FORMATS, FP16
from trainer.hardware import EMULATED, NATIVE, Hardware

AUTO, OWN, WIDE = KERNELS = ("auto", "native", "fp32")
"""auto: torch's own where they use instructions for the format; native: torch's own; fp32: fp32 arithmetic."""
UNSEEN = "native, but fp32 for taps that see only padding"
"""torch's own kernels, but for gradients of convolutions that oneDNN computes wrongly in 16 bits: those of taps that
lie outside of the image at every position (docs/precision.md)."""
MENDED = "native, but fp32 for taps that see only padding, matmuls for gradients of short attention"
"""The same, and gradients of attention over few tokens by matmuls: torch's kernel multiplies one small block after
another, which in bf16 took 1.15 (256 tokens) to 4 times (64) as long, on a Xeon with AMX (torch 2.15)."""
CONVOLUTIONS = "native, but fp32 for convolutions"
"""torch's own kernels, but for fp16 convolutions where the CPU has no AMX for fp16: oneDNN computes their gradients by
its reference code there; those of weights took 80 times as long as in fp32 and more, on a Xeon with avx512_fp16."""
_NAMES = {number.dtype: number.name for number in (BF16, FP16)}
_MANY = 8
"""Rows from which a matmul is one of many rows: with fewer, widening the other factor takes longer than the matmul."""
_SHORT = 256
"""Tokens up to which matmuls are faster than torch's backward kernel of attention; from 1,024 on they are slower."""
_SCORES = 2**21
"""Scores of attention that are kept at a time, so that they stay in the cache."""


def choose(dtype: torch.dtype | None, kernels: str, hardware: Hardware, convolves: bool = True) -> str:
    """Return how 16-bit operands are multiplied on this machine: ``native``, ``fp32``, or as the other constants say.

    With ``auto`` they are native where the processor has instructions for the format and oneDNN uses them.

    Args:
        dtype: the 16-bit format; None: of fp32.
        kernels: of ``KERNELS``.
        hardware: where it runs; other devices than CPUs keep their kernels.
        convolves: whether the model has convolutions, or may have some.
    """
    if dtype is None or hardware.device.type != "cpu":
        return OWN
    onednn = computed_by_onednn(dtype)
    if kernels == WIDE or (kernels == AUTO and not (onednn and hardware.support(_NAMES[dtype]) == NATIVE)):
        return WIDE
    if kernels == AUTO and dtype is BF16.dtype:
        return MENDED
    if not (convolves and onednn):
        return OWN
    return CONVOLUTIONS if kernels == AUTO and "amx_fp16" not in hardware.cpu_flags else UNSEEN


def convolves(model: nn.Module) -> bool:
    """Return whether a model has modules that convolve."""
    return any(isinstance(module, _ConvNd) for module in model.modules())


def computed_by_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes convolutions of this 16-bit format on this CPU."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    supported: bool = getattr(torch.ops.mkldnn, f"_is_mkldnn_{_NAMES[dtype]}_supported")()
    return supported


def not_timed_here(mode: str, hardware: Hardware, kernels: str = AUTO, convolves: bool = False) -> str | None:
    """Return why the speed of a run in ``mode`` on this machine is not that of its format, for a user; None: it is.

    ``kernels``: of ``precision.kernels``; ``convolves``: whether the model has convolutions.
    """
    if FORMATS[mode].number.scaled and hardware.support(mode) != NATIVE:
        return f"{EMULATED}: quality only, no speed"
    chosen, name = choose(FORMATS[mode].half, kernels, hardware, convolves), FORMATS[mode].number.name
    if chosen == CONVOLUTIONS:
        return f"{name} convolutions: fp32 arithmetic, this CPU has no AMX for {name}"
    if chosen != WIDE:
        return None
    why = f", this CPU has no {name} instructions" if hardware.support(mode) != NATIVE else ""
    return f"{name} matmuls, convolutions, attention: fp32 arithmetic{why}"


def in_short(not_timed: str | None) -> str:
    """Return what stands behind a speed for the reason from ``not_timed_here``; empty: there is none."""
    if not not_timed:
        return ""
    return f" ({EMULATED})" if is_emulated(not_timed) else " (fp32 arithmetic)"


def is_emulated(not_timed: str | None) -> bool:
    """Return whether by this reason from ``not_timed_here`` a run's memory is not that of its format either."""
    return not_timed is not None and not_timed.startswith(EMULATED)


# --- what replaces torch's kernels, and where ---

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_MATMULS = ("mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out")
OPERATORS = (*_MATMULS, "convolution", "convolution_backward", _FLASH, f"{_FLASH}_backward")
"""What takes most of a step in 16 bits where the processor lacks instructions. Layer norm, batch norm and GELU were
slower in fp32 arithmetic than in torch's own kernels."""


def _in_fp32(overload: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call torch's kernel with fp32 copies of its tensors of 16 bits, and round its results to these."""
    dtype = args[0].dtype

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype is dtype else value

    wide, options = [*map(widen, args)], {key: widen(value) for key, value in kwargs.items()}
    layout = torch.preserve_format
    if overload.startswith("convolution"):
        layout = _image_layout(*(args[1:10] if overload.endswith("_backward") else args))
    elif overload == f"{_FLASH}_backward":
        # The output of the forward pass is rounded, which can cost more than all other roundings: it is computed anew.
        wide[4:6] = getattr(torch.ops.aten, _FLASH).default(*wide[1:4], *wide[6:], **options)

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.to(dtype, memory_format=layout if tensor.ndim > 3 else torch.preserve_format)

    result = function(*wide, **options)
    if overload == _FLASH:
        return narrow(result[0]), *result[1:]  # the logarithms of sums are fp32 in any case
    if isinstance(result, Tensor):
        return narrow(result)
    return tuple(part if part is None else narrow(part) for part in result)


def _is_long_matmul(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a matmul is none of a linear layer's of few rows, for which torch is fast on every CPU."""
    x, y = args[-2:]
    return not (x.ndim > 1 and x.shape[-2] < _MANY and x.stride(-1) == 1 and y.stride(-1) != 1)


def _is_short(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether gradients of attention are those of few tokens; ``args`` are of torch's backward kernel."""
    _, query, key, *_, dropout, _ = args
    few = max(query.shape[2], key.shape[2]) <= _SHORT and query.shape[1] == key.shape[1]
    return few and not dropout and kwargs.get("attn_mask") is None


@torch.autocast("cpu", enabled=False)
def _attention_gradients(
    overload: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value as torch's backward kernel of attention does; ``args`` are its.

    Scores, shares and their gradients are fp32, as in torch's kernel, and rounded once for the last matmuls. (Dao et
    al., "FlashAttention", 2022, appendix B.2, has the formulas.)
    """
    upstream, query, key, value, _, _, _, causal = args
    heads, tokens, width = query.shape[1:]
    scale = kwargs.get("scale")
    scale = width**-0.5 if scale is None else scale
    future = torch.full((tokens, key.shape[2]), -torch.inf).triu_(1) if causal else torch.zeros(())
    # In the layout of torch's kernel, on which compiled code relies.
    gradients = tuple(torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype) for x in (query, key, value))
    samples = max(1, _SCORES // (heads * tokens * key.shape[2]))
    for *parts, dq, dk, dv in zip(
        *(tensor.split(samples) for tensor in (upstream, query, key, value, *gradients)), strict=True
    ):
        g, q, k, v = (part.flatten(0, 1) for part in parts)
        shares = (q.float().mul_(scale) @ k.float().mT).add_(future).softmax(2)
        slopes = torch._softmax_backward_data(g.float() @ v.float().mT, shares, 2, torch.float32).mul_(scale)
        shares, slopes = shares.to(q.dtype), slopes.to(q.dtype)
        for gradient, flat in ((dq, slopes @ k), (dk, slopes.mT @ q), (dv, shares.mT @ g)):
            gradient.copy_(flat.view(gradient.shape))
    return gradients


def _image_layout(input: Tensor, weight: Tensor, bias: Any, *options: Any) -> torch.memory_format:
    """Return the layout of torch's own 16-bit result, and of the gradients: compiled code relies on it."""
    backend = torch._C._select_conv_backend(input, weight, None, *options)
    layout: torch.memory_format = torch._C._conv_determine_backend_memory_format(input, weight, backend)
    return layout


def has_unseen_taps(args: Sequence[Any], kwargs: Any = None) -> bool:
    """Return whether some tap of a convolution sees only padding; ``args`` are those of its backward pass."""
    upstream, x, weight, _, stride, padding, dilation, transposed, *_ = args
    outer, inner = (upstream, x) if transposed else (x, upstream)
    for dim, (image, positions, taps) in enumerate(
        zip(outer.shape[2:], inner.shape[2:], weight.shape[2:], strict=True)
    ):
        step, pad, spread = (option[dim % len(option)] for option in (stride, padding, dilation))  # one may be for all
        for first in range(-pad, taps * spread - pad, spread):  # where a tap lies at the first position
            if not any(0 <= first + position * step < image for position in range(positions)):
                return True
    return False


# --- the table ---


def _always(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return True


class _Row(NamedTuple):
    """How an operator is replaced."""

    condition: Callable[[Sequence[Any], dict[str, Any]], bool]
    """Which calls; torch's own kernel takes the others."""
    replacement: Callable[..., Any] = _in_fp32


_TAPS = {"convolution_backward": _Row(has_unseen_taps)}
REPLACED: dict[str, dict[str, _Row]] = {
    WIDE: dict.fromkeys(OPERATORS, _Row(_always)) | dict.fromkeys(_MATMULS, _Row(_is_long_matmul)),
    CONVOLUTIONS: dict.fromkeys(("convolution", "convolution_backward"), _Row(_always)),
    UNSEEN: _TAPS,
    MENDED: _TAPS | {f"{_FLASH}_backward": _Row(_is_short, _attention_gradients)},
}
"""What ``choose`` returns: which operators it replaces, in which calls, by what."""


# --- the kernels in use ---


@dataclass
class _Process:
    """The kernels of this process."""

    chosen: dict[torch.dtype, str] = field(default_factory=dict)
    """Which of the constants is chosen, by the dtype of the operands; without ``OWN``."""
    replaced: set[str] = field(default_factory=set)
    """Operators whose kernels the library replaces."""
    library: torch.library.Library | None = None


_process = _Process()


def use(dtype: torch.dtype, chosen: str) -> None:
    """Replace torch's kernels for operands of ``dtype`` in this process, as ``choose`` returned.

    An operator that is replaced costs operands of other dtypes some 3 microseconds a call. So only the operators that
    some format asks for are replaced, and nothing is left when none does. No other thread may compute meanwhile:
    torch's registry is not safe against that.
    """
    _process.chosen.pop(dtype, None)
    if chosen != OWN:
        _process.chosen[dtype] = chosen
    wanted = {overload for choice in _process.chosen.values() for overload in REPLACED[choice]}
    if wanted == _process.replaced:
        return
    if _process.library is not None:
        _process.library._destroy()
        _process.library = None
    _process.replaced = wanted
    if wanted:
        _process.library = library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns that a kernel is replaced
            for overload in sorted(wanted):
                library.impl(overload, _replacement(overload), "CPU", with_keyset=True, allow_override=True)


def in_use(dtype: torch.dtype) -> bool:
    """Return whether operands of ``dtype`` are multiplied in fp32 arithmetic in this process."""
    return _process.chosen.get(dtype) == WIDE


def clear() -> None:
    """Let this process use torch's own kernels again."""
    for dtype in _NAMES:
        use(dtype, OWN)


@contextmanager
def restored() -> Iterator[None]:
    """Return a context that begins with torch's own kernels, and leaves those that were in use before."""
    before = dict(_process.chosen)
    clear()
    try:
        yield
    finally:
        for dtype in _NAMES:
            use(dtype, before.get(dtype, OWN))


def _replacement(overload: str) -> Callable[..., Any]:
    """Return the kernel of one overload: torch's own, or fp32 arithmetic where the operands' dtype asks for it."""
    own = torch.library.get_kernel(f"aten::{overload}", "CPU")
    functional = torch.library.get_kernel(f"aten::{overload.removesuffix('.out')}", "CPU")
    in_use = _process.chosen

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        dtype, out = args[0].dtype, kwargs.get("out")
        chosen = in_use.get(dtype)
        row = REPLACED[chosen].get(overload) if chosen else None  # it may be replaced for another format alone
        if (
            row is None
            or any(operand is not None and operand.dtype is not dtype for operand in (*args[:3], out))
            or not row.condition(args, kwargs)
        ):
            return own.call_boxed(keyset, *args, **kwargs)
        kwargs.pop("out", None)
        with torch._C.DisableTorchFunction():  # a mode, such as an operator policy, is for what the model calls
            result = row.replacement(overload, functools.partial(functional.call_boxed, keyset), args, kwargs)
            return result if out is None else out.resize_(result.shape).copy_(result)

    return kernel
