"""fp32 arithmetic on 16-bit operands, on CPUs: what the hardware that people train on does in 16 bits.

Matrix units multiply 16-bit operands, add the products up in fp32, and round once. torch's CPU kernels do so at speed
where the processor has instructions for it; elsewhere they are many times slower than in fp32 (docs/speed.md). Here the
operands are widened to fp32, torch's fp32 kernel is called, and its result is rounded once: for each operator, form of
its operands and format in which that is measured to be faster. Inside fused attention all scores, probabilities and
their gradients then stay fp32; in torch's 16-bit kernel only some do.

The kernels are replaced at torch's dispatch key ``CPU``, below autograd. So models, backward passes, optimizers,
recomputation and compiled code (inductor leaves matmuls and convolutions to these operators) need no change.
docs/design.md compares this place with others.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mantissa.formats import BF16, FORMATS, FP16
from trainer.cache import cached
from trainer.hardware import EMULATED, NATIVE, Hardware, processor, threads

AUTO, OWN, WIDE = KERNELS = ("auto", "native", "fp32")
"""auto: what is measured to be faster; native: torch's own; fp32: fp32 arithmetic in every operator and form."""

Forms = dict[str, list[str]]
"""The operators (names of ``OPERATORS``) that use fp32 arithmetic, each with the forms of operands in which it does."""

FEW_ROWS = "NT, few rows"
"""A linear layer that generates text: torch has a fast kernel for it in 16 bits, also without 16-bit instructions."""
UNSEEN = "taps that see only padding"
"""The form of ``convolution_backward`` that oneDNN computes wrongly in 16 bits: docs/onednn-conv-gradients.md."""
_NAMES = {number.dtype: number.name for number in (BF16, FP16)}
_CLEARLY = {EMULATED: 0.8, NATIVE: 0.5}
"""fp32 arithmetic is chosen where it takes less than this fraction of the time of torch's own kernel. Where the
processor has instructions for the format, they gain more on larger operands than on the timed ones."""
_MANY = 8
"""Rows from which a matmul is one of many rows: with fewer, widening the other factor takes longer than the matmul."""
_ENOUGH_S = 0.01
"""Of timing for each form, of this thread's own time; at least two rounds."""


@dataclass(frozen=True)
class Operator:
    """Overloads of ``aten`` that share a kernel.

    The first ``operands`` arguments have the format, or are None. Of the results the first ``rounded`` are in the
    format, too; others are fp32 anyway.
    """

    overloads: tuple[str, ...]
    """The first one is timed."""
    examples: Callable[[], dict[str, tuple[Any, ...]]]
    """Returns fp32 arguments of the first overload, by form."""
    forms_of: Callable[[Sequence[Any]], tuple[str, ...]]
    """Returns the forms that a call's arguments have: what decides how fast torch's own kernel is, and whether it is
    right."""
    operands: int = 3
    rounded: int = 3
    layout: Callable[[Sequence[Any]], torch.memory_format] | None = None
    """Returns the layout of the results that are images; None: no result is one."""
    in_fp32: Callable[..., Any] | None = None
    """What computes it on fp32 operands; None: torch's kernel. Its first argument is that kernel."""


def choose(
    dtype: torch.dtype, kernels: str, hardware: Hardware, deterministic: bool = False, convolves: bool = True
) -> Forms:
    """Return the operators and forms that use fp32 arithmetic on 16-bit operands on this machine.

    With ``auto`` each form is timed both ways, in milliseconds, once for this processor and torch. With
    ``deterministic`` the processor's instructions decide instead, as a measurement may differ when it is repeated.

    Args:
        dtype: the 16-bit format.
        kernels: of ``KERNELS``.
        hardware: where it runs; other devices than CPUs keep their kernels.
        deterministic: whether a repeated run must have the same bits.
        convolves: whether the model may have convolutions; else they are left out.
    """
    if hardware.device.type != "cpu":
        return {}
    every = {name: sorted(operator.examples()) for name, operator in OPERATORS.items()}
    chosen: Forms = {}
    if kernels == WIDE or (kernels == AUTO and deterministic and hardware.support(_NAMES[dtype]) != NATIVE):
        for name, known in every.items():
            chosen[name] = [form for form in known if form != FEW_ROWS or kernels == WIDE]
    elif kernels == AUTO and not deterministic:
        clearly = _CLEARLY[hardware.support(_NAMES[dtype])]
        for name, forms in times(dtype, hardware).items():
            if faster := [form for form, took in forms.items() if took["fp32"] < clearly * took["native"]]:
                chosen[name] = sorted(faster)
    backward = chosen.get("convolution_backward", [])
    if backward != every["convolution_backward"] and computed_by_onednn(dtype):
        chosen["convolution_backward"] = [*backward, UNSEEN]
    return {name: forms for name, forms in chosen.items() if convolves or not name.startswith("convolution")}


def times(dtype: torch.dtype, hardware: Hardware) -> dict[str, dict[str, dict[str, float]]]:
    """Return the seconds of each operator in each form: of torch's ``native`` kernel, and of ``fp32`` arithmetic.

    Measured once for this processor and torch, then cached. It is one thread's own time, in which other programs do not
    count, whatever the number of threads of the run.
    """
    forms = {name: sorted(operator.examples()) for name, operator in OPERATORS.items()}
    of = processor(hardware) | {"dtype": str(dtype), "forms": forms}
    return cached("kernels", of, functools.partial(measure, dtype))


def measure(dtype: torch.dtype) -> dict[str, dict[str, dict[str, float]]]:
    """Measure ``times``, which takes a fraction of a second."""
    with threads(1), unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False), _unreplaced():
        return {
            name: {form: _times(operator, arguments, dtype) for form, arguments in operator.examples().items()}
            for name, operator in OPERATORS.items()
        }


def _times(operator: Operator, arguments: tuple[Any, ...], dtype: torch.dtype) -> dict[str, float]:
    native = getattr(torch.ops.aten, operator.overloads[0]).default
    narrow = [argument.to(dtype) if isinstance(argument, Tensor) else argument for argument in arguments]
    narrow[operator.operands :] = arguments[operator.operands :]
    ways = {"native": lambda: native(*narrow), "fp32": lambda: _in_fp32(operator, native, narrow, {}, dtype)}
    result = dict.fromkeys(ways, float("inf"))
    began, rounds = time.thread_time(), 0
    while rounds < 3 or time.thread_time() < began + _ENOUGH_S:
        for name, way in ways.items():
            started = time.thread_time()
            way()
            if rounds:  # the first is for warming up
                result[name] = min(result[name], time.thread_time() - started)
        rounds += 1
    return result


def computed_by_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes convolutions of this 16-bit format on this CPU."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    supported: bool = getattr(torch.ops.mkldnn, f"_is_mkldnn_{_NAMES[dtype]}_supported")()
    return supported


def sentence(mode: str, forms: Forms, hardware: Hardware) -> str | None:
    """Return what the user reads about the kernels of a run in ``mode``; None: they are torch's own."""
    used = [words for name, words in _WORDS.items() if forms.get(name)]
    if not used:
        return None
    name = FORMATS[mode].number.name
    why = f", this CPU has no {name} instructions" if hardware.support(mode) != NATIVE else ""
    return f"{name} {', '.join(used)}: fp32 arithmetic{why}"


_WORDS = {"mm": "matmuls", "bmm": "batched matmuls", "convolution": "convolutions", "attention": "attention"}


def not_timed(mode: str, forms: Forms, hardware: Hardware) -> str | None:
    """Return why the speed of a run is not that of its format; None: it is.

    Its matmuls, or convolutions other than grouped ones, use fp32 arithmetic.
    """
    deciding = {
        name: kept
        for name in ("mm", "convolution")
        if (kept := [form for form in forms.get(name, ()) if not form.startswith("grouped")])
    }
    return sentence(mode, deciding, hardware)


def not_timed_here(mode: str, hardware: Hardware, kernels: str = "auto", convolves: bool = True) -> str | None:
    """Return the same of runs in ``mode`` on this machine, with this ``precision.kernels``."""
    dtype = FORMATS[mode].half
    return None if dtype is None else not_timed(mode, choose(dtype, kernels, hardware, convolves=convolves), hardware)


# --- the kernels in use ---

_in_use: dict[torch.dtype, dict[str, frozenset[str]]] = {}
_library: torch.library.Library | None = None
_replaced: set[str] = set()
"""The operators whose kernels ``_library`` replaces."""


def use(dtype: torch.dtype, forms: Forms) -> None:
    """Replace torch's kernels for operands of ``dtype`` in this process, in these forms and no others.

    An operator that is replaced costs operands of other dtypes some 3 microseconds a call. So nothing is replaced in
    a process that never asks for it, only the operators that some format asks for, and nothing is left when none does.
    No other thread may compute meanwhile: torch's registry is not safe against that.
    """
    global _library, _replaced
    _in_use.pop(dtype, None)
    if forms:
        _in_use[dtype] = {name: frozenset(each) for name, each in forms.items()}
    wanted = {name for formats in _in_use.values() for name in formats}
    if wanted == _replaced:
        return
    if _library is not None:
        _library._destroy()
        _library = None
    _replaced = wanted
    if wanted:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns that a kernel is replaced
            for name in sorted(wanted):
                operator = OPERATORS[name]
                for overload in operator.overloads:
                    kernel = _replacement(name, operator, overload)
                    _library.impl(overload, kernel, "CPU", with_keyset=True, allow_override=True)


def in_use(dtype: torch.dtype, name: str) -> bool:
    """Return whether an operator uses fp32 arithmetic on operands of ``dtype`` in this process, in any form."""
    return bool(_in_use.get(dtype, {}).get(name))


def clear() -> None:
    """Let this process use torch's own kernels again."""
    for dtype in _NAMES:
        use(dtype, {})


@contextmanager
def _unreplaced() -> Iterator[None]:
    """Let operators take torch's own kernels."""
    kept = dict(_in_use)
    _in_use.clear()
    try:
        yield
    finally:
        _in_use.update(kept)


def _replacement(name: str, operator: Operator, overload: str) -> Callable[..., Any]:
    """Return the kernel of one overload: torch's own, or fp32 arithmetic where the operands have such a form."""
    every = frozenset(operator.examples())
    own = torch.library.get_kernel(f"aten::{overload}", "CPU")
    base = overload.removesuffix(".out")
    functional = torch.library.get_kernel(f"aten::{base}", "CPU")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        dtype, out = args[0].dtype, kwargs.get("out")
        forms = _in_use.get(dtype, {}).get(name)
        if (
            forms is None
            or any(each is not None and each.dtype is not dtype for each in (*args[: operator.operands], out))
            or (forms != every and forms.isdisjoint(operator.forms_of(args)))
        ):
            return own.call_boxed(keyset, *args, **kwargs)
        kwargs.pop("out", None)
        with torch._C.DisableTorchFunction():  # a mode, such as an operator policy, is for what the model calls
            result = _in_fp32(operator, functools.partial(functional.call_boxed, keyset), args, kwargs, dtype)
            return result if out is None else out.resize_(result.shape).copy_(result)

    return kernel


def _in_fp32(
    operator: Operator, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype
) -> Any:
    """Call torch's kernel with fp32 copies of the tensors of ``dtype``, and round its first results to ``dtype``."""

    def widen(each: Any) -> Any:
        return each.float() if isinstance(each, Tensor) and each.dtype is dtype else each

    if operator.in_fp32 is not None:
        function = functools.partial(operator.in_fp32, function)
    layout = torch.preserve_format if operator.layout is None else operator.layout(args)

    def narrow(each: Tensor) -> Tensor:
        return each.to(dtype, memory_format=layout if each.ndim > 3 else torch.preserve_format)

    result = function(*map(widen, args), **{key: widen(each) for key, each in kwargs.items()})
    if isinstance(result, Tensor):
        return narrow(result)
    return tuple(
        narrow(each) if each is not None and number < operator.rounded else each for number, each in enumerate(result)
    )


# --- the operators ---


def _matmul_form(args: Sequence[Any]) -> tuple[str, ...]:
    """Return how the factors of a matmul lie in memory: row by row (N), or transposed (T)."""
    factors = args[-2:]
    if any(factor.ndim < 2 for factor in factors):
        return ()  # torch refuses it
    layout = "".join("N" if factor.stride(-1) == 1 else "T" for factor in factors)
    return (layout if factors[0].shape[-2] >= _MANY else f"{layout}, few rows",)


def _matmuls(*batch: int) -> dict[str, tuple[Any, ...]]:
    size = 64 if batch else 128
    x, y = _random(*batch, size, size), _random(*batch, size, size)
    row, large = _random(*batch, 1, 4 * size), _random(*batch, 4 * size, 4 * size)
    # A layer's forward and backward pass have these, and its forward pass when text is generated.
    forms = {"NN": (x, y), "NT": (x, y.mT), "TN": (x.mT, y)}
    return forms | {"NN, few rows": (row, large), FEW_ROWS: (row, large.mT)}


def _kinds(input: Tensor, weight: Tensor, groups: int) -> str:
    kind = "grouped" if groups > 1 else "pointwise" if math.prod(weight.shape[2:]) == 1 else "dense"
    return f"{kind} {'channels_last' if input.stride(1) == 1 else 'contiguous'}"


def _image_layout(input: Tensor, weight: Tensor, *options: Any) -> torch.memory_format:
    """Return the layout of torch's own 16-bit result, and of the gradients: compiled code relies on it."""
    backend = torch._C._select_conv_backend(input, weight, *options)
    layout: torch.memory_format = torch._C._conv_determine_backend_memory_format(input, weight, backend)
    return layout


def _convolutions(backward: bool = False) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for width, kernel, groups in ((16, 3, 1), (32, 1, 1), (32, 3, 32)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = _random(4, width, 16, 16).to(memory_format=layout)
            weight = _random(width, width // groups, kernel, kernel).to(memory_format=layout)
            arguments = (x, weight, None, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
            form = _kinds(x, weight, groups)
            found[form] = (x.neg(), *arguments, [True, True, False]) if backward else arguments
    return found


def _forms_of_backward(args: Sequence[Any]) -> tuple[str, ...]:
    """Return the kind, and ``UNSEEN`` where some tap of the kernel lies outside of the image at every position."""
    upstream, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = args
    outer, inner = (upstream, x) if transposed else (x, upstream)
    for dim, (image, positions, taps) in enumerate(
        zip(outer.shape[2:], inner.shape[2:], weight.shape[2:], strict=True)
    ):
        step, pad, spread = (each[dim % len(each)] for each in (stride, padding, dilation))  # one may be for all
        for first in range(-pad, taps * spread - pad, spread):  # where a tap lies at the first position
            if not any(0 <= first + position * step < image for position in range(positions)):
                return _kinds(x, weight, groups), UNSEEN
    return (_kinds(x, weight, groups),)


def _attention(backward: bool = False) -> dict[str, tuple[Any, ...]]:
    # Half as many tokens, of half the size, would favour fp32 twice over where the processor has instructions.
    factors, options = [_random(1, 256, 2, 64).transpose(1, 2) for _ in range(3)], (0.0, True)
    if not backward:
        return {"any": (*factors, *options)}
    output, logsumexp = getattr(torch.ops.aten, _FLASH).default(*factors, *options)
    return {"any": (output.neg(), *factors, output, logsumexp, *options)}


def _attention_backward_in_fp32(
    kernel: Callable[..., Any],
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *options: Any,
    **masks: Any,
) -> Any:
    """Compute the output anew: that of the forward pass is rounded, which can cost more than all other roundings."""
    output, logsumexp = getattr(torch.ops.aten, _FLASH).default(query, key, value, *options, **masks)
    return kernel(upstream, query, key, value, output, logsumexp, *options, **masks)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
OPERATORS = {
    "mm": Operator(("mm", "mm.out", "addmm", "addmm.out"), _matmuls, _matmul_form),
    "bmm": Operator(("bmm", "bmm.out", "baddbmm", "baddbmm.out"), lambda: _matmuls(8), _matmul_form),
    "convolution": Operator(
        ("convolution",),
        _convolutions,
        lambda args: (_kinds(args[0], args[1], args[8]),),
        layout=lambda args: _image_layout(*args[:2], None, *args[3:]),
    ),
    "convolution_backward": Operator(
        ("convolution_backward",),
        functools.partial(_convolutions, backward=True),
        _forms_of_backward,
        layout=lambda args: _image_layout(*args[1:3], None, *args[4:10]),
    ),
    "attention": Operator((_FLASH,), _attention, lambda args: ("any",), rounded=1),
    "attention_backward": Operator(
        (f"{_FLASH}_backward",),
        functools.partial(_attention, backward=True),
        lambda args: ("any",),
        operands=5,
        in_fp32=_attention_backward_in_fp32,
    ),
}
"""What is replaced: what takes most of a step in 16 bits where the processor lacks instructions. Layer norm, batch norm
and GELU were slower in fp32 arithmetic than in torch's own kernels."""
