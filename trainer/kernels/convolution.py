"""Convolutions whose 16-bit weight gradients are partly uninitialised on this CPU: found by trials, computed in fp32.

oneDNN's bf16 kernels for processors with avx512_bf16 do not write those taps of a kernel that see only padding (such
as eight of the nine of a 3 × 3 kernel on images of 1 × 1). Their gradient should be 0, but is whatever was in that
memory before. See docs/onednn-conv-gradients.md.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from trainer.files import remembered
from trainer.hardware import Hardware, processor
from trainer.precision.islands import in_fp32

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ROUNDS = 3
_TOLERANCE = 2**-5
"""Relative to the largest entry: bf16 rounds a gradient by up to 2**-9 of its size, and sums in another order."""
_CHEAP = 2e7
"""Multiplications of a forward pass up to which layers without such taps are tried too: a few milliseconds."""


def unreliable(
    model: nn.Module, forward: Callable[[], object], dtype: torch.dtype, hardware: Hardware, times: float = 1
) -> list[str]:
    """Return the names of the convolutions whose weight gradients in ``dtype`` are partly unwritten on this CPU.

    Each distinct layer and shape is tried once, and the result is cached for this processor and torch. Under
    FakeTensorMode none is found, because fake tensors have no values.

    Args:
        model: on the CPU, in fp32.
        forward: calls it once, on a few samples, and restores the generators.
        dtype: the 16-bit dtype of the run.
        hardware: where it runs.
        times: the size of a microbatch relative to these samples.
    """
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if isinstance(layer, _KINDS)}
    if not layers or not computed_by_onednn(dtype) or detect_fake_mode() is not None:
        return []
    found = []
    for name, (shape, channels_last) in _inputs(model, layers, forward).items():
        layer = layers[name]
        shape = (max(1, round(shape[0] * times)), *shape[1:])
        if not (_sees_only_padding(layer, shape) or _products(layer, shape) <= _CHEAP):
            continue
        of = {"layer": repr(layer), "input": shape, "channels_last": channels_last, "dtype": str(dtype)}
        trial = functools.partial(written_whole, layer, shape, channels_last, dtype)
        if not remembered("convolutions", of | processor(hardware), trial):
            found.append(name)
    return found


def computed_by_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes convolutions of this dtype on this CPU; torch's own kernels are correct."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    supported: bool = getattr(torch.ops.mkldnn, name)()
    return supported


def written_whole(layer: Any, shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype) -> bool:
    """Return whether the weight gradient in ``dtype`` matches that in fp32, whatever was in memory before.

    Args:
        layer: a convolution; it is not changed.
        shape: of its input.
        channels_last: whether its input and its weight have that layout.
        dtype: the 16-bit dtype.
    """
    generator = torch.Generator().manual_seed(0)
    layout = _CHANNELS_LAST.get(len(shape), torch.contiguous_format) if channels_last else torch.contiguous_format
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.enable_grad():
        half = copy.deepcopy(layer).to(dtype).requires_grad_(True)
        half.weight.data = half.weight.data.to(memory_format=layout)
        x = torch.randn(shape, generator=generator).to(dtype).to(memory_format=layout)
        exact = copy.deepcopy(half).float()
        upstream = torch.randn(exact(x.float()).shape, generator=generator).to(dtype).to(memory_format=layout)
        expected = weight_gradient(exact, x.float(), upstream.float())
        allowed = _TOLERANCE * expected.abs().max()
        for _ in range(_ROUNDS):
            _poison(half.weight.nbytes, 2 * half.weight.nbytes, x.nbytes)
            error = (weight_gradient(half, x, upstream).float() - expected).abs()
            if not bool((error <= allowed).all()):  # NaN is not <= anything
                return False
    return True


def weight_gradient(layer: Any, x: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of the layer's weight; that of the input is computed too, as in training."""
    x = x.detach().requires_grad_()
    gradient: Tensor = torch.autograd.grad(layer(x), (layer.weight, x), upstream)[0]
    return gradient


def compute_in_fp32(model: nn.Module, names: list[str], dtype: torch.dtype) -> None:
    """Make these convolutions compute in fp32, forward and backward; their results stay in ``dtype``.

    Their weights keep their dtype: under autocast that is fp32, which is then not rounded.
    """
    for name in names:
        layer: Any = model.get_submodule(name)
        layer._conv_forward = in_fp32(layer._conv_forward, "cpu", dtype)


def warning(names: list[str], before: Path) -> str | None:
    """Return a warning for the user about the convolutions that are computed in fp32; None: there is nothing to report.

    ``before`` is ``precision.json`` of the run that is resumed, perhaps of another machine; it may be missing.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        earlier = json.loads(before.read_text(encoding="utf-8"))["effective"]["conv_in_fp32"]
        if sorted(earlier) != sorted(names):
            return (
                f"convolutions in fp32 were {', '.join(earlier) or 'none'} and are now {', '.join(names) or 'none'}: "
                "the processor has changed, and the resumed run is not bit for bit the same"
            )
    if not names:
        return None
    return (
        "these convolutions compute in fp32, because in 16 bits oneDNN leaves a part of their weight gradients "
        f"unwritten on this CPU (docs/onednn-conv-gradients.md): {', '.join(names)}"
    )


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _inputs(
    model: nn.Module, layers: dict[str, Any], forward: Callable[[], object]
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the shape of each layer's input, and whether it is channels_last, from one evaluation of the model."""
    seen: dict[str, tuple[tuple[int, ...], bool]] = {}

    def note(name: str, module: Any, args: tuple[Any, ...]) -> None:
        x = args[0]
        layout = _CHANNELS_LAST.get(x.ndim)
        tensors = (x, module.weight)  # for images of 1 × 1, and kernels of 1 × 1, both layouts are the same
        last = layout is not None and all(tensor.is_contiguous(memory_format=layout) for tensor in tensors)
        seen[name] = tuple(x.shape), last and not all(tensor.is_contiguous() for tensor in tensors)

    handles = [layer.register_forward_pre_hook(functools.partial(note, name)) for name, layer in layers.items()]
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            forward()
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return seen


def _sees_only_padding(layer: Any, shape: tuple[int, ...]) -> bool:
    """Return whether some tap of the kernel is outside of the image for every position of the output."""
    for dim, size in enumerate(shape[2:]):
        kernel, stride, dilation = layer.kernel_size[dim], layer.stride[dim], layer.dilation[dim]
        before, after = _padding(layer, dim)
        outputs = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
        for tap in range(kernel):
            places = (position * stride - before + tap * dilation for position in range(outputs))
            if not any(0 <= place < size for place in places):
                return True
    return False


def _padding(layer: Any, dim: int) -> tuple[int, int]:
    if layer.padding_mode != "zeros":  # padding is made of pixels
        return 0, 0
    if isinstance(layer.padding, str):
        total = layer.dilation[dim] * (layer.kernel_size[dim] - 1) if layer.padding == "same" else 0
        return total // 2, total - total // 2
    return layer.padding[dim], layer.padding[dim]


def _products(layer: Any, shape: tuple[int, ...]) -> float:
    """Return the multiplications of a forward pass, counted at stride 1."""
    products = float(shape[0]) * layer.weight.numel()
    for size, stride in zip(shape[2:], layer.stride, strict=True):
        products *= max(1, size // stride)
    return products


def _poison(*sizes: int) -> None:
    """Leave NaN (0xFF in every byte) in freed memory of these sizes, so that unwritten memory shows.

    Twice: glibc may return the first blocks to the system, and then keeps later ones of that size.
    """
    for _ in range(2):
        blocks = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in sizes for _ in range(4)]
        del blocks
