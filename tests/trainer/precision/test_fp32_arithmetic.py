"""fp32 arithmetic on 16-bit operands: what it computes, when it is chosen, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import BIGNET, CPU, GPU, fit, same_bits, trainer_of
from trainer.hardware import Hardware
from trainer.precision import kernels
from trainer.precision.kernels import (
    CONVOLUTIONS,
    MENDED,
    OPERATORS,
    OWN,
    UNSEEN,
    WIDE,
    choose,
    has_unseen_taps,
    not_timed_here,
    use,
)

BF16, FP16 = torch.bfloat16, torch.float16
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
AMX = Hardware(torch.device("cpu"), "AMX", 2**34, 2, None, frozenset({"amx_bf16", "avx512_bf16"}))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(function: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function returns by torch's kernels, and in fp32 arithmetic."""
    kernels.clear()
    native = function()
    for dtype in (BF16, FP16):
        use(dtype, WIDE)
    return native, function()


def error(result: Any, exact: Any) -> float:
    """The largest difference, relative to the largest exact element; NaN or a different infinity: infinite."""
    pairs = zip(_tensors(result), _tensors(exact), strict=True)
    errors = [((one.double() - other).abs().max() / other.abs().max()).item() for one, other in pairs]
    return max(math.inf if math.isnan(each) else each for each in errors)


def images(channels: int, kernel: int, groups: int, layout: torch.memory_format) -> tuple[Tensor, Tensor, Any]:
    """An image, the weight of a convolution, and its other arguments."""
    x, weight = randn(4, channels, 16, 16), randn(channels, channels // groups, kernel, kernel, seed=1)
    options = (None, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    return x.to(memory_format=layout), weight.to(memory_format=layout), options


ATEN = torch.ops.aten
IMAGES = {
    f"{width} channels, {groups} groups, {layout}": images(width, kernel, groups, layout)
    for width, kernel, groups in ((16, 3, 1), (32, 1, 1), (32, 3, 32))
    for layout in (torch.contiguous_format, torch.channels_last)
}
QKV = [randn(1, 256, 2, 64, seed=seed).transpose(1, 2) for seed in range(3)]
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mm": (torch.mm, (randn(128, 128), randn(128, 128, seed=1))),
    "mm, transposed": (torch.mm, (randn(128, 128).mT, randn(128, 128, seed=1))),
    "bmm": (torch.bmm, (randn(8, 64, 64), randn(8, 64, 64, seed=1).mT)),
    "linear, long sum": (F.linear, (randn(5, 3000), randn(7, 3000, seed=1), randn(7, seed=2))),
    "baddbmm": (torch.baddbmm, (randn(3, 4, 6), randn(3, 4, 40, seed=1), randn(3, 40, 6, seed=2))),
    "matmul, broadcast": (torch.matmul, (randn(2, 3, 4, 50), randn(50, 6, seed=1))),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (randn(2, 9, 80), randn(2, 5, 80, seed=1))),
    "conv1d": (F.conv1d, (randn(2, 8, 40), randn(6, 8, 5, seed=1), randn(6, seed=2), 2, 2)),
    "conv3d": (F.conv3d, (randn(1, 6, 5, 6, 7), randn(4, 6, 3, 3, 3, seed=1))),
    "conv_transpose2d": (F.conv_transpose2d, (randn(2, 8, 5, 5), randn(8, 4, 3, 3, seed=1), randn(4, seed=2), 2)),
    "dilated, grouped": (F.conv2d, (randn(2, 8, 9, 9), randn(4, 2, 3, 3, seed=1), None, 1, 2, 2, 4)),
    **{
        f"convolution, {name}": (ATEN.convolution.default, (x, w, *options)) for name, (x, w, options) in IMAGES.items()
    },
    **{
        f"convolution_backward, {name}": (
            ATEN.convolution_backward.default,
            (x.neg(), x, w, *options, [True, True, False]),
        )
        for name, (x, w, options) in IMAGES.items()
    },
    "attention": (getattr(ATEN, kernels._FLASH).default, (*QKV, 0.0, True)),
}


@HALVES
@pytest.mark.parametrize("case", CASES)
def test_no_result_is_further_from_the_exact_one_than_torchs_own(case: str, dtype: torch.dtype) -> None:
    function, arguments = CASES[case]
    narrow = [each.to(dtype) if isinstance(each, Tensor) else each for each in arguments]
    exact = function(*(each.double() if isinstance(each, Tensor) else each for each in narrow))
    native, wide = both(lambda: function(*narrow))
    # Half a unit in the last place of the largest element is the least that rounding can leave.
    assert error(wide, exact) <= max(error(native, exact), torch.finfo(dtype).eps / 2)
    kinds = [(each.dtype, each.shape, each.stride()) for each in _tensors(native)]
    assert [(each.dtype, each.shape, each.stride()) for each in _tensors(wide)] == kinds


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]


@HALVES
def test_a_result_is_the_fp32_one_rounded_once(dtype: torch.dtype) -> None:
    x, y, bias = randn(40, 300, dtype=dtype), randn(50, 300, dtype=dtype, seed=1), randn(50, dtype=dtype, seed=2)
    use(dtype, WIDE)
    assert torch.equal(x @ y.t(), (x.float() @ y.float().t()).to(dtype))
    expected = torch.addmm(bias.float(), x.float(), y.float().t(), beta=0.5, alpha=3)
    assert torch.equal(torch.addmm(bias, x, y.t(), beta=0.5, alpha=3), expected.to(dtype))
    # The bias is added before rounding, not after.
    assert torch.equal(F.linear(x, y, bias), F.linear(x.float(), y.float(), bias.float()).to(dtype))
    # Gradients of attention do not see its rounded output.
    narrow = [randn(1, 2, 48, 8, dtype=dtype, seed=seed).requires_grad_() for seed in range(3)]
    wide = [each.detach().float().requires_grad_() for each in narrow]
    upstream = randn(1, 2, 48, 8, dtype=dtype, seed=3)
    found = torch.autograd.grad(F.scaled_dot_product_attention(*narrow), narrow, upstream)
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*wide), wide, upstream.float())
    assert same_bits(found, tuple(each.to(dtype) for each in exact))


def test_other_formats_keep_their_bits_and_nothing_is_left_behind() -> None:
    x, y = randn(30, 40), randn(40, 50, seed=1)
    before = [torch.mm(x, y), torch.mm(x.half(), y.half())]
    use(BF16, WIDE)
    assert kernels.in_use(BF16)
    assert same_bits([torch.mm(x, y), torch.mm(x.half(), y.half())], before)
    assert torch.equal(torch.mm(x.long(), y.long()), x.long() @ y.long())
    use(BF16, OWN)
    assert not kernels.in_use(BF16)
    assert kernels._process.library is None


def test_only_what_is_asked_for_is_replaced(widened: list[str]) -> None:
    """On a CPU with 16-bit instructions only some gradients of convolutions are: matmuls must not pay for that."""
    use(BF16, UNSEEN)
    assert kernels._process.replaced == {"convolution_backward"}
    use(FP16, WIDE)
    assert kernels._process.replaced == set(OPERATORS)
    x, y = randn(64, 600), randn(600, 64, seed=1)
    x.bfloat16() @ y.bfloat16()
    assert widened == []
    x.half() @ y.half()
    assert widened == ["mm"]
    x[:1].half() @ y.half().t().contiguous().t()  # a linear layer that generates text has a fast kernel everywhere
    assert widened == ["mm"]
    use(FP16, OWN)
    assert kernels._process.replaced == {"convolution_backward"}
    use(BF16, MENDED)
    use(FP16, UNSEEN)
    assert kernels._process.replaced == {"convolution_backward", f"{kernels._FLASH}_backward"}
    attention_gradients(*(randn(1, 2, 8, 8, dtype=FP16, seed=seed) for seed in range(4)))
    assert widened == ["mm"]


def calls_of(replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call that was replaced by this."""
    calls: list[str] = []

    def counted(overload: str, *args: Any) -> Any:
        calls.append(overload)
        return replacement(overload, *args)

    for rows in kernels.REPLACED.values():
        for overload, row in rows.items():
            if row.replacement is replacement:
                monkeypatch.setitem(rows, overload, row._replace(replacement=counted))
    return calls


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call that used fp32 arithmetic."""
    return calls_of(kernels._in_fp32, monkeypatch)


def test_compiled_and_recomputed_code_takes_the_same_path(widened: list[str]) -> None:
    """Inductor leaves products to torch; there is nothing else for it to compile here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)).to(BF16)
    x = randn(8, 16, dtype=BF16)
    use(BF16, WIDE)

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(function(x).float().square().sum(), list(model.parameters())))

    eager = gradients(model)
    assert len(widened) == 5  # two products forward, three backward: the input needs no gradient
    again = gradients(lambda x: checkpoint(model, x, use_reentrant=False))
    assert len(widened) == 5 + 6  # the last product is not needed again
    assert same_bits(again, eager)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model))
    assert len(widened) == 11 + 5
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


# --- which kernels are chosen ---


@pytest.mark.parametrize(
    ("dtype", "hardware", "onednn", "chosen"),
    [
        (BF16, CPU, False, WIDE),
        (BF16, AMX, True, MENDED),
        (FP16, replace(AMX, cpu_flags=frozenset({"amx_bf16", "avx512_fp16"})), True, CONVOLUTIONS),
        (FP16, replace(AMX, cpu_flags=frozenset({"amx_fp16", "avx512_fp16"})), True, UNSEEN),
        (FP16, AMX, False, WIDE),
        (BF16, CPU, True, WIDE),  # AVX-512: without 16-bit instructions, but oneDNN has bf16 kernels for it
        (BF16, AMX, False, WIDE),  # ONEDNN_MAX_CPU_ISA=AVX2
        (FP16, GPU, True, OWN),
    ],
)
def test_native_kernels_need_instructions_that_onednn_uses(
    dtype: torch.dtype, hardware: Hardware, onednn: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "computed_by_onednn", lambda dtype: onednn)
    assert choose(dtype, "auto", hardware) == chosen
    name = "bf16" if dtype is BF16 else "fp16"
    assert bool(not_timed_here(name, hardware, convolves=True)) == (chosen in (WIDE, CONVOLUTIONS))
    if hardware.device.type == "cpu":
        assert choose(dtype, "native", hardware, convolves=False) == OWN
        assert choose(dtype, "fp32", hardware) == WIDE


# --- gradients that oneDNN leaves unwritten ---


def test_which_kernels_have_taps_that_see_only_padding() -> None:
    """Those whose weight gradient is 0 though every pixel and every result has a share in it."""
    shapes = [(3, 1, 1), (3, 2, 1), (5, 1, 1), (7, 1, 1), (3, 1, 2)]
    answers = []
    for transposed, size, shape, padding in product([False, True], [1, 2, 3, 5, 8], shapes, [0, 1, 3]):
        kernel, stride, dilation = shape
        reach = dilation * (kernel - 1) + 1
        if ((size - 1) * stride - 2 * padding + reach < 1) if transposed else (size + 2 * padding < reach):
            continue  # torch has no such layer
        convolve = F.conv_transpose2d if transposed else F.conv2d
        x, weight = torch.ones(1, 1, size, size), torch.ones(1, 1, kernel, kernel, requires_grad=True)
        output = convolve(x, weight, stride=stride, padding=padding, dilation=dilation)
        (gradient,) = torch.autograd.grad(output.sum(), weight)
        options = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], 1, [True, True, False])
        answers.append(has_unseen_taps((output.detach(), x, weight, None, *options)))
        assert answers[-1] == bool((gradient == 0).any()), (transposed, size, shape, padding)
    assert len(answers) > 80
    assert set(answers) == {False, True}


@HALVES
def test_onednns_unwritten_gradients_are_computed_in_fp32_whatever_is_chosen(
    dtype: torch.dtype, widened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "computed_by_onednn", lambda dtype: True)
    both_native = replace(AMX, cpu_flags=frozenset({"avx512_bf16", "amx_fp16"}))
    assert choose(dtype, "native", both_native) == UNSEEN

    def gradient(size: int) -> Tensor:
        weight = randn(4, 4, 3, 3, dtype=dtype).requires_grad_()
        output = F.conv2d(randn(64, 4, size, size, dtype=dtype, seed=1), weight, stride=2, padding=1)
        return torch.autograd.grad(output, weight, randn(*output.shape, dtype=dtype, seed=2))[0]

    use(dtype, choose(dtype, "auto", both_native))
    damaged = gradient(1).flatten(2)
    assert widened == ["convolution_backward"]
    assert (damaged[..., [0, 1, 2, 3, 5, 6, 7, 8]] == 0).all()
    assert (damaged[..., 4] != 0).all()
    gradient(8)
    assert widened == ["convolution_backward"]
    use(dtype, CONVOLUTIONS)
    gradient(8)
    assert widened[1:] == ["convolution", "convolution_backward"]


# --- gradients of attention over few tokens ---


def attention_gradients(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, **options: Any) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    output = F.scaled_dot_product_attention(*inputs, **options)
    return list(torch.autograd.grad(output, inputs, upstream))


ATTENTION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((3, 2, 40, 16), {"is_causal": True}),
    "as many tokens as are few": ((1, 2, kernels._SHORT, 8), {"is_causal": True}),
    "of all tokens": ((2, 3, 33, 8), {}),
    "a scale": ((2, 3, 33, 8), {"scale": 0.9}),
    "one token": ((2, 2, 1, 8), {"is_causal": True}),
}


@pytest.mark.parametrize("spread", [1.0, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("case", ATTENTION)
def test_gradients_of_short_attention_are_as_exact_as_torchs(
    case: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, options = ATTENTION[case]
    monkeypatch.setattr(kernels, "_SCORES", 2 * shape[1] * shape[2] ** 2)  # several parts, the last one smaller
    query, key, value, upstream = (
        randn(*(shape[i] for i in (0, 2, 1, 3)), dtype=BF16, seed=seed).transpose(1, 2) for seed in range(4)
    )
    tensors = (query * spread, key * spread, value, upstream)
    exact = attention_gradients(*(each.double() for each in tensors), **options)
    kernels.clear()
    own = attention_gradients(*tensors, **options)
    calls = calls_of(kernels._attention_gradients, monkeypatch)
    use(BF16, MENDED)
    mended = attention_gradients(*tensors, **options)
    assert calls
    for name, one, other, true in zip("qkv", mended, own, exact, strict=True):
        assert (one.dtype, one.stride()) == (BF16, other.stride()), name
        errors = [(each.double() - true).norm() for each in (one, other)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6, (name, errors)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(kernels._SHORT + 1, {}), (8, {"attn_mask": torch.zeros(8, 8, dtype=BF16)})],
    ids=["many tokens", "a mask"],
)
def test_other_attention_keeps_torchs_gradients(tokens: int, options: dict[str, Any]) -> None:
    tensors = [randn(1, 2, tokens, 8, dtype=BF16, seed=seed) for seed in range(4)]
    kernels.clear()
    own = attention_gradients(*tensors, **options)
    use(BF16, MENDED)
    assert same_bits(attention_gradients(*tensors, **options), own)


# --- in a run ---


@pytest.mark.parametrize("mode", ["bf16", "fp16_pure"])
def test_a_trainer_multiplies_as_it_is_asked_to(mode: str, widened: list[str]) -> None:
    fit(trainer_of(*BIGNET, f"precision={mode}", "steps=1", "precision.kernels=native"))
    assert widened == []
    fit(trainer_of(*BIGNET, f"precision={mode}", "steps=1", "precision.kernels=fp32"))
    assert widened
