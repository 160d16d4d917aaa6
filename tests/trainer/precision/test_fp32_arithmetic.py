"""fp32 arithmetic on 16-bit operands: what it computes, when it is chosen, and what it leaves alone."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import CPU, compose, fit, same_bits, trainer_of
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.precision import kernels
from trainer.precision.kernels import OPERATORS, UNSEEN, choose, not_timed_here, use
from trainer.precision.modes import Precision
from trainer.run.start import train

BF16, FP16 = torch.bfloat16, torch.float16
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
EVERY = choose(BF16, "fp32", CPU)
AMX = Hardware(torch.device("cpu"), "AMX", 2**34, 2, None, frozenset({"amx_bf16", "avx512_bf16"}))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(function: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function returns by torch's kernels, and in fp32 arithmetic."""
    kernels.clear()
    native = function()
    for dtype in (BF16, FP16):
        use(dtype, EVERY)
    return native, function()


def error(result: Any, exact: Any) -> float:
    """The largest difference, relative to the largest exact element; NaN or a different infinity: infinite."""
    pairs = zip(_tensors(result), _tensors(exact), strict=True)
    errors = [((one.double() - other).abs().max() / other.abs().max()).item() for one, other in pairs]
    return max(math.inf if math.isnan(each) else each for each in errors)


CASES = {
    f"{name} {form}": (getattr(torch.ops.aten, operator.overloads[0]).default, arguments)
    for name, operator in OPERATORS.items()
    for form, arguments in operator.examples().items()
} | {
    "linear, long sum": (F.linear, (randn(5, 3000), randn(7, 3000, seed=1), randn(7, seed=2))),
    "baddbmm": (torch.baddbmm, (randn(3, 4, 6), randn(3, 4, 40, seed=1), randn(3, 40, 6, seed=2))),
    "matmul, broadcast": (torch.matmul, (randn(2, 3, 4, 50), randn(50, 6, seed=1))),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (randn(2, 9, 80), randn(2, 5, 80, seed=1))),
    "conv1d": (F.conv1d, (randn(2, 8, 40), randn(6, 8, 5, seed=1), randn(6, seed=2), 2, 2)),
    "conv3d": (F.conv3d, (randn(1, 6, 5, 6, 7), randn(4, 6, 3, 3, 3, seed=1))),
    "conv_transpose2d": (F.conv_transpose2d, (randn(2, 8, 5, 5), randn(8, 4, 3, 3, seed=1), randn(4, seed=2), 2)),
    "dilated, grouped": (F.conv2d, (randn(2, 8, 9, 9), randn(4, 2, 3, 3, seed=1), None, 1, 2, 2, 4)),
}


@HALVES
@pytest.mark.parametrize("case", CASES)
def test_no_result_is_further_from_the_exact_one_than_torchs_own(case: str, dtype: torch.dtype) -> None:
    function, arguments = CASES[case]
    operator = next((each for name, each in OPERATORS.items() if case.startswith(f"{name} ")), None)
    narrow: list[Any] = [each.to(dtype) if isinstance(each, Tensor) else each for each in arguments]
    if operator is not None:
        narrow[operator.operands :] = arguments[operator.operands :]
    exactly: Any = function  # a gradient is that of the exact output, not of the rounded one that is kept
    if operator is not None and operator.in_fp32 is not None:
        exactly = functools.partial(operator.in_fp32, function)
    exact = exactly(*(each.double() if isinstance(each, Tensor) else each for each in narrow))
    native, wide = both(lambda: function(*narrow))
    # Half a unit in the last place of the largest element is the least that rounding can leave.
    assert error(wide, exact) <= max(error(native, exact), torch.finfo(dtype).eps / 2)
    again = function(*narrow)
    assert same_bits(again, wide)
    kinds = [(each.dtype, each.shape, each.stride()) for each in _tensors(native)]
    assert [(each.dtype, each.shape, each.stride()) for each in _tensors(wide)] == kinds


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]


@HALVES
def test_a_result_is_the_fp32_one_rounded_once(dtype: torch.dtype) -> None:
    x, y, bias = randn(40, 300, dtype=dtype), randn(50, 300, dtype=dtype, seed=1), randn(50, dtype=dtype, seed=2)
    use(dtype, EVERY)
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


@HALVES
def test_overflow_underflow_and_nan_are_the_formats(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    use(dtype, EVERY)
    one = torch.ones(1, 1, dtype=dtype)
    biggest, tiny = one * info.max, one * info.smallest_normal
    assert torch.isinf(torch.addmm(biggest, biggest, one))
    assert torch.equal(torch.addmm(-biggest, biggest, one), one * 0)  # the sum is fp32: no overflow on the way
    subnormal = info.smallest_normal * info.eps
    assert (tiny @ (one * info.eps)).item() == subnormal
    assert (tiny @ (one * info.eps / 4)).item() == 0
    assert torch.isnan(torch.tensor([[math.inf, 1.0]], dtype=dtype) @ torch.zeros(2, 1, dtype=dtype))
    assert torch.isnan(F.conv2d(one[None, None] * math.nan, one[None, None]))
    assert not torch.isnan(torch.addmm(one * math.nan, one, one, beta=0))


@HALVES
def test_results_go_where_they_are_asked_for(dtype: torch.dtype) -> None:
    x, y = randn(4, 30, dtype=dtype), randn(30, 5, dtype=dtype, seed=1)
    use(dtype, EVERY)
    expected = (x.float() @ y.float()).to(dtype)
    out = torch.empty(5, 4, dtype=dtype).t()
    assert torch.mm(x, y, out=out) is out
    assert out.stride() == (1, 4)
    assert torch.equal(out, expected)
    assert torch.equal(torch.mm(x, y, out=torch.empty(0, dtype=dtype)), expected)


def test_other_formats_keep_their_bits_and_nothing_is_left_behind() -> None:
    x, y = randn(30, 40), randn(40, 50, seed=1)
    before = [torch.mm(x, y), torch.mm(x.half(), y.half())]
    use(BF16, EVERY)
    assert kernels.in_use(BF16, "mm")
    assert same_bits([torch.mm(x, y), torch.mm(x.half(), y.half())], before)
    assert torch.equal(torch.mm(x.long(), y.long()), x.long() @ y.long())
    use(BF16, {})
    assert not kernels.in_use(BF16, "mm")
    assert kernels._library is None


def test_only_the_chosen_forms_and_operators_are_replaced() -> None:
    """On a CPU with 16-bit instructions only some gradients of convolutions are: matmuls must not pay for that."""
    x, y = randn(64, 600, dtype=FP16), randn(600, 64, dtype=FP16, seed=1)
    transposed = y.t().contiguous().t()
    own = [x @ y, x @ transposed]
    wide = (x.float() @ y.float()).half()
    assert not torch.equal(own[1], wide)  # else this test would not see a difference
    use(FP16, {"mm": ["NN"]})
    assert torch.equal(x @ y, wide)
    assert torch.equal(x @ transposed, own[1])
    use(BF16, {"convolution_backward": [UNSEEN]})
    assert kernels._replaced == {"mm", "convolution_backward"}
    use(FP16, {"mm": ["NT"]})
    assert torch.equal(x @ transposed, wide)
    assert torch.equal(x @ y, own[0])
    use(FP16, {})
    assert kernels._replaced == {"convolution_backward"}


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call that used fp32 arithmetic."""
    calls: list[str] = []
    compute = kernels._in_fp32

    def counted(*args: Any) -> Any:
        calls.append("fp32")
        return compute(*args)

    monkeypatch.setattr(kernels, "_in_fp32", counted)
    return calls


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_and_recomputed_code_takes_the_same_path(backend: str, widened: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).to(BF16)
    x = randn(4, 16, dtype=BF16)
    use(BF16, EVERY)

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(function(x).float().square().sum(), list(model.parameters())))

    eager = gradients(model)
    assert len(widened) == 5  # two products forward, three backward: the input needs no gradient
    again = gradients(lambda x: checkpoint(model, x, use_reentrant=False))
    assert len(widened) == 5 + 6  # the last product is not needed again
    assert same_bits(again, eager)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, backend=backend))
    assert len(widened) == 11 + 5
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


# --- which kernels are chosen ---


def times(native: float, fp32: float) -> dict[str, Any]:
    return {
        name: {form: {"native": native, "fp32": fp32} for form in operator.examples()}
        for name, operator in OPERATORS.items()
    }


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a measurement finds; changes count."""
    found = times(1.0, 0.1)
    monkeypatch.setattr(kernels, "times", lambda dtype, hardware: found)
    monkeypatch.setattr(kernels, "computed_by_onednn", lambda dtype: False)
    return found


def test_fp32_arithmetic_is_chosen_where_it_is_clearly_faster(measured: dict[str, Any]) -> None:
    assert choose(BF16, "auto", CPU) == EVERY
    measured["mm"]["NT"] = {"native": 1.0, "fp32": 0.85}
    measured["bmm"]["NT"] = {"native": 1.0, "fp32": 0.6}
    measured["attention"]["any"] = {"native": 1.0, "fp32": 3.0}
    chosen = choose(BF16, "auto", CPU)
    assert (chosen["mm"], chosen["bmm"]) == ([form for form in EVERY["mm"] if form != "NT"], EVERY["bmm"])
    assert "attention" not in chosen
    # Its own instructions gain on larger operands.
    assert choose(BF16, "auto", AMX)["bmm"] == [form for form in EVERY["bmm"] if form != "NT"]
    assert choose(BF16, "native", CPU) == {}
    assert choose(BF16, "fp32", AMX) == EVERY
    assert choose(BF16, "auto", Hardware(torch.device("cuda", 0), "H100", 2**36, 8, (9, 0))) == {}


def test_a_repeatable_run_does_not_ask_the_clock(measured: dict[str, Any]) -> None:
    measured.clear()
    all_but_text = {name: [form for form in forms if form != kernels.FEW_ROWS] for name, forms in EVERY.items()}
    assert choose(BF16, "auto", CPU, deterministic=True) == all_but_text
    assert choose(BF16, "auto", AMX, deterministic=True) == {}
    assert choose(FP16, "auto", AMX, deterministic=True) == all_but_text  # it has none for fp16


def test_it_is_measured_once_for_a_processor_and_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path))
    asked: list[torch.dtype] = []
    monkeypatch.setattr(kernels, "measure", lambda dtype: asked.append(dtype) or times(1, 2))
    for dtype, hardware in ((BF16, CPU), (BF16, CPU), (FP16, CPU), (BF16, AMX)):
        assert OWN_TIMES(dtype, hardware) == times(1, 2)
    assert asked == [BF16, FP16, BF16]


OWN_TIMES = kernels.times


@HALVES
def test_a_measurement_times_every_form_of_torchs_own_kernels_and_leaves_no_trace(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(dtype, EVERY)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = kernels.measure(dtype)
    assert {name: sorted(forms) for name, forms in found.items()} == EVERY
    assert all(0 < took[way] < 10 for forms in found.values() for took in forms.values() for way in took)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert kernels.in_use(dtype, "mm")
    monkeypatch.setattr(kernels, "_in_fp32", lambda *_: None)
    kernels.measure(dtype)  # a replaced kernel would return None where torch needs a tensor


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
        forms = OPERATORS["convolution_backward"].forms_of((output.detach(), x, weight, None, *options))
        answers.append(UNSEEN in forms)
        assert answers[-1] == bool((gradient == 0).any()), (transposed, size, shape, padding)
    assert len(answers) > 80
    assert set(answers) == {False, True}


@HALVES
def test_onednns_unwritten_gradients_are_computed_in_fp32_whatever_is_chosen(
    dtype: torch.dtype, widened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "computed_by_onednn", lambda dtype: True)
    both_native = replace(AMX, cpu_flags=frozenset({"avx512_bf16", "avx512_fp16"}))
    for setting, deterministic in (("native", False), ("auto", True)):
        assert choose(dtype, setting, both_native, deterministic) == {"convolution_backward": [UNSEEN]}
    assert choose(dtype, "fp32", both_native) == EVERY

    def gradient(size: int) -> Tensor:
        weight = randn(4, 4, 3, 3, dtype=dtype).requires_grad_()
        output = F.conv2d(randn(64, 4, size, size, dtype=dtype, seed=1), weight, stride=2, padding=1)
        return torch.autograd.grad(output, weight, randn(*output.shape, dtype=dtype, seed=2))[0]

    use(dtype, {"convolution_backward": [UNSEEN]})
    damaged = gradient(1).flatten(2)
    assert widened == ["fp32"]
    assert (damaged[..., [0, 1, 2, 3, 5, 6, 7, 8]] == 0).all()
    assert (damaged[..., 4] != 0).all()
    gradient(8)
    assert widened == ["fp32"]


# --- in a run ---


def test_a_run_says_what_it_computes_and_records_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("recipe=bignet", "recipe.width=16", "recipe.layers=2", "batch_size=4", "steps=1", "device=cpu")
    monkeypatch.setattr("trainer.run.start.detect", lambda device: CPU)
    wide = ("precision=bf16", "precision.kernels=fp32", "tracking=local", "checkpoint=none", f"output_dir={tmp_path}")
    run = train(compose(*small, *wide, "run_name=wide"))
    manifest = json.loads((tmp_path / "wide" / "precision.json").read_text())
    assert manifest["effective"]["fp32_arithmetic"] == choose(BF16, "fp32", CPU, convolves=False)
    assert run["fp32_arithmetic"] == "bf16 matmuls: fp32 arithmetic, this CPU has no bf16 instructions"


def test_why_the_speed_of_a_run_is_not_that_of_its_format(measured: dict[str, Any]) -> None:
    words = "fp16 matmuls, convolutions: fp32 arithmetic, this CPU has no fp16 instructions"
    assert not_timed_here("fp16_pure", CPU) == words
    assert [not_timed_here("fp32", CPU), not_timed_here("bf16", CPU, "native")] == [None, None]
    assert not_timed_here("bf16", AMX, "fp32") == "bf16 matmuls, convolutions: fp32 arithmetic"
    few = {"attention": ["any"], "convolution": ["grouped contiguous"], "convolution_backward": [UNSEEN]}
    assert kernels.not_timed("bf16", few, AMX) is None


def test_options_without_an_effect_are_refused() -> None:
    with pytest.raises(UserError, match=r"precision.kernels=fast is unknown; use precision.kernels=auto\|native\|fp32"):
        Precision("bf16", kernels="fast")
    with pytest.raises(UserError, match=r"precision\.kernels has no effect with precision=fp32"):
        Precision("fp32", kernels="native")


@pytest.mark.parametrize("mode", ["bf16", "fp16", "bf16_master", "fp16_pure"])
def test_a_trainer_multiplies_as_it_is_asked_to(mode: str, widened: list[str]) -> None:
    line = ("recipe=bignet", "recipe.width=32", "recipe.layers=3", "data.samples=64", f"precision={mode}")
    fit(trainer_of(*line, "batch_size=4", "steps=1", "precision.kernels=native"))
    assert widened == []
    fit(trainer_of(*line, "batch_size=4", "steps=1", "precision.kernels=fp32"))
    assert widened
