"""Model FLOPs: against formulas made by hand, and against torch's counter of a whole step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.helpers import GPT2, needs_chunks, trainer_of
from trainer.profiling import utilisation
from trainer.profiling.flops import ModelFlops
from trainer.profiling.utilisation import Utilisation, data_sheet
from trainer.run.record import observed

LAYERS, WIDTH, CONTEXT, VOCABULARY = 4, 128, 16, 64
PRODUCTS = 12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH
"""Weights of GPT-2's products: attention's four, the two of the MLP, the output layer."""
GPT2_FLOPS = 6 * PRODUCTS + 12 * LAYERS * CONTEXT * WIDTH
"""Of a token: 6N, and 12LHQT of attention."""


def counted(forward: Callable[[], Any]) -> int:
    with ModelFlops() as flops:
        forward()
    assert not flops.unknown
    return flops.total


def per_token(*options: str) -> float | None:
    return observed(trainer_of(*GPT2, *options))[1].flops_per_unit


def test_an_mlp_takes_six_flop_a_weight_and_sample_but_no_gradient_of_what_is_frozen() -> None:
    model, x = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10)), torch.randn(5, 20)
    first, second = 20 * 30 * 5, 30 * 10 * 5
    assert counted(lambda: model(x)) == 4 * first + 6 * second  # no gradient of its input
    assert counted(lambda: model(x.clone().requires_grad_())) == 6 * (first + second)
    model[0].requires_grad_(False)
    assert counted(lambda: model(x)) == 2 * first + 4 * second  # nor of what is before the trained layer
    model.requires_grad_(False)
    assert counted(lambda: model(x)) == 2 * (first + second)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-2, -3)
        y: Tensor = self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2))
        return y


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_it_is_torchs_count_of_forward_and_backward_without_what_is_recomputed(kernel: SDPBackend) -> None:
    model, x = Attention(), torch.randn(2, 6, 8)
    with sdpa_kernel(kernel):
        found = counted(lambda: model(x))
    if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry:
        kernel = SDPBackend.MATH  # torch 2.11's counter leaves this kernel out
    with sdpa_kernel(kernel), FlopCounterMode(display=False) as whole:
        model(x).sum().backward()
    scores_again = 2 * (2 * 2) * 6 * 6 * 4 if kernel is SDPBackend.FLASH_ATTENTION else 0
    assert found == whole.get_total_flops() - scores_again


def test_where_gradients_are_off_the_count_is_the_same() -> None:
    """FSDP's model is looked at without them."""
    model, x = Attention(), torch.randn(2, 6, 8)
    expected = counted(lambda: model(x))
    with torch.no_grad():
        assert counted(lambda: model(x)) == expected
        assert counted(lambda: model(x).detach() @ torch.ones(8, 1)) == expected + 2 * 2 * 6 * 8


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


def test_a_function_with_its_own_backward_counts() -> None:
    x, weight = torch.randn(5, 20), torch.randn(20, 3, requires_grad=True)
    assert counted(lambda: Doubled.apply(x, weight)) == 2 * 2 * 5 * 20 * 3


@pytest.mark.parametrize(
    "options",
    [
        ("recipe.attention=eager", "micro_batch_size=3", "batch_size=6", "recipe.dropout=0.1"),
        ("activation_checkpointing=selective",),
        ("compile=default",),
        ("precision=bf16_master", "ema=default"),
        ("precision=nvfp4",),
        pytest.param(("recipe.chunked_loss=true", "data.vocab_size=40"), marks=needs_chunks),  # padded to 64
    ],
)
def test_gpt2_takes_6n_and_attention_whatever_the_options_of_the_training(options: tuple[str, ...]) -> None:
    assert per_token(*options) == GPT2_FLOPS


def test_a_resnet() -> None:
    """torchvision states 1.81 G multiplications for ResNet-18 at 224². The images need no gradient."""
    options = ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=64", "data=synthetic")
    found = observed(trainer_of(*options, "data.classes=1000", "batch_size=2", "steps=1"))[1]
    first = 2 * 112 * 112 * 64 * 3 * 49
    small = (2 * 1.814e9 - 2 * 512 * 1000) * (64 / 224) ** 2 + 2 * 512 * 1000
    assert found.flops_per_unit == pytest.approx(3 * small - first * (64 / 224) ** 2, rel=0.01)


@torch.library.custom_op("mantissa_test::products", mutates_args=())
def products(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def test_an_operator_without_a_formula_is_named() -> None:
    x, weight = torch.randn(5, 20), torch.randn(20, 3)
    with ModelFlops() as flops:
        products(x, weight)
        x @ weight
    unknown = "torch has no FLOP formula for mantissa_test.products"
    assert flops.per_unit("rows", 5) == (None, unknown)
    shown = utilisation.text(Utilisation(unknown=unknown, measured_tflops=1.0).facts(5.0))
    assert shown == f"MFU not known: {unknown}"
    with ModelFlops() as flops:
        torch.fft.rfft(x)
        nn.functional.bilinear(x, x, torch.randn(2, 20, 20))
    assert flops.unknown == {"aten._fft_r2c", "aten._trilinear"}


def test_mfu_is_the_share_of_all_devices_rate() -> None:
    known = Utilisation(6e9, None, "bf16", 400.0, 1000.0, devices=2)
    facts = known.facts(80_000.0)  # 4.8e14 of 8e14 and 2e15
    assert facts["mfu"] == pytest.approx(0.6)
    assert facts["mfu_of_data_sheet"] == pytest.approx(0.24)
    assert json.loads(json.dumps(facts)) == facts
    assert utilisation.text(facts) == "MFU 60.0 % (24.0 % of the data sheet)"
    alone = replace(known, data_sheet_tflops=None, devices=1).facts(100.0)
    assert utilisation.text(alone) == "MFU 0.15 %"
    assert utilisation.text(known.facts(None)) is None  # no step was timed
    assert utilisation.text(known.facts(200_000.0)) == "MFU 150.0 % (60.0 % of the data sheet)"  # it is not hidden


def test_the_run_takes_the_rate_of_its_format() -> None:
    """The rates of products are given in tests: fp32 0.1, bf16 0.8."""
    for mode, tflops in (("fp32", 0.1), ("bf16_master", 0.8)):
        manifest, found = observed(trainer_of(*GPT2, f"precision={mode}"))
        assert found == Utilisation(GPT2_FLOPS, None, mode[:4], tflops, None, 1)
        assert manifest["effective"]["matmul_tflops"] == {"fp32": 0.1, mode[:4]: tflops}
        assert json.loads(json.dumps(manifest)) == manifest


@pytest.mark.parametrize(
    ("gpu", "name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("Tesla T4", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "fp8", 330.3),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
    ],
)
def test_the_data_sheets(gpu: str, name: str, tflops: float | None) -> None:
    assert data_sheet(gpu, name) == tflops
