"""precision.modules and precision.gradients: which layer multiplies in which format, exactly, and what is refused."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mantissa.formats import FORMATS, FP8, FP32
from tests.helpers import CPU, GPT2, GPU, fit, mxfp8_of_torchao, trainer_of
from tests.trainer.precision import ocp
from tests.trainer.precision.test_block_products import assert_product, drawn, exact, mxfp8, nvfp4_values
from trainer.config.compose import compose
from trainer.errors import UserError
from trainer.precision import modes, scaled
from trainer.precision.modes import Precision
from trainer.run.record import observed

DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def skipped_without_torchaos_kernels(request: pytest.FixtureRequest) -> None:
    if "mxfp8" in request.node.name:
        mxfp8_of_torchao(native=False)
    elif "fp8" in request.node.name:
        pytest.importorskip("torchao", reason="torchao is optional")


# --- a layer, in fp64 ---


def fp8(values: ocp.Array, elements: ocp.Array = ocp.E4M3) -> ocp.Array:
    """Of a tensor with one scale, which makes its largest number the format's."""
    scale = np.float32(elements[-1] / np.abs(values).max())
    return ocp.nearest((values.astype(np.float32) * scale).astype(float), elements) / float(scale)


def fp8_rows(values: ocp.Array, elements: ocp.Array = ocp.E4M3) -> ocp.Array:
    """With a scale for each row, a power of two. Gradients are in E4M3, too."""
    scales = 2 ** np.floor(np.log2(448 / np.abs(values).max(1, keepdims=True)))
    return ocp.nearest(values * scales, ocp.E4M3) / scales


ROUNDINGS = {"fp8": fp8, "fp8 rowwise": fp8_rows, "mxfp8": mxfp8, "nvfp4": nvfp4_values}


def precision_of(format: str, **others: object) -> Precision:
    mode, _, scaling = format.partition(" ")
    return Precision(mode, fp8_scaling=scaling or None, **others)  # type: ignore[arg-type]


def trained(precision: Precision, x: Tensor, weight: Tensor, upstream: Tensor) -> list[Tensor]:
    """The result of a linear layer, and the gradients of its input and its weight, in bf16, which holds them."""
    model = nn.Sequential(nn.Linear(*reversed(weight.shape), bias=False))
    model[0].weight.data = weight.float()
    precision.convert(model, DEVICE)
    x = x.clone().requires_grad_()
    torch.manual_seed(9)
    with precision.autocast(DEVICE):
        y = model(x)
    y.backward(upstream)
    found = [y.detach(), x.grad, model[0].weight.grad]
    assert all(torch.equal(each, each.bfloat16()) for each in found)
    return [each.bfloat16() for each in found]


@pytest.mark.parametrize("format", ROUNDINGS)
def test_the_forward_product_is_of_rounded_operands(format: str) -> None:
    x, weight, upstream = drawn(1)
    rounding, (a, b) = ROUNDINGS[format], map(exact, (x, weight))
    y = trained(precision_of(format), x, weight, upstream)[0]
    assert_product(y, rounding(a), (rounding(b, 16) if format == "nvfp4" else rounding(b)).T)


@pytest.mark.parametrize("format", [name for name in ROUNDINGS if name != "nvfp4"])  # which draws: test_block_products
def test_gradients_are_products_of_rounded_operands(format: str) -> None:
    x, weight, upstream = drawn(1)
    rounding, (a, b, c) = ROUNDINGS[format], map(exact, (x, weight, upstream))
    _, of_x, of_weight = trained(precision_of(format), x, weight, upstream)
    gradient = (fp8(c, ocp.E5M2), fp8(c, ocp.E5M2).T) if format == "fp8" else (rounding(c), rounding(c.T))
    assert_product(of_x, gradient[0], rounding(b.T).T)
    assert_product(of_weight, gradient[1], rounding(a.T).T)


@pytest.mark.parametrize("format", ROUNDINGS)
def test_gradients_in_bf16_are_products_of_operands_that_the_format_does_not_round(format: str) -> None:
    x, weight, upstream = drawn(1)
    a, b, c = map(exact, (x, weight, upstream))
    plain, precision = precision_of(format), precision_of(format, gradients="bf16")
    y, of_x, of_weight = trained(precision, x, weight, upstream)
    assert torch.equal(y, trained(plain, x, weight, upstream)[0])
    assert_product(of_x, c, b)
    assert_product(of_weight, c.T, a)
    with pytest.raises(AssertionError):  # the bound tells them from those of the format
        assert_product(trained(plain, x, weight, upstream)[1], c, b)
    assert trained(precision, x[:5], weight, upstream[:5])[2].shape == weight.shape  # zeros are added, and left out


# --- which layer has which format ---


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 32)


def formats(precision: Precision) -> dict[str, str]:
    """Of each linear layer, by what it computes: the results of the formats are all different."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(32, 32)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    in_half = torch.autocast("cpu", torch.bfloat16)
    expected: dict[str, dict[str, Tensor]] = {}
    for name, layer in layers.items():
        expected[name] = {"fp32": layer(x)}
        with in_half:
            expected[name]["bf16"] = layer(x)
        for mode in {*precision.formats} - {"fp32", "bf16"}:
            product = scaled.product_of(FORMATS[mode].number, "tensorwise", None, DEVICE)
            expected[name][mode] = product(x.bfloat16(), layer.weight) + layer.bias.bfloat16()
    precision.convert(model, DEVICE, lambda model: [*model.h])
    found = {}
    with precision.autocast(DEVICE):
        for name, layer in layers.items():
            equal = [mode for mode, other in expected[name].items() if torch.equal(layer(x), other)]
            (found[name],) = equal
    numbers = {name: mode for name, mode in found.items() if FORMATS[mode].number.scaled}
    assert scaled.converted(model) == numbers
    return found


BLOCKS = [f"h.{block}.{layer}" for block in (0, 1, 2) for layer in "ab"]


@pytest.mark.parametrize(
    ("mode", "modules", "others"),
    [
        ("nvfp4", {}, {}),
        ("nvfp4", {"h.0": "bf16"}, {"h.0.a": "bf16", "h.0.b": "bf16"}),
        ("nvfp4", {"head": "nvfp4", "a": "fp32"}, {"head": "nvfp4", "h.0.a": "fp32", "h.1.a": "fp32", "h.2.a": "fp32"}),
        ("bf16", {"h.1": "nvfp4", "head": "fp32"}, {"h.1.a": "nvfp4", "h.1.b": "nvfp4", "head": "fp32"}),
        ("nvfp4", {"h.0": "fp8", "h.2.b": "mxfp8"}, {"h.0.a": "fp8", "h.0.b": "fp8", "h.2.b": "mxfp8"}),
        # The last one that matches decides, with all that it contains.
        ("nvfp4", {"h.0.a": "fp32", "h.0": "bf16"}, {"h.0.a": "bf16", "h.0.b": "bf16"}),
        ("nvfp4", {"h.0": "bf16", "h.0.a": "fp32"}, {"h.0.a": "fp32", "h.0.b": "bf16"}),
        ("bf16", {"h.0": "bf16", "h": "nvfp4"}, dict.fromkeys(BLOCKS, "nvfp4")),
        ("bf16", {"*": "nvfp4", "head": "bf16"}, dict.fromkeys(BLOCKS, "nvfp4")),
        ("bf16", {"head": "fp32", "*": "bf16"}, {}),
    ],
    ids=str,
)
def test_each_layer_multiplies_in_its_format(mode: str, modules: dict[str, str], others: dict[str, str]) -> None:
    of_mode = dict.fromkeys(BLOCKS, mode) | {"head": "bf16"}
    assert formats(Precision(mode, modules)) == of_mode | others


def test_gpt2_trains_in_several_formats_and_records_them() -> None:
    typed = (*GPT2, "precision=nvfp4", "precision.modules={h.0:bf16,h.1.mlp:fp32,lm_head:bf16}", "steps=2")
    trainer = trainer_of(*typed, "micro_batch_size=2", "precision.gradients=bf16")
    manifest, utilisation = observed(trainer)
    found = manifest["effective"]["scaled_modules"]
    assert set(found.values()) == {"nvfp4"}
    assert len(found) == 10  # of sixteen: four are of the first block, two of the second one's mlp
    assert not any(".h.0." in name or ".h.1.mlp." in name for name in found)
    assert manifest["effective"]["fp32_modules"] == ["gpt2.transformer.h.1.mlp"]
    assert manifest["requested"]["modules"] == {"h.0": "bf16", "h.1.mlp": "fp32", "lm_head": "bf16"}
    assert manifest["requested"]["gradients"] == "bf16"
    assert utilisation.unknown == "modules in bf16 and nvfp4 have no rate in common"
    assert utilisation.facts(1.0)["mfu"] is None
    assert all(record.loss.isfinite() for record in fit(trainer))


def test_all_formats_in_use_count() -> None:
    """Of the modules, too."""
    precision = Precision("bf16", {"h.0": "nvfp4", "head": "fp32"})
    assert Precision("bf16", {"head": "fp32"}).not_timed(GPU, False) is None
    assert precision.not_timed(GPU, False) == "emulated: quality only, no speed"
    assert Precision("bf16", {"h.0": "fp8"}, fp8_scaling="rowwise").rounds_as_eager
    assert Precision("bf16", {"h.0": "fp8"}).fp8_scaling == "tensorwise"
    with pytest.raises(UserError, match="mm would not reach the linear layers in nvfp4"):
        Precision("bf16", {"h.0": "nvfp4"}, fp32_ops=["mm"]).check_operators()


def test_a_missing_torchao_is_found_for_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"h.0:fp8 needs torchao .* set 'precision.modules=\{h.0:bf16,head:fp32\}'"):
        Precision("bf16", {"h.0": "fp8", "head": "fp32"}).check(CPU)
    with pytest.raises(UserError, match=r"precision=fp8 needs torchao .* set precision=bf16$"):
        Precision("fp8", {"head": "fp32"}).check(CPU)


# --- what is refused ---


@pytest.mark.parametrize(
    ("mode", "modules", "words"),
    [
        ("bf16", {"h": "nvpf4"}, "there is no such format … set 'precision.modules={h:nvfp4}'"),
        ("bf16", {"h": "fp16"}, "one 16-bit dtype"),
        ("bf16", {"h": "tf32", "head": "fp32"}, "the whole process … set 'precision.modules={head:fp32}'"),
        ("bf16_master", {"h": "bf16_master"}, "chosen for the whole model"),
        ("fp16", {"h": "nvfp4"}, "only in a run in one of bf16, fp8, mxfp8, nvfp4 … {}' or precision=bf16"),
        ("bf16_pure", {"h": "bf16", "head": "fp32"}, "only in a run in one of … set 'precision.modules={head:fp32}'"),
        ("fp32", {"h": "nvfp4"}, "no 16-bit dtype"),
        ("nvfp4", {"norm": "nvfp4"}, "norm has no linear layer"),
        ("nvfp4", {"hed": "bf16"}, "'hed' matches no submodule; similar: head"),
        (
            "nvfp4",
            {"h.0": "fp32", "a": "bf16"},
            "h.0.a:bf16 is inside of h.0 … {a:bf16,h.0:fp32}'",
        ),
        ("nvfp4", {"*": "bf16"}, "no linear layer in the model's blocks is left for it … set precision=bf16"),
        ("nvfp4", {"h": "fp8"}, "no linear layer in the model's blocks is left for it … set precision=bf16"),
    ],
    ids=str,
)
def test_formats_that_a_module_cannot_have_are_refused(mode: str, modules: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as refused:
        Precision(mode, modules).convert(Model(), DEVICE, lambda model: [*model.h])
    assert re.search(".*".join(map(re.escape, words.split(" … "))), str(refused.value)), refused.value


def test_what_a_recipe_keeps_in_fp32_has_no_other_format() -> None:
    def convert(modules: dict[str, str]) -> list[str]:
        return Precision("nvfp4", modules).convert(Model(), DEVICE, lambda model: [*model.h], lambda model: ["h.0.a"])

    for mode in ("bf16", "nvfp4"):
        with pytest.raises(UserError, match=r"h.0.a:\w+ has no effect: the recipe keeps h.0.a in fp32"):
            convert({"h.0.a": mode})
    assert convert({"h.0": "bf16"}) == ["h.0.a"]


@pytest.mark.parametrize(
    ("mode", "modules", "remedy"),
    [
        ("mxfp8", {"norm": "fp32"}, "'precision.modules={h.*.low:bf16,norm:fp32}' or precision=bf16"),
        ("mxfp8", {"h.1": "fp32"}, "'precision.modules={h.*.low:bf16,h.1:fp32}' or precision=bf16"),
        ("bf16", {"h.0": "nvfp4"}, "'precision.modules={h.0:nvfp4,h.*.low:bf16}'"),
        ("nvfp4", {"good": "bf16"}, "precision=bf16"),
        (
            "nvfp4",
            {"good": "bf16", "low": "nvfp4"},
            "precision=bf16 'precision.modules={good:bf16,low:nvfp4,h.*.low:bf16}'",
        ),
    ],
    ids=str,
)
def test_layers_whose_sides_do_not_divide_are_in_bf16_after_the_remedy(
    mode: str, modules: dict[str, str], remedy: str
) -> None:
    def model() -> nn.Module:
        blocks = [nn.ModuleDict({"low": nn.Linear(32, 8), "good": nn.Linear(32, 32)}) for _ in range(2)]
        return nn.ModuleDict({"h": nn.ModuleList(blocks), "norm": nn.LayerNorm(32)})

    with pytest.raises(UserError, match=r"low.weight is 8, which must be a multiple of") as refused:
        Precision(mode, modules).convert(model(), DEVICE)
    assert str(refused.value).endswith(f"; set {remedy}")
    for typed in refused.value.remedies:
        words = dict(re.findall(r"precision(\.modules)?=([^' ]*)", typed))
        patterns = re.findall(r"([^{},]+):(\w+)", words.get(".modules", ""))
        Precision(words.get("", mode), dict(patterns) or modules).convert(model(), DEVICE)


@pytest.mark.parametrize(("mode", "fits"), [("bf16", False), ("fp32", False), ("nvfp4", True)])
def test_gradients_in_bf16_are_for_scaled_layers(mode: str, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(UserError, match="gradients has no effect"):
        Precision(mode, gradients="bf16")
    with pytest.raises(UserError, match=r"precision.gradients=fp8 must be bf16"):
        Precision("nvfp4", gradients="fp8")


@pytest.mark.parametrize("mode", ["fp16", "fp32", "bf16"])
def test_another_mode_leaves_out_what_has_no_effect_there(mode: str) -> None:
    precision = Precision("fp8", {"a": "fp32", "b": "bf16"}, "bf16", fp8_scaling="rowwise", fp32_ops=["softmax"])
    other = precision.in_mode(mode)
    kept = {"fp16": {"a": "fp32"}, "fp32": {}, "bf16": {"a": "fp32", "b": "bf16"}}[mode]
    assert (other.mode, other.modules, other.gradients, other.fp8_scaling) == (mode, kept, None, None)
    assert other.fp32_ops == (["softmax"] if FORMATS[mode].number is not FP32 else None)
    assert precision.in_mode("fp8") == precision


# --- as it is typed ---


@pytest.mark.parametrize(
    ("typed", "modules"),
    [
        ("{*.h.0:bf16,lm_head:fp32}", {"*.h.0": "bf16", "lm_head": "fp32"}),
        ("{0.10:bf16,1:fp32}", {"[0].10": "bf16", "[1]": "fp32"}),  # numbers are names here
        (r"{h.\[01\]:bf16}", {"h.[01]": "bf16"}),
        ("{h.[01].a:bf16, *[2]:fp32}", {"h.[01].a": "bf16", "*[2]": "fp32"}),
    ],
)
def test_every_name_pattern_can_be_typed(typed: str, modules: dict[str, str]) -> None:
    found = compose(["recipe=bignet", "precision=bf16", f"precision.modules={typed}"]).precision
    assert list(found.modules.items()) == list(modules.items())
    assert FP8 not in {FORMATS[mode].number for mode in found.formats}
