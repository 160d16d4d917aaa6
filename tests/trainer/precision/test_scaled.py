"""precision=fp8, mxfp8, nvfp4: what is refused, what is converted, that it trains and says that it is emulated."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mantissa.formats import FORMATS, FP8, MXFP8, NVFP4, Number
from tests.helpers import CPU, GPT2, GPU, compose, fit, mxfp8_of_torchao, trainer_of
from trainer.errors import UserError
from trainer.hardware import EMULATED
from trainer.precision import modes, scaled
from trainer.precision.kernels import not_timed_here
from trainer.precision.modes import SCALINGS, Precision
from trainer.run.forecast import forecast
from trainer.run.record import observed

SCALED = [name for name, row in FORMATS.items() if row.number.scaled]
DEVICE = torch.device("cpu")
LLAMA = ("recipe=llama", *GPT2[1:], "recipe.layers=1", "steps=3", "micro_batch_size=2")


@pytest.fixture(autouse=True)
def skipped_without_torchaos_kernels(request: pytest.FixtureRequest) -> None:
    if "mxfp8" in request.node.name:
        mxfp8_of_torchao(native=False)


def convert(model: nn.Module, number: Number = MXFP8, islands: list[str] | None = None) -> nn.Module:
    numbers = scaled.layers_of(model, [], islands or [], number, [])
    scaled.convert(model, numbers, {number: lambda x, weight: 2 * F.linear(x.float(), weight)})
    return model


def test_what_is_emulated_is_not_timed() -> None:
    assert not_timed_here("fp8", GPU) is None
    assert not_timed_here("mxfp8", GPU) == "emulated: quality only, no speed"


def test_a_missing_torchao_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "find_spec", lambda name: None)
    for mode in ("fp8", "mxfp8"):
        with pytest.raises(UserError, match=rf"precision={mode} needs torchao"):
            Precision(mode).check(CPU)
    Precision("nvfp4").check(CPU)
    monkeypatch.setattr(modes, "find_spec", lambda name: name)
    Precision("fp8").check(CPU)
    monkeypatch.setattr(modes, "version", lambda name: "0.9.0+cpu")
    with pytest.raises(UserError, match=r"torchao 0.18"):
        Precision("fp8").check(CPU)


def test_an_operator_inside_of_the_product_is_refused() -> None:
    """It would be ignored, or change the emulation."""
    for name in ("linear", "addmm", "mm"):
        with pytest.raises(UserError, match=rf"precision.fp32_ops: {name} .*precision.modules"):
            Precision("nvfp4", fp32_ops=[name]).check_operators()
    Precision("nvfp4", fp32_ops=["softmax", "matmul"]).check_operators()


def test_plain_linear_layers_in_blocks_outside_islands() -> None:
    class Derived(nn.Linear):
        pass

    island = nn.ModuleDict({"inside": nn.Linear(32, 32)})
    model = nn.ModuleDict({"good": nn.Linear(32, 64), "derived": Derived(32, 32), "norm": nn.LayerNorm(32)})
    model["island"] = island
    assert [*scaled.converted(convert(copy.deepcopy(model)))] == ["good", "island.inside"]
    assert [*scaled.converted(convert(copy.deepcopy(model), islands=["island"]))] == ["good"]
    assert scaled.layers_of(model, [island], [], NVFP4, []) == {"island.inside": NVFP4}


def trained(mode: str, layer: nn.Module, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """The first ``rows`` of what a converted layer gives for x, and its gradients."""
    number = FORMATS[mode].number
    scaled.convert(nn.Sequential(layer), {"0": number}, {number: scaled.product_of(number, "tensorwise", None, DEVICE)})
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x).flatten(0, -2)[:rows]
    torch.manual_seed(0)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("mode", SCALED)
def test_any_number_of_rows_trains_as_with_rows_of_zeros(mode: str) -> None:
    layer, x = nn.Linear(32, 64), torch.randn(2, 3, 32)
    more = torch.cat([x.flatten(0, 1), torch.zeros(26, 32)])
    one, other = trained(mode, copy.deepcopy(layer), x, 6), trained(mode, layer, more, 6)
    if mode == "nvfp4":  # which draws for 16 rows or for 32
        assert torch.equal(one[0], other[0])
        assert F.cosine_similarity(one[1].flatten(), other[1].flatten(), 0) > 0.95
    else:
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("mode", SCALED)
def test_no_rows_give_an_empty_result_and_no_gradient(mode: str) -> None:
    """Such as an expert's that gets no token."""
    layer = nn.Linear(32, 64)
    y, *gradients = trained(mode, layer, torch.randn(2, 0, 32), 0)
    assert y.shape == (0, 64)
    assert not any(map(torch.count_nonzero, gradients))
    assert [gradient.shape for gradient in gradients] == [(64, 32), (64,)]
    with torch.no_grad():
        assert layer(torch.randn(0, 32)).shape == (0, 64)


def test_outside_of_autocast_and_in_a_copy_a_layer_multiplies_by_its_own_weight() -> None:
    first = convert(nn.Sequential(nn.Linear(32, 32)))
    x, second = torch.randn(32, 32), copy.deepcopy(first)
    nn.init.zeros_(second[0].weight)
    assert torch.equal(first(x), F.linear(x, first[0].weight, first[0].bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(second(x), second[0].bias.expand(32, 32))
        assert not torch.equal(first(x), second(x))


@pytest.mark.parametrize("mode", SCALED)
def test_a_transposed_weight_has_the_same_product(mode: str) -> None:
    """transformers' Conv1D holds in × out."""
    from transformers.pytorch_utils import Conv1D

    linear, conv, x = nn.Linear(64, 32), Conv1D(32, 64), torch.randn(3, 32, 64)
    conv.weight.data, conv.bias.data = linear.weight.data.t().clone(), linear.bias.data.clone()
    (y, gradient, _), (other, transposed, _) = (trained(mode, layer, x, 96) for layer in (linear, conv))
    assert torch.equal(y, other)
    assert torch.equal(gradient, transposed.t())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_fp8_has_the_scaling_that_is_asked_for(scaling: str) -> None:
    """One huge row takes the bits of the others only where all share one scale."""
    product = scaled.ARITHMETIC[FP8].product(scaling, False)
    x = torch.cat([torch.full((1, 32), 1e6), torch.full((15, 32), 1e-3)]).bfloat16()
    y = product(x, torch.eye(32))
    assert bool((y[1:] == 0).all()) == (scaling == "tensorwise")


def test_a_llama_is_forecast_and_keeps_what_is_in_fp32_and_its_head() -> None:
    mxfp8_of_torchao(native=False)
    assert forecast(compose(*LLAMA, "precision=mxfp8", "device=cpu")).peak_bytes > 0
    trainer = trainer_of(*LLAMA, "precision=mxfp8", "precision.modules={*.v_proj:fp32}")
    names = scaled.converted(trainer.model)
    assert len(names) == 6  # of seven: v_proj is an island, and the output layer has the loss in it
    assert all("_proj" in name and "v_proj" not in name for name in names)
    assert all(record.loss.isfinite() for record in fit(trainer))


@pytest.mark.parametrize(
    ("layers", "number", "named"),
    [
        ({"wide": (32, 80)}, MXFP8, "wide.weight is 80"),  # kept in fp32, nothing would be left
        ({"wide": (32, 80), "good": (32, 32)}, MXFP8, "modules={wide:bf16}"),
        ({"h.0.low": (32, 8), "h.1.low": (32, 8), "h.1.good": (32, 32)}, MXFP8, "modules={h.*.low:bf16}"),
        ({}, FP8, "no linear layer"),
    ],
)
def test_sides_that_do_not_divide_are_refused_with_the_pattern_that_keeps_them(
    layers: dict[str, tuple[int, int]], number: Number, named: str
) -> None:
    model = nn.ModuleDict({"h": nn.ModuleDict({"0": nn.ModuleDict(), "1": nn.ModuleDict()})})
    for name, sides in layers.items():
        model.get_submodule(name.rpartition(".")[0]).add_module(name.rpartition(".")[2], nn.Linear(*sides))
    with pytest.raises(UserError) as refused:
        Precision(number.name).convert(model, DEVICE)
    assert named in str(refused.value)
    assert ("modules={" in str(refused.value)) == ("modules={" in named)


@pytest.mark.parametrize("mode", SCALED)
def test_gpt2_trains_about_as_in_bf16_and_says_what_is_scaled(mode: str) -> None:
    losses = []
    for precision in ("bf16", mode):
        trainer = trainer_of(*GPT2, f"precision={precision}", "steps=4", "micro_batch_size=2")
        losses.append(torch.stack([record.loss for record in fit(trainer)]))
    names = scaled.converted(trainer.model)
    assert set(names.values()) == {mode}
    assert len(names) == 16
    assert all(".h." in name for name in names)
    assert torch.allclose(losses[0], losses[1], rtol=0.02)
    assert not torch.equal(losses[0], losses[1])
    effective = observed(trainer)[0]["effective"]
    assert (effective["weights_dtype"], effective["optimizer_dtype"]) == ("float32", "float32")
    assert effective["scaled_modules"] == names
    assert EMULATED in effective["arithmetic"]
